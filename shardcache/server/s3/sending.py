"""Sending of files to sockets by the kernel (sendfile), without copying bytes into this process.

`object_answers` sends the bodies of long answers in this way. The bytes are sent in steps, each in
a thread, because the file may have to be read from the disk. A step ends when the socket is full.
While a client does not read, only the event loop waits for the client, and no thread does. A client
gives way when no more of its bytes are sent, so that others get their cache space.
"""

import asyncio
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

T = TypeVar("T")

# Number of threads. More threads would wait for the interpreter's lock: on two cores, 8 threads
# take a fifth more processor time.
_THREADS = 4
# A step ends after `_STEP_S`, or once the client has read nothing for `_PATIENCE_MS`, so that other
# clients get their turn. Most ranges are sent in one step, because each further step takes a turn
# of the event loop.
_STEP_S = 0.1
_PATIENCE_MS = 20
# Maximum number of bytes in one call of sendfile. Without it, a call would not end as long as its
# client reads fast enough.
_CALL_BYTES = 32 * 1024 * 1024
# Interval at which the transport's buffer is checked.
_PAUSE_S = 0.005
# A client that has read nothing for this time gives way to others that need the cache space of its
# bytes. While a client reads, there is room in the socket again after a shorter time.
_GIVES_WAY_S = 0.5


class SlowClientError(Exception):
    """The client has read nothing for too long."""


