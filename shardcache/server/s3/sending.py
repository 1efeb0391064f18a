"""Sending of files to clients by the kernel (sendfile), without copying bytes into this process.

`object_answers` sends the bodies of long answers through a `ClientSocket`. The thread that calls
sendfile is in `send_thread`.
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

from shardcache.server.s3.send_thread import FileSend, SendThread
from shardcache.store.disk.finishing import finished, wait_despite_cancellation

_READ_THREADS = 4  # number of threads that read from the disk
# Interval at which the transport's buffer is checked; asyncio reports to nobody that it is empty.
_FLUSH_CHECK_S = 0.005
# A client that has read nothing for this time gets no more bytes while others wait for cache space.
# A client that does read makes room in its socket sooner.
_IDLE_CLIENT_S = 0.5


class SlowClientError(Exception):
    """The client has read nothing for too long."""


@dataclass(slots=True)
class ClientSocket:
    """The socket to which the files of one response are sent.

    Attributes:
        stall_s: maximum time for which the client may read nothing.
        sent_bytes: number of bytes that the socket has accepted, including those of a `send_file`
            that was cancelled.
    """

    _transport: asyncio.Transport
    _socket_fd: int  # a duplicate, because asyncio lets only the transport watch its own
    _thread: SendThread
    stall_s: float
    sent_bytes: int = 0

    async def wait_until_flushed(self) -> None:
        """Wait until the transport's buffer is empty. Raises SlowClientError."""
        deadline_s = time.monotonic() + self.stall_s
        pause_s = 0.0  # one iteration of the event loop is usually enough
        while self._transport.get_write_buffer_size():
            if time.monotonic() > deadline_s:
                raise SlowClientError
            await asyncio.sleep(pause_s)
            pause_s = _FLUSH_CHECK_S

    async def send_file(
        self,
        fd: int,
        start: int,
        end: int,
        is_space_wanted: Callable[[], bool] | None = None,
    ) -> int:
        """Send bytes of a file; return the offset of the end of the bytes that were sent.

        Raises SlowClientError, ConnectionError if the client has disconnected, and OSError if the
        file cannot be read.

        Args:
            fd: the open file.
            start: offset of the first byte.
            end: offset of the end of the bytes.
            is_space_wanted: returns True while others wait for cache space. Then no more bytes
                are sent once the client has read nothing for `_IDLE_CLIENT_S`. None to send all
                bytes in any case.
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
            # The thread uses both descriptors until the send ends. If the caller closed them
            # earlier, other files could get their numbers.
            cancelled = await wait_despite_cancellation(send.ended)
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
        """Wait until everything is sent, or until an idle client has to make room for others.

        Raises SlowClientError if the client reads nothing for too long. That is so only if its
        socket is full; otherwise the thread is busy, or waits for the disk.
        """
        interval_s = self.stall_s
        if is_space_wanted is not None:
            interval_s = min(_IDLE_CLIENT_S, self.stall_s)
        last_sent_to = send.sent_to
        deadline_s = time.monotonic() + self.stall_s
        while True:
            await asyncio.wait([send.ended], timeout=interval_s)
            if send.ended.done():
                return
            is_idle = send.sent_to == last_sent_to and _is_full(self._socket_fd)
            if not is_idle:
                last_sent_to = send.sent_to
                deadline_s = time.monotonic() + self.stall_s
            elif time.monotonic() >= deadline_s:
                raise SlowClientError
            elif is_space_wanted is not None and is_space_wanted():
                return

    async def wait_until_writable(self) -> None:
        """Wait until the socket accepts bytes. Raises SlowClientError."""
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
        is_memory: True if the files are on tmpfs, so that no read waits for a disk.
    """

    def __init__(self, stall_s: float, *, is_memory: bool) -> None:
        self._stall_s = stall_s
        self._send_thread = SendThread()
        self._read_threads = ThreadPoolExecutor(_READ_THREADS, "s3-read")
        # With this flag, a read fails if it would have to wait for the disk. tmpfs does not support
        # the flag, and does not need it.
        self._read_flags = 0 if is_memory else os.RWF_NOWAIT

    @contextmanager
    def client_socket(self, transport: asyncio.Transport) -> Iterator[ClientSocket]:
        """Yield a transport's socket, for one response."""
        sock: socket.socket = transport.get_extra_info("socket")
        own_fd = os.dup(sock.fileno())
        try:
            yield ClientSocket(transport, own_fd, self._send_thread, self._stall_s)
        finally:
            os.close(own_fd)

    async def read(self, fd: int, start: int, size_bytes: int) -> bytes | bytearray:
        """Return bytes of a file; read them in a thread unless they are in memory.

        Raises OSError.
        """
        in_memory = self.read_from_memory(fd, start, size_bytes)
        if in_memory is not None:
            return in_memory
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(self._read_threads, os.pread, fd, size_bytes, start)
        content = await finished(reading)  # the caller must not close the file before
        if len(content) < size_bytes:
            raise OSError("the file is shorter than it was")
        return content

    def read_from_memory(self, fd: int, start: int, size_bytes: int) -> bytearray | None:
        """Return bytes of a file; None if some of them have to be read from the disk."""
        buffer = bytearray(size_bytes)
        try:
            read_bytes = os.preadv(fd, [buffer], start, self._read_flags)
        except OSError:  # no byte is in memory, or the filesystem does not support the flag
            return None
        if read_bytes < size_bytes:
            return None
        return buffer

    def close(self) -> None:
        """End the threads after their present work."""
        self._send_thread.close()
        self._read_threads.shutdown(wait=False)


def _is_full(socket_fd: int) -> bool:
    """Return whether a socket accepts no bytes, because its client has not read enough."""
    poll = select.poll()
    poll.register(socket_fd, select.POLLOUT)
    return not poll.poll(0)
