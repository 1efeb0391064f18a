"""Pause, byte credit and cancellation of a blocking read in a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shardcache.transport.connections import AnySocket


class CancelledError(Exception):
    """Nobody waits for the answer any more."""


class Gate:
    """Between the thread that reads an answer and the one that hears from the daemon.

    Args:
        limit_bytes: how much of the body may be received until there is more credit.

    Attributes:
        received_bytes: how much was.
        asked_idle_s: time when the request was sent over a connection that was idle before; None once that answered.
    """

    def __init__(self, limit_bytes: float) -> None:
        self._limit_bytes = limit_bytes
        self._paused = self._cancelled = self._committed = self._writes = False
        self._socket: AnySocket | None = None
        self._changed = threading.Condition()
        self.received_bytes = 0
        self.asked_idle_s: float | None = None

    def ready(self, wanted_bytes: int) -> int:
        """Wait until bytes may be read, and return how many. Raises CancelledError."""
        if self._paused or self._cancelled or self.used_up:
            with self._changed:
                self._changed.wait_for(lambda: self._cancelled or not (self._paused or self.used_up))
                self.check()
        return int(min(wanted_bytes, self._limit_bytes - self.received_bytes))

    @property
    def used_up(self) -> bool:
        """True while there is no credit for more bytes."""
        return self.received_bytes >= self._limit_bytes

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write to the file during the block. Raises CancelledError."""
        with self._changed:
            self.check()
            self._writes = True
        try:
            yield
        finally:
            self._writes = False

    def committed(self) -> None:
        """Wait until the body may be written. Raises CancelledError."""
        with self._changed:
            self._changed.wait_for(lambda: self._cancelled or self._committed)
            self.check()

    def connected(self, sock: AnySocket | None) -> None:
        """Keep the socket that a cancellation closes. Raises CancelledError."""
        with self._changed:
            self._socket = sock
            if sock is not None:
                self.check()

    # by the other thread

    def pause(self) -> None:
        """Stop reading before the next bytes."""
        with self._changed:
            self._paused = True

    def resume(self, limit_bytes: float) -> None:
        """Go on, up to so many bytes in all."""
        with self._changed:
            self._paused, self._limit_bytes = False, limit_bytes
            self._changed.notify_all()

    def commit(self) -> None:
        """Let a body that is held be written."""
        with self._changed:
            self._committed = True
            self._changed.notify_all()

    def cancel(self) -> bool:
        """Wake the thread, wherever it waits; return whether nothing is written from now on."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()
            if self._socket is not None:
                with suppress(OSError):  # the peer was faster
                    self._socket.shutdown(socket.SHUT_RDWR)  # whichever thread reads it meets the stream's end
            return not self._writes

    def check(self) -> None:
        """Raise CancelledError if nobody waits any more."""
        if self._cancelled:
            raise CancelledError
