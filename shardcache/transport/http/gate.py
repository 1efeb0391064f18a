"""Link between the thread that reads an answer and the thread that takes the daemon's messages.

A worker is a process that sends requests for the daemon. It has one `Gate` for each request,
through which the daemon pauses the request, cancels it, and grants it byte credit: the number of
bytes of the body that may be read. A held body waits in memory until the daemon commits it, that
is, allows it to be written.
"""

import concurrent.futures
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CancelledError(Exception):
    """The request was cancelled."""


class Gate:
    """Pauses, byte credit, commit and cancellation of one request.

    Args:
        limit_bytes: number of bytes of the body that may be read before more credit is granted;
            infinite for no limit.

    Attributes:
        received_bytes: number of bytes of the body received so far.
        written_bytes: number of bytes of the body that are in the file.
        first_byte_s: when the first bytes of the body were received, by the monotonic clock; None
            before that.
        unanswered_since_s: when the request was sent over a reused connection, by the monotonic
            clock; None if the connection is new, or the answer has begun. If the request is
            cancelled before its answer, the connection may count as silent
            (`Pool.record_cancellation`).
    """

    def __init__(self, limit_bytes: float) -> None:
        self._limit_bytes = limit_bytes
        self._is_paused = False
        self._is_cancelled = False
        self._is_committed = False
        self._is_writing = False  # True while the file is written to
        # Called to end the blocking call in progress (see `cancellable`); None if there is none.
        self._interrupt: Callable[[], object] | None = None
        self._changed = threading.Condition()
        self.received_bytes = 0
        self.written_bytes = 0
        self.first_byte_s: float | None = None
        self.unanswered_since_s: float | None = None

    # Called by the thread that reads the answer

    def wait_to_read(self, wanted_bytes: int) -> int:
        """Wait until bytes of the body may be read; return how many, up to `wanted_bytes`.

        Raises CancelledError.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_cancelled or self._may_read)
            self.raise_if_cancelled()
        return int(min(wanted_bytes, self._limit_bytes - self.received_bytes))

    @property
    def _may_read(self) -> bool:
        """True if the request is not paused and has byte credit left."""
        return not self._is_paused and not self.is_credit_used_up

    def record_received(self, count: int) -> None:
        """Count bytes of the body that were received."""
        if self.first_byte_s is None:
            self.first_byte_s = time.monotonic()
        self.received_bytes += count

    @property
    def is_credit_used_up(self) -> bool:
        """True while there is no byte credit left."""
        return self.received_bytes >= self._limit_bytes

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Mark the block as writing to the file, so that a cancellation waits for its end.

        Raises CancelledError if the request was cancelled before the block.
        """
        with self._changed:
            self.raise_if_cancelled()
            self._is_writing = True
        try:
            yield
        finally:
            self._is_writing = False

    def wait_for_commit(self) -> None:
        """Wait until the daemon allows a held body to be written. Raises CancelledError."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_cancelled or self._is_committed)
            self.raise_if_cancelled()

    @contextmanager
    def cancellable(self, interrupt: Callable[[], object]) -> Iterator[None]:
        """Let a cancellation of the request end the block.

        Raises CancelledError in place of the error with which the block then ends.

        Args:
            interrupt: makes the blocking call in the block fail; called by a cancellation.
        """
        with self._changed:
            self.raise_if_cancelled()
            self._interrupt = interrupt
        try:
            yield
        except (OSError, http.client.HTTPException, concurrent.futures.CancelledError):
            self.raise_if_cancelled()
            raise
        finally:
            with self._changed:
                self._interrupt = None

    def raise_if_cancelled(self) -> None:
        """Raise CancelledError if the request was cancelled."""
        if self._is_cancelled:
            raise CancelledError

    # Called by the thread that takes the daemon's messages

    def pause(self) -> None:
        """Stop reading before the next bytes."""
        with self._changed:
            self._is_paused = True

    def resume(self, limit_bytes: float) -> None:
        """Continue after a pause.

        Args:
            limit_bytes: number of bytes of the body that may be read in total, those already read
                included.
        """
        with self._changed:
            self._is_paused = False
            self._limit_bytes = limit_bytes
            self._changed.notify_all()

    def commit(self) -> None:
        """Allow a held body to be written."""
        with self._changed:
            self._is_committed = True
            self._changed.notify_all()

    def cancel(self) -> bool:
        """Wake the thread that reads the answer, wherever it waits; it raises CancelledError.

        Return True if nothing will be written to the file from now on, False if a write is in
        progress.
        """
        with self._changed:
            self._is_cancelled = True
            self._changed.notify_all()
            if self._interrupt is not None:
                self._interrupt()
            return not self._is_writing
