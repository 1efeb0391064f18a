"""An address of the loopback that nobody answers at: connections to it are neither taken nor refused."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from types import TracebackType
from typing import Self

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

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
