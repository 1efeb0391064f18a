"""Sending of files to sockets by the kernel (sendfile), without copying bytes into this process.

`object_answers` sends the bodies of long answers in this way; the thread that does it is in
`send_thread`.
"""

import asyncio
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from shardcache.server.s3.send_thread import FileSend, SendThread
from shardcache.store.disk.finishing import finished, wait_in_any_case

_READ_THREADS = 4  # number of threads that read from the disk
# Interval at which the transport's buffer is checked.
_PAUSE_S = 0.005
# No more bytes are sent to a client that has read nothing for this time, if others need the cache
# space of these bytes. A client that reads empties some of its socket within a shorter time.
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
    _socket_fd: int  # a duplicate, because asyncio lets only the transport watch its own
    _thread: SendThread
    stall_s: float
    sent_bytes: int = 0

    async def flushed(self) -> None:
        """Wait until the transport's buffer is empty. Raises SlowClientError."""
        deadline_s = time.monotonic() + self.stall_s
        pause_s = 0.0  # one turn of the event loop is usually enough
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
        is_space_wanted: Callable[[], bool] | None = None,
    ) -> int:
        """Send bytes of a file; return the offset of the end of the bytes that were sent.

        Args:
            fd: the open file.
            start: offset of the first byte.
            end: offset of the end of the bytes.
            is_space_wanted: returns True if others need the cache space of these bytes. Then no
                more bytes are sent once the client has read nothing for `_GIVES_WAY_S`. None to
                send all bytes in any case.

        Raises SlowClientError, ConnectionError if the client has disconnected, and OSError if the
        file cannot be read.
        """
        if start >= end:
            return start
        if self._transport.is_closing():
            raise ConnectionResetError("the client disconnected")
        send = FileSend(self._socket_fd, fd, start, end)
        self._thread.add(send)
        try:
            await self._wait_for_end(send, is_space_wanted)
        finally:
            if not send.ended.done():
                self._thread.withdraw(send)
            # The thread uses both descriptors until the end. The caller closes them after this
            # call, and other files may then get their numbers.
            cancelled = await wait_in_any_case(send.ended)
            self.sent_bytes += send.sent_to - start
            if cancelled is not None:
                raise cancelled
        send.ended.result()
        return send.sent_to

    async def _wait_for_end(
        self,
        send: FileSend,
        is_space_wanted: Callable[[], bool] | None,
    ) -> None:
        """Wait until everything is sent, or others need the cache space. Raises SlowClientError.

        A client reads too slowly only if its socket is full. Otherwise the thread is busy, or waits
        for the disk.
        """
        interval_s = self.stall_s
        if is_space_wanted is not None:
            interval_s = min(_GIVES_WAY_S, self.stall_s)
        sent_to = send.sent_to
        deadline_s = time.monotonic() + self.stall_s
        while True:
            await asyncio.wait([send.ended], timeout=interval_s)
            if send.ended.done():
                return
            if send.sent_to > sent_to or not _is_full(self._socket_fd):
                sent_to = send.sent_to
                deadline_s = time.monotonic() + self.stall_s
            elif time.monotonic() >= deadline_s:
                raise SlowClientError
            elif is_space_wanted is not None and is_space_wanted():
                return

    async def writable(self) -> None:
        """Wait until the client has read something. Raises SlowClientError."""
        loop = asyncio.get_running_loop()
        is_writable = asyncio.Event()
        loop.add_writer(self._socket_fd, is_writable.set)
        try:
            async with asyncio.timeout(self.stall_s):
                await is_writable.wait()
        except TimeoutError:
            raise SlowClientError from None
        finally:
            loop.remove_writer(self._socket_fd)


class Sender:
    """Sends files to clients. All responses share its threads.

    Args:
        stall_s: maximum time for which a client may read nothing.
        is_memory: True if the files are in memory (tmpfs), so that no read waits for a disk.
    """

    def __init__(self, stall_s: float, *, is_memory: bool) -> None:
        self._stall_s = stall_s
        self._send_thread = SendThread()
        self._readers = ThreadPoolExecutor(_READ_THREADS, "s3-read")
        # With this flag, a read fails if it would have to wait for the disk. tmpfs does not support
        # the flag, and does not need it.
        self._read_flags = 0 if is_memory else os.RWF_NOWAIT

    @contextmanager
    def sending(self, transport: asyncio.Transport) -> Iterator[Sending]:
        """Provide a `Sending` for one response to the client of a transport."""
        sock: socket.socket = transport.get_extra_info("socket")
        own_fd = os.dup(sock.fileno())
        try:
            yield Sending(transport, own_fd, self._send_thread, self._stall_s)
        finally:
            os.close(own_fd)

    async def read(self, fd: int, start: int, size_bytes: int) -> bytes | bytearray:
        """Return bytes of a file; read them in a thread unless they are in memory.

        Raises OSError.
        """
        in_memory = self.read_at_once(fd, start, size_bytes)
        if in_memory is not None:
            return in_memory
        read = partial(os.pread, fd, size_bytes, start)
        data = await finished(asyncio.get_running_loop().run_in_executor(self._readers, read))
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
        self._send_thread.close()
        self._readers.shutdown(wait=False)


def _is_full(socket_fd: int) -> bool:
    """Return whether a socket accepts no bytes now, because its client has not read enough."""
    poll = select.poll()
    poll.register(socket_fd, select.POLLOUT)
    return not poll.poll(0)
