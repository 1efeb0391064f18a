"""Names that lead where a test wants."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from support.shim import library


def lead(monkeypatch: pytest.MonkeyPatch, name: str, *addresses: str, port: int | None = None) -> None:
    """Let a name lead to these addresses, in this order; and to another port than is asked for, where one is given."""
    real = socket.getaddrinfo

    def getaddrinfo(host: str | bytes | None, wanted_port: Any, *args: Any, **options: Any) -> list[Any]:
        if host not in (name, name.encode()):
            return real(host, wanted_port, *args, **options)
        at = port or wanted_port
        return [found for address in addresses for found in real(address, at, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


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