@dataclass(slots=True)
class Sending:
    """Sends one response from files to its client.

    Attributes:
        stall_s: maximum time for which the client may read nothing.
        sent_bytes: number of bytes that the socket has accepted, including those of a `send` that
            was cancelled.
    """

    _transport: asyncio.Transport
    _socket: socket.socket  # a duplicate: the event loop keeps its own for the transport
    _threads: ThreadPoolExecutor
    stall_s: float
    sent_bytes: int = 0

    async def flushed(self) -> None:
        """Wait until the transport's buffer is empty. Raises SlowClientError."""
        deadline_s = time.monotonic() + self.stall_s
        pause_s = 0.0
        while self._transport.get_write_buffer_size():
            if time.monotonic() > deadline_s:
                raise SlowClientError
            await asyncio.sleep(pause_s)
            pause_s = _PAUSE_S

    async def send(
        self,
        fd: int,
        start: int,
        end: int,
        gives_way: Callable[[], bool] | None = None,
    ) -> int:
        """Send bytes of a file; return the offset of the end of the bytes that were sent.

        Args:
            fd: the open file.
            start: offset of the first byte.
            end: offset of the end of the bytes.
            gives_way: returns True if others need the cache space of these bytes. Then no more
                bytes are sent once the client has read nothing for `_GIVES_WAY_S`. None to send all
                bytes in any case.

        Raises SlowClientError, ConnectionError if the client has disconnected, and OSError if the
        file cannot be read.
        """
        while start < end:
            if self._transport.is_closing():
                raise ConnectionResetError("the client disconnected")
            sent_bytes = await self._in_thread(partial(self._step, fd, start, end - start))
            start += sent_bytes
            if sent_bytes == 0 and not await self.writable(gives_way):
                break
        return start

    async def writable(self, gives_way: Callable[[], bool] | None = None) -> bool:
        """Wait until the client has read something. Raises SlowClientError.

        Returns False if the client has read nothing for `_GIVES_WAY_S`, and `gives_way` then
        returns True.
        """
        deadline_s = time.monotonic() + self.stall_s
        interval_s = self.stall_s
        if gives_way is not None:
            interval_s = _GIVES_WAY_S
        loop = asyncio.get_running_loop()
        is_writable = asyncio.Event()
        fd = self._socket.fileno()
        loop.add_writer(fd, is_writable.set)
        try:
            while not await _is_set_within(is_writable, interval_s):
                if time.monotonic() >= deadline_s:
                    raise SlowClientError
                if gives_way is not None and gives_way():
                    return False
        finally:
            loop.remove_writer(fd)
        return True

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Return the result of work in a thread.

        Even if this call is cancelled, it waits for the work's end. The work uses open descriptors,
        which the caller closes after this call; other files may then get their numbers.
        """
        job = asyncio.get_running_loop().run_in_executor(self._threads, work)
        return await _finished(job)

    def _step(self, fd: int, start: int, size_bytes: int) -> int:
        """Send as many bytes as the socket accepts in one step; return their number. Blocks.

        Args:
            size_bytes: maximum number of bytes.
        """
        out = self._socket.fileno()
        step_end_s = time.monotonic() + _STEP_S
        sent_bytes = 0
        poll = select.poll()
        poll.register(out, select.POLLOUT)
        while sent_bytes < size_bytes:
            try:
                call_bytes = min(size_bytes - sent_bytes, _CALL_BYTES)
                taken_bytes = os.sendfile(out, fd, start + sent_bytes, call_bytes)
            except BlockingIOError:
                if not poll.poll(_PATIENCE_MS):
                    break
                continue
            if taken_bytes == 0:
                raise OSError("the file is shorter than it was")
            sent_bytes += taken_bytes
            self.sent_bytes += taken_bytes
            if time.monotonic() >= step_end_s:
                break
        return sent_bytes


class Sender:
    """Sends files to clients. All responses share the sender's threads.

    Args:
        stall_s: maximum time for which a client may read nothing.
        is_memory: True if the files are in memory (tmpfs), so that no read waits for a disk.
    """

    def __init__(self, stall_s: float, *, is_memory: bool) -> None:
        self._stall_s = stall_s
        self._threads = ThreadPoolExecutor(_THREADS, "s3-send")
        # With this flag, a read fails if it would have to wait for the disk. tmpfs does not support
        # the flag, and does not need it.
        self._read_flags = 0 if is_memory else os.RWF_NOWAIT

    @contextmanager
    def sending(self, transport: asyncio.Transport) -> Iterator[Sending]:
        """Provide a `Sending` for one response to the client of a transport."""
        sock: socket.socket = transport.get_extra_info("socket")
        with socket.socket(fileno=os.dup(sock.fileno())) as own:
            yield Sending(transport, own, self._threads, self._stall_s)

    async def read(self, fd: int, start: int, size_bytes: int) -> bytes | bytearray:
        """Return bytes of a file; read them in a thread unless they are in memory.

        Raises OSError.
        """
        in_memory = self.read_at_once(fd, start, size_bytes)
        if in_memory is not None:
            return in_memory
        read = partial(os.pread, fd, size_bytes, start)
        data = await _finished(asyncio.get_running_loop().run_in_executor(self._threads, read))
        if len(data) < size_bytes:
            raise OSError("the file is shorter than it was")
        return data

    def read_at_once(self, fd: int, start: int, size_bytes: int) -> bytearray | None:
        """Return bytes of a file; None if some of them have to be read from the disk."""
        buffer = bytearray(size_bytes)
        try:
            read_bytes = os.preadv(fd, [buffer], start, self._read_flags)
        except OSError:  # no byte is in memory, or the filesystem does not support the flag
            return None
        return buffer if read_bytes == size_bytes else None

    def close(self) -> None:
        """End the threads after their present work."""
        self._threads.shutdown(wait=False)


async def _is_set_within(event: asyncio.Event, limit_s: float) -> bool:
    """Wait for an event, or for a time; return whether the event is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()
    return event.is_set()


async def _finished(job: "asyncio.Future[T]") -> T:
    """Return the result of a thread's work; wait for the work's end even if this is cancelled."""
    cancelled: asyncio.CancelledError | None = None
    while not job.done():
        try:
            await asyncio.wait([job])
        except asyncio.CancelledError as exn:
            cancelled = exn
    if cancelled is None:
        return job.result()
    job.exception()  # this retrieves the exception: asyncio logs exceptions that nobody retrieves
    raise cancelled
