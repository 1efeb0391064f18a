"""Sending of files to sockets by the kernel: the bytes do not pass through this process.

They are sent in steps, each in a thread, since the file may have to be read from the disk. A step
ends when the socket is full: while a client does not read, the event loop waits for it, not a
thread.
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

# More would wait for the interpreter's lock: on two cores, 8 take a fifth more of processor time.
_THREADS = 4
# So that others get their turn, a step ends after this time, or once the client has read nothing
# for `_PATIENCE_MS`. Most ranges are sent in one step, as each takes a turn of the event loop.
_STEP_S = 0.1
_PATIENCE_MS = 20
# Limit on one call of sendfile, which would otherwise go on while its client reads as fast.
_CALL_BYTES = 32 * 1024 * 1024
# Interval at which the transport's buffer is checked.
_PAUSE_S = 0.005
# A client that has not read for this time gives way to others that need the cache space of its
# bytes. While a client reads, the network fills the socket again within less.
_GIVES_WAY_S = 0.5


class SlowClientError(Exception):
    """The client has read nothing for too long."""


@dataclass(slots=True)
class Sending:
    """Sends one response from files to its client.

    Attributes:
        stall_s: time for which the client may read nothing.
        sent_bytes: number of bytes that the socket took, also in a `send` that was cancelled.
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
        """Send bytes of a file; return the end of those that were sent.

        Args:
            gives_way: returns True if others need the cache space of these bytes: then no more are
                sent once the client has read nothing for a moment. None to send all in any case.

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

        Returns False if it has read nothing for a moment, and `gives_way` then returns True.
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
        """Return the result of work in a thread; wait for its end even if this is cancelled.

        The work uses open descriptors: after they are closed, other files may get their numbers.
        """
        job = asyncio.get_running_loop().run_in_executor(self._threads, work)
        return await _finished(job)

    def _step(self, fd: int, start: int, size_bytes: int) -> int:
        """Send what the socket takes, up to `size_bytes`; return the number of bytes. Blocks."""
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
    """Sends files; its threads are shared by all responses.

    Args:
        stall_s: time for which a client may read nothing.
        is_memory: True if the files are in memory (tmpfs): no read of them waits for a disk.
    """

    def __init__(self, stall_s: float, *, is_memory: bool) -> None:
        self._stall_s = stall_s
        self._threads = ThreadPoolExecutor(_THREADS, "s3-send")
        # With this flag, a read fails rather than wait for the disk; tmpfs does not support it.
        self._read_flags = 0 if is_memory else os.RWF_NOWAIT

    @contextmanager
    def sending(self, transport: asyncio.Transport) -> Iterator[Sending]:
        """Provide the sending of one response to the client of a transport."""
        sock: socket.socket = transport.get_extra_info("socket")
        with socket.socket(fileno=os.dup(sock.fileno())) as own:
            yield Sending(transport, own, self._threads, self._stall_s)

    async def read(self, fd: int, start: int, size_bytes: int) -> bytes | bytearray:
        """Return bytes of a file, by a thread unless they are in memory. Raises OSError."""
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
        except OSError:  # none of them is in memory, or the filesystem cannot tell
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
    """Return the result of a thread's work; wait for its end even if this is cancelled."""
    cancelled: asyncio.CancelledError | None = None
    while not job.done():
        try:
            await asyncio.wait([job])
        except asyncio.CancelledError as exn:
            cancelled = exn
    if cancelled is None:
        return job.result()
    job.exception()  # retrieved, as asyncio logs exceptions that nobody has retrieved
    raise cancelled
