"""The thread that sends files to sockets, for all clients of the S3 endpoint.

`sending` hands the bytes of each body to it as a `FileSend`. The kernel copies them (sendfile), so
that they never pass through this process. One thread suffices, because it never waits for a single
client: it waits for all sockets at the same time (epoll), and sends to those that accept bytes.
With several threads, each would have to wait for the GIL after each call.
"""

import asyncio
import os
import select
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

# Maximum number of bytes that are sent to one client before the next client gets its turn.
_TURN_BYTES = 4 * 1024 * 1024
# The kernel is asked to read this many bytes ahead of those being sent. Otherwise, sendfile would
# wait for the disk again and again, and the other clients would wait as well.
_AHEAD_BYTES = 8 * 1024 * 1024


def _new_future() -> "asyncio.Future[None]":
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class FileSend:
    """Bytes of a file that are being sent to a socket.

    Attributes:
        socket_fd: descriptor of the non-blocking socket; no other `FileSend` may have it.
        file_fd: descriptor of the file.
        sent_to: offset in the file of the end of the bytes that the socket has accepted.
        end: offset in the file of the end of the bytes.
        is_withdrawn: True once the thread should send no more bytes.
        ended: done once the thread no longer uses the descriptors. It raises ConnectionError if the
            client has disconnected, and OSError if the file cannot be read.
    """

    socket_fd: int
    file_fd: int
    sent_to: int
    end: int
    is_withdrawn: bool = False
    ended: "asyncio.Future[None]" = field(default_factory=_new_future)
    _read_to: int = 0  # offset up to which the kernel was asked to read the file

    def advance(self) -> bool:
        """Send what the socket accepts, up to `_TURN_BYTES`; return whether everything is sent.

        Raises OSError.
        """
        self.read_ahead()
        wanted_bytes = min(self.end - self.sent_to, _TURN_BYTES)
        try:
            sent_bytes = os.sendfile(self.socket_fd, self.file_fd, self.sent_to, wanted_bytes)
        except BlockingIOError:
            return False
        if sent_bytes == 0:
            raise OSError("the file is shorter than it was")
        # There is no second call for bytes that the socket did not accept: it is full.
        self.sent_to += sent_bytes
        return self.sent_to >= self.end

    def read_ahead(self) -> None:
        """Ask the kernel to read the bytes that are sent next into memory, if it is time to."""
        first = max(self._read_to, self.sent_to)
        ahead_bytes = first - self.sent_to
        if first >= self.end or ahead_bytes > _AHEAD_BYTES // 2:
            return  # ask for a few large reads, not for a small one after each call
        self._read_to = min(self.end, first + _AHEAD_BYTES)
        # Asking takes 120 µs even if the bytes are in memory, a tenth of the time in which they are
        # sent. If the last byte is in memory, the others very probably are, too.
        if not self._is_in_memory(self._read_to - 1):
            advised_bytes = self._read_to - first
            os.posix_fadvise(self.file_fd, first, advised_bytes, os.POSIX_FADV_WILLNEED)

    def _is_in_memory(self, offset: int) -> bool:
        """Return whether a byte of the file is known to be in the kernel's page cache."""
        try:
            return os.preadv(self.file_fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except OSError:  # it is not, or the filesystem does not support the flag
            return False


class SendThread:
    """Sends files to all clients in one thread, until `close`."""

    def __init__(self) -> None:
        # The event loop appends sends that are new or withdrawn; the thread takes them.
        self._changed: deque[FileSend] = deque()
        # This descriptor is never closed: the event loop may write to it after the thread's end.
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_closed = False
        self._has_ended = False
        # Only the thread uses these two: the sends by their sockets' descriptors, and their epoll.
        self._sends: dict[int, FileSend] = {}
        self._poll = select.epoll()
        # A daemon thread: if a broken disk blocks it in a call, the process can still exit.
        threading.Thread(target=self._run, name="s3-send", daemon=True).start()

    def add(self, send: FileSend) -> None:
        """Begin to send. `send.ended` is done once all bytes are sent, or after an error."""
        self._hand_over(send)

    def withdraw(self, send: FileSend) -> None:
        """Stop sending. `send.ended` is done once the thread no longer uses the descriptors."""
        send.is_withdrawn = True
        self._hand_over(send)

    def close(self) -> None:
        """Tell the thread to end after its present system call; return without waiting for it."""
        self._is_closed = True
        self._wake()

    def _hand_over(self, send: FileSend) -> None:
        """Hand a send that is new or withdrawn over to the thread."""
        self._changed.append(send)
        self._wake()
        if self._has_ended:
            self._abort_changed()

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        """Send until `close`; then abort all sends."""
        try:
            self._poll.register(self._wake_fd, select.EPOLLIN)
            while not self._is_closed:
                for fd, _ in self._poll.poll():
                    if fd == self._wake_fd:
                        os.eventfd_read(fd)
                        self._take_changes()
                    elif fd in self._sends:  # it may have been withdrawn a moment ago
                        self._advance(self._sends[fd])
        finally:
            for send in list(self._sends.values()):
                self._end(send, ConnectionAbortedError("the server has ended"))
            self._poll.close()
            # From now on, the event loop aborts what it appends. What it has appended by now is
            # aborted here.
            self._has_ended = True
            self._abort_changed()

    def _take_changes(self) -> None:
        """Begin new sends, and end those that were withdrawn."""
        while self._changed:
            send = self._changed.popleft()
            if send.is_withdrawn:
                self._end(send)
                continue
            self._sends[send.socket_fd] = send
            try:
                send.read_ahead()
                self._poll.register(send.socket_fd, select.EPOLLOUT)
            except OSError as exn:
                self._end(send, exn)

    def _abort_changed(self) -> None:
        """Abort the sends that the thread can no longer take.

        Both the thread and the event loop do this, maybe at the same time. So an item that is seen
        in the queue may be gone before it is taken.
        """
        with suppress(IndexError):  # the queue is empty
            while True:
                send = self._changed.popleft()
                _report_end(send, ConnectionAbortedError("the server has ended"))

    def _advance(self, send: FileSend) -> None:
        """Send further bytes to a socket that accepts some; end the send after the last ones."""
        try:
            if send.advance():
                self._end(send)
        except OSError as exn:
            self._end(send, exn)

    def _end(self, send: FileSend, error: OSError | None = None) -> None:
        """Forget a send, and report its end.

        A send that is withdrawn may not have begun, or may have ended already. Another send may
        then use its socket.
        """
        if self._sends.get(send.socket_fd) is send:
            del self._sends[send.socket_fd]
            with suppress(OSError):  # it could not be registered
                self._poll.unregister(send.socket_fd)
        _report_end(send, error)


def _report_end(send: FileSend, error: OSError | None) -> None:
    """Report a send's end to the coroutine that waits for it, in the event loop's thread."""
    with suppress(RuntimeError):  # the event loop has ended
        send.ended.get_loop().call_soon_threadsafe(_set_ended, send.ended, error)


def _set_ended(ended: "asyncio.Future[None]", error: OSError | None) -> None:
    """Set the result of a send."""
    if ended.done():  # a send that is withdrawn after its end is reported twice
        return
    if error is None:
        ended.set_result(None)
    else:
        ended.set_exception(error)
