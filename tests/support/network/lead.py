"""Names that lead where a test wants."""

from __future__ import annotations

import json
import os
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pytest

from support.disks.shim import library
from support.network.leading import sitecustomize

_FOLDER = Path(sitecustomize.__file__).parent


def lead(monkeypatch: pytest.MonkeyPatch, name: str, *addresses: str, port: int | None = None) -> None:
    """Let a name lead to these addresses, in this order; and to another port than is asked for, where one is given.

    That holds for this process and for each Python that it starts from now on.
    """
    table = json.loads(os.environ.get(sitecustomize.VARIABLE, "{}"))
    table[name] = [(address, port) for address in addresses]
    monkeypatch.setenv(sitecustomize.VARIABLE, json.dumps(table))
    monkeypatch.setenv("PYTHONPATH", str(_FOLDER), prepend=os.pathsep)
    monkeypatch.setattr(socket, "getaddrinfo", sitecustomize.getaddrinfo)


class Lead:
    """A name that leads a new process to two addresses, below whatever event loop resolves it; needs a C compiler.

    Args:
        count: file that notes the attempts to connect to the first address.
    """

    def __init__(self, name: str, first: str, second: str, count: Path) -> None:
        self._count = count
        self.env = {
            "LD_PRELOAD": str(library(Path(__file__).with_suffix(".c"))),
            **{"LEAD_NAME": name, "LEAD_FIRST": first, "LEAD_SECOND": second, "LEAD_COUNT": str(count)},
        }

    @property
    def attempts(self) -> int:
        """Number of attempts to connect to the first address."""
        return self._count.stat().st_size if self._count.exists() else 0


SILENT = "127.0.0.2"


class SilentAddress:
    """A listening socket whose queue is full, so that the kernel drops what comes; a context manager.

    Args:
        port: where it listens, at `SILENT`.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        listener = self._stack.enter_context(socket.socket())
        listener.bind((SILENT, self._port))
        listener.listen(0)
        while self._is_taken():
            pass
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _is_taken(self) -> bool:
        """Tell whether the kernel takes one more connection, and keep it."""
        caller = self._stack.enter_context(socket.socket())
        caller.settimeout(0.2)
        try:
            caller.connect((SILENT, self._port))
        except TimeoutError:
            return False
        return True
