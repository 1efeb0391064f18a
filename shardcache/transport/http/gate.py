"""Link between the thread that reads an answer and the one that takes the daemon's messages."""

import concurrent.futures
import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CancelledError(Exception):
    """The request was cancelled."""


class Gate:
    """Pauses, credit, commit and cancellation of one request, passed from thread to thread.

    Args:
        limit_bytes: number of bytes of the body that may be read before more credit is granted.

    Attributes:
        received_bytes: bytes of the body so far.
        written_bytes: those that are in the file.
        asked_idle_s: when the request was sent over a reused connection that has not answered yet.
    """

    def __init__(self, limit_bytes: float) -> None:
        self._limit_bytes = limit_bytes
        self._paused = False
        self._cancelled = False
        self._committed = False
        self._writes = False  # True while the file is written to
        self._interrupt: Callable[[], object] | None = None  # see `cancellable`
        self._changed = threading.Condition()
        self.received_bytes = 0
        self.written_bytes = 0
        self.asked_idle_s: float | None = None

    # Called by the thread that reads the answer

    def ready(self, wanted_bytes: int) -> int:
        """Wait until bytes may be read, and return their number. Raises CancelledError."""
        with self._changed:
            self._changed.wait_for(lambda: self._cancelled or self._may_read)
            self.check()
        return int(min(wanted_bytes, self._limit_bytes - self.received_bytes))

    @property
    def _may_read(self) -> bool:
        return not self._paused and not self.used_up

    def receive(self, count: int) -> bool:
        """Count received bytes.

        Returns True if they are the first, or the last that there is credit for: these are reported
        to the daemon without delay.
        """
        is_first = not self.received_bytes
        self.received_bytes += count
        return is_first or self.used_up

    @property
    def used_up(self) -> bool:
        """True while there is no byte credit left."""
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

    def wait_for_commit(self) -> None:
        """Wait until the body may be written. Raises CancelledError."""
        with self._changed:
            self._changed.wait_for(lambda: self._cancelled or self._committed)
            self.check()

    @contextmanager
    def cancellable(self, interrupt: Callable[[], object]) -> Iterator[None]:
        """Have a cancellation call `interrupt`, which ends the block with an error.

        Raises CancelledError for that.
        """
        with self._changed:
            self.check()
            self._interrupt = interrupt
        try:
            yield
        except (OSError, http.client.HTTPException, concurrent.futures.CancelledError):
            self.check()
            raise
        finally:
            with self._changed:
                self._interrupt = None

    def check(self) -> None:
        """Raise CancelledError if the request was cancelled."""
        if self._cancelled:
            raise CancelledError

    # Called by the thread that takes the daemon's messages

    def pause(self) -> None:
        """Stop reading before the next bytes."""
        with self._changed:
            self._paused = True

    def resume(self, limit_bytes: float) -> None:
        """Continue, up to `limit_bytes` in all."""
        with self._changed:
            self._paused = False
            self._limit_bytes = limit_bytes
            self._changed.notify_all()

    def commit(self) -> None:
        """Allow a held body to be written."""
        with self._changed:
            self._committed = True
            self._changed.notify_all()

    def cancel(self) -> bool:
        """Wake the thread that reads, wherever it waits, to raise CancelledError.

        Returns True if nothing will be written from now on.
        """
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()
            if self._interrupt is not None:
                self._interrupt()
            return not self._writes
