"""TLS sockets that read many records at once, with the results of ssl's own reading."""

import gc
import os
import random
import socket
import ssl
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest

from shardcache.transport.http import tls
from shardcache.transport.http.tls import TlsSocket, client_context
from support.network.certificates import Authority

KIB = 1024
DATA = random.Random(5).randbytes(3 * 1024 * KIB + 777)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority that the clients trust."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(params=["records", "one by one"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With OpenSSL's own reading, and as where it cannot be reached."""
    if request.param == "one by one":
        monkeypatch.setattr(tls, "_openssl", lambda: None)
    return str(request.param)


@contextmanager
def connected(
    authority: Authority, serve: Callable[[ssl.SSLSocket], object]
) -> Iterator[TlsSocket]:
    """A connection to a server that runs in a thread, and closes it afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as threads:

        def run() -> None:
            with authority.server().wrap_socket(listener.accept()[0], server_side=True) as accepted:
                serve(accepted)

        running = threads.submit(run)
        raw = socket.create_connection(listener.getsockname())
        with client_context(str(authority.ca_file)).wrap_socket(
            raw, server_hostname="127.0.0.1"
        ) as sock:
            assert isinstance(sock, TlsSocket)
            yield sock
        running.result()


def read_all(sock: TlsSocket, sizes: Callable[[], int] = lambda: 256 * KIB) -> tuple[bytes, int]:
    """Return all that comes in pieces of some sizes, and the size of the largest."""
    found = bytearray()
    largest = 0
    while True:
        memory = memoryview(bytearray(sizes()))
        count = sock.fill(memory)
        assert 0 <= count <= len(memory)
        if not count:
            return bytes(found), largest
        found += memory[:count]
        largest = max(largest, count)


@pytest.mark.parametrize("seed", range(2))
def test_every_byte_comes_in_order(seed: int, way: str, authority: Authority) -> None:
    """Records and memory may have any size, and one call reads many records."""
    numbers = random.Random(seed)

    def serve(sock: ssl.SSLSocket) -> None:
        rest = memoryview(DATA)
        while rest:
            count = numbers.choice([1, 100, 5 * KIB, 16 * KIB, 100 * KIB])
            sock.sendall(rest[:count])
            rest = rest[count:]
        with suppress(OSError):
            sock.unwrap()  # TLS's own end; the client says nothing

    with connected(authority, serve) as sock:
        found, largest = read_all(
            sock, lambda: numbers.choice([1, 1000, 4 * KIB, 4 * KIB + 1, 50 * KIB, 256 * KIB])
        )
    assert found == DATA
    assert (largest > 16 * KIB) == (way == "records")


def test_a_forged_record_is_an_error(way: str, authority: Authority) -> None:
    """The bytes before it are right, and nothing comes after it."""

    def forge(sock: ssl.SSLSocket) -> None:
        sock.sendall(DATA[: 200 * KIB])
        socket.socket.sendall(sock, b"\x17\x03\x03\x00\x20" + bytes(32))

    with connected(authority, forge) as sock:
        found = bytearray()
        with pytest.raises(ssl.SSLError, match="record"):
            while True:
                memory = memoryview(bytearray(64 * KIB))
                count = sock.fill(memory)
                assert count
                found += memory[:count]
    assert found == DATA[: len(found)]
    assert len(found) > 100 * KIB


def test_a_read_ends_when_another_thread_shuts_the_socket_down(
    way: str, authority: Authority
) -> None:
    """As a cancelled request does."""
    may_end = threading.Event()

    def wait(sock: ssl.SSLSocket) -> None:
        sock.sendall(DATA[: 100 * KIB])
        may_end.wait()

    with connected(authority, wait) as sock, ThreadPoolExecutor() as threads:
        reading = threads.submit(read_all, sock)
        with pytest.raises(TimeoutError):
            reading.result(0.2)
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
        with suppress(OSError):
            assert reading.result()[0] == DATA[: 100 * KIB]
        may_end.set()


def test_a_closed_socket_writes_nothing_to_its_successor(authority: Authority) -> None:
    """The descriptor may belong to another connection by the time the memory is freed."""
    with connected(authority, lambda sock: sock.sendall(DATA)) as sock:
        read_all(sock)
        reading, writing = socket.socketpair()
        number = sock.fileno()
        freed = weakref.ref(sock)
        sock.close()
        os.dup2(writing.fileno(), number)
        del sock
        gc.collect()
    assert freed() is None
    reading.setblocking(False)
    with pytest.raises(BlockingIOError):
        reading.recv(1)
    os.close(number)
    reading.close()
    writing.close()
