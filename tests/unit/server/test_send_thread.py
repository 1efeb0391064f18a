"""The thread that sends files to the sockets of S3 clients."""

import asyncio
import os
import random
import socket
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest

from shardcache.server.s3.send_thread import FileSend, SendThread

_SIZE_BYTES = 8_000_000  # more than a socket's buffers hold


@pytest.fixture
def file_fd(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(_content())
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A socket of the server, and one of its client."""
    server, client = socket.socketpair()
    server.setblocking(False)
    with server, client:
        yield server, client


def test_client_gets_exactly_the_bytes(
    file_fd: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    server, client = pair

    async def run() -> None:
        with closing(SendThread()) as thread:
            send = FileSend(server.fileno(), file_fd, 5, _SIZE_BYTES - 5)
            thread.add(send)
            received = await asyncio.to_thread(_received, client, send.end - 5)
            await send.ended
            assert received == _content()[5:-5]
            assert send.sent_to == send.end

    asyncio.run(run())


def test_client_that_reads_nothing_does_not_delay_another(file_fd: int) -> None:
    async def run() -> None:
        slow, slow_client = socket.socketpair()
        fast, fast_client = socket.socketpair()
        slow.setblocking(False)
        fast.setblocking(False)
        with slow, slow_client, fast, fast_client, closing(SendThread()) as thread:
            stuck = FileSend(slow.fileno(), file_fd, 0, _SIZE_BYTES)
            thread.add(stuck)
            send = FileSend(fast.fileno(), file_fd, 0, _SIZE_BYTES)
            thread.add(send)
            received = await asyncio.to_thread(_received, fast_client, _SIZE_BYTES)
            await send.ended
            assert received == _content()
            assert not stuck.ended.done()
            assert 0 < stuck.sent_to < _SIZE_BYTES

    asyncio.run(run())


def test_withdrawn_send_ends_where_it_is(
    file_fd: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    server, client = pair

    async def run() -> None:
        with closing(SendThread()) as thread:
            send = FileSend(server.fileno(), file_fd, 0, _SIZE_BYTES)
            thread.add(send)
            # The first byte shows that the thread has begun.
            await asyncio.to_thread(_received, client, 1)
            thread.withdraw(send)
            await send.ended
            server.shutdown(socket.SHUT_WR)
            received = await asyncio.to_thread(_received, client, _SIZE_BYTES)
            assert 1 + len(received) == send.sent_to < _SIZE_BYTES

    asyncio.run(run())


def test_send_withdrawn_at_once_ends_too(
    file_fd: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    server, _ = pair

    async def run() -> None:
        with closing(SendThread()) as thread:
            send = FileSend(server.fileno(), file_fd, 0, _SIZE_BYTES)
            thread.add(send)
            thread.withdraw(send)
            await send.ended

    asyncio.run(run())


def test_disconnected_client_is_an_error(
    file_fd: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    server, client = pair
    client.close()

    async def run() -> None:
        with closing(SendThread()) as thread:
            send = FileSend(server.fileno(), file_fd, 0, _SIZE_BYTES)
            thread.add(send)
            with pytest.raises(ConnectionError):
                await send.ended

    asyncio.run(run())


def test_file_that_ends_too_soon_is_an_error(
    file_fd: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    server, client = pair

    async def run() -> None:
        with closing(SendThread()) as thread:
            send = FileSend(server.fileno(), file_fd, _SIZE_BYTES - 10, _SIZE_BYTES + 10)
            thread.add(send)
            with pytest.raises(OSError, match="shorter"):
                await send.ended
            assert await asyncio.to_thread(_received, client, 10) == _content()[-10:]

    asyncio.run(run())


def test_sends_end_with_the_thread(file_fd: int, pair: tuple[socket.socket, socket.socket]) -> None:
    """Those that have begun, and those that come later."""
    server, client = pair

    async def run() -> None:
        thread = SendThread()
        send = FileSend(server.fileno(), file_fd, 0, _SIZE_BYTES)
        thread.add(send)
        await asyncio.to_thread(_received, client, 1)
        thread.close()
        with pytest.raises(ConnectionAbortedError):
            await send.ended
        late = FileSend(server.fileno(), file_fd, 0, _SIZE_BYTES)
        thread.add(late)
        with pytest.raises(ConnectionAbortedError):
            await late.ended

    asyncio.run(run())


def test_descriptor_that_cannot_be_polled_ends_its_own_send_alone(
    file_fd: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    server, client = pair

    async def run() -> None:
        with closing(SendThread()) as thread:
            odd = FileSend(file_fd, file_fd, 0, 10)
            thread.add(odd)
            with pytest.raises(PermissionError):
                await odd.ended
            send = FileSend(server.fileno(), file_fd, 0, 10)
            thread.add(send)
            await send.ended
            assert await asyncio.to_thread(_received, client, 10) == _content()[:10]

    asyncio.run(run())


def test_socket_can_be_used_again_after_a_send(
    file_fd: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    server, client = pair

    async def run() -> None:
        with closing(SendThread()) as thread:
            for start in range(0, 100, 10):
                send = FileSend(server.fileno(), file_fd, start, start + 10)
                thread.add(send)
                await send.ended
            assert await asyncio.to_thread(_received, client, 100) == _content()[:100]

    asyncio.run(run())


@cache
def _content() -> bytes:
    """Bytes that differ from place to place."""
    return random.Random(1).randbytes(_SIZE_BYTES)


def _received(client: socket.socket, size_bytes: int) -> bytes:
    """Return a number of bytes from a socket; fewer if it ends."""
    received = bytearray()
    while len(received) < size_bytes:
        data = client.recv(size_bytes - len(received))
        if not data:
            break
        received += data
    return bytes(received)
