"""Odd clients and stores at the S3 endpoint: right bytes or clear errors, and no hang."""

import asyncio
import http.client
import os
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S
from support.programs.raw_session import RawSession
from support.programs.s3_door import DOOR, address_of, ask, keys_of, signed
from support.stores.buckets import Bucket, MotoS3, new_bucket
from support.stores.faulty_s3 import FaultyS3
from support.stores.mischief import Mischief

MIB = 1024 * 1024
PART_BYTES = 8 * MIB
RANGE_PART_BYTES = MIB // 4
MAX_REQUEST_BYTES = 4 * MIB  # of parts
LARGE = random.Random(5).randbytes(24 * MIB)  # more than a connection's buffers take
_RECEIVE_BYTES = 4096  # of the client's buffer


@pytest.fixture(scope="module")
def bucket(moto_server: MotoS3) -> Bucket:
    """A bucket with five objects of three parts."""
    found = new_bucket(moto_server)
    for number in range(5):
        found.put(f"large-{number}", LARGE)
    found.put("small", LARGE[:20_000])
    return found


@pytest.fixture
def daemon(tmp_path: Path, bucket: Bucket) -> Iterator[Daemon]:
    """A daemon whose cache holds two of the objects."""
    with Daemon(tmp_path, *DOOR, "--s3-stall-s", "2", capacity="60MB", env=bucket.env()) as running:
        yield running


@pytest.fixture
def patient(tmp_path: Path, bucket: Bucket) -> Iterator[Daemon]:
    """One that cuts no client off."""
    with Daemon(
        tmp_path, *DOOR, "--s3-stall-s", "3600", capacity="60MB", env=bucket.env()
    ) as running:
        yield running


class RawClient:
    """One request, whose answer is read as slowly as a test likes."""

    def __init__(
        self,
        daemon: Daemon,
        path: str,
        keys: dict[str, Any] | None = None,
        address: str = "",
        **headers: str,
    ) -> None:
        address = address or address_of(daemon)
        host, _, port = address.rpartition(":")
        self.socket = socket.socket()
        self.socket.settimeout(GUARD_S)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        self.socket.connect((host, int(port)))
        target, fields = signed(daemon, path, keys or keys_of(daemon), host=address, **headers)
        lines = [
            f"GET {target} HTTP/1.1",
            *(f"{name}: {text}" for name, text in fields.items()),
            "",
            "",
        ]
        self.socket.sendall("\r\n".join(lines).encode())

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def head(self) -> str:
        """Read the head of the answer, and nothing of its body."""
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            byte = self.socket.recv(1)
            assert byte, head
            head += byte
        return head.decode()

    def body(self, size_bytes: int, step_bytes: int = MIB) -> bytes:
        """Read the body, or what there is of it before the connection ends."""
        data = bytearray()
        with suppress(ConnectionError):
            while len(data) < size_bytes:
                piece = self.socket.recv(min(step_bytes, size_bytes - len(data)))
                if not piece:
                    break
                data += piece
        return bytes(data)


@contextmanager
def ending(daemon: Daemon) -> Iterator[None]:
    """Kill a daemon at the end, which is started in a thread: its store runs in this one."""
    try:
        yield
    finally:
        daemon.kill()


def read(daemon: Daemon, path: str, **headers: str) -> bytes:
    """Read an object, or a range of it."""
    return ask(daemon, *signed(daemon, path, keys_of(daemon), **headers)).body


@pytest.mark.slow
def test_a_client_that_reads_nothing_is_cut_off(daemon: Daemon, bucket: Bucket) -> None:
    """Its object can be evicted then, and what it reads at last ends early."""
    path = f"/{bucket.name}/large-0"
    read(daemon, path)
    with RawClient(daemon, path) as client:
        assert " 200 " in client.head()
        eventually(lambda: daemon.leases() == 1)
        eventually(lambda: daemon.leases() == 0)
        assert len(client.body(len(LARGE))) < len(LARGE)


@pytest.mark.slow
def test_a_client_that_reads_nothing_keeps_one_object_from_nobody_else(
    patient: Daemon, bucket: Bucket
) -> None:
    """The cache makes room for others beside what it holds, and it gets the rest later."""
    read(patient, f"/{bucket.name}/large-0")
    with RawClient(patient, f"/{bucket.name}/large-0") as client:
        client.head()
        eventually(lambda: patient.leases() == 1)
        assert all(read(patient, f"/{bucket.name}/large-{number}") == LARGE for number in (1, 2, 3))
        assert client.body(len(LARGE)) == LARGE


@pytest.mark.slow
def test_clients_that_read_nothing_keep_no_space_from_a_job(
    patient: Daemon, bucket: Bucket
) -> None:
    """Their objects fill the cache, yet each client gets the rest whenever it reads on."""
    with RawSession(patient, job="trains") as job, ExitStack() as opened:
        paths = [f"/{bucket.name}/large-{number}" for number in (0, 1)]
        clients = [opened.enter_context(RawClient(patient, path)) for path in paths]
        assert all(" 200 " in client.head() for client in clients)
        eventually(lambda: patient.leases() == 2)
        job.plan([f"s3://{bucket.name}/large-2"], [0], wanted="files")
        job.take(0)
        assert [client.body(len(LARGE)) for client in clients] == [LARGE] * 2


@pytest.mark.slow
def test_clients_that_read_nothing_keep_no_range_from_others(
    patient: Daemon, bucket: Bucket
) -> None:
    """With space for one range alone, whichever reads on gets all of its bytes."""
    path = f"/{bucket.name}/large-2"
    span = f"bytes=5-{9 * MIB}"
    with RawSession(patient, job="holds") as holder, ExitStack() as opened:
        holder.plan(
            [f"s3://{bucket.name}/large-{number}" for number in (0, 1)], [0, 1], wanted="files"
        )
        holder.take(0)
        holder.take(1)
        clients = [opened.enter_context(RawClient(patient, path, Range=span)) for _ in range(3)]
        clients.append(
            opened.enter_context(RawClient(patient, f"/{bucket.name}/large-4", Range=span))
        )
        assert all(" 206 " in client.head() for client in clients)
        assert read(patient, f"/{bucket.name}/large-3", Range=span) == LARGE[5 : 9 * MIB + 1]
        assert [client.body(9 * MIB - 4) for client in clients] == [LARGE[5 : 9 * MIB + 1]] * 4


@pytest.mark.slow
def test_an_object_is_sent_by_pieces_while_others_hold_its_space(
    patient: Daemon, bucket: Bucket
) -> None:
    """It would fit into the cache, but not beside the two objects that a job holds."""
    with RawSession(patient, job="holds") as holder:
        holder.plan(
            [f"s3://{bucket.name}/large-{number}" for number in (0, 1)], [0, 1], wanted="files"
        )
        holder.take(0)
        holder.take(1)
        assert read(patient, f"/{bucket.name}/large-3") == LARGE
        assert patient.leases() == 2


@pytest.mark.slow
def test_a_client_that_reads_byte_by_byte_gets_all_of_them(daemon: Daemon, bucket: Bucket) -> None:
    """However long that takes."""
    with RawClient(daemon, f"/{bucket.name}/small") as client:
        client.head()
        assert client.body(20_000, step_bytes=1) == LARGE[:20_000]


@pytest.mark.slow
def test_a_tool_that_asks_for_one_byte_at_a_time_gets_each(daemon: Daemon, bucket: Bucket) -> None:
    """Over one connection; the daemon's memory does not grow with the number of requests."""
    target, fields = signed(daemon, f"/{bucket.name}/small", keys_of(daemon))
    with closing(http.client.HTTPConnection(address_of(daemon), timeout=GUARD_S)) as connection:
        before_bytes = daemon.status()["process"]["rss_bytes"]
        for place in range(2000):
            connection.request("GET", target, headers=fields | {"Range": f"bytes={place}-{place}"})
            answer = connection.getresponse()
            assert answer.status == 206
            assert answer.read() == LARGE[place : place + 1]
        assert daemon.status()["process"]["rss_bytes"] - before_bytes < 30_000_000


def test_an_object_whose_file_was_cut_off_is_named_and_fetched_again(
    daemon: Daemon, bucket: Bucket
) -> None:
    """The error says what is wrong with the file; the next request gets the bytes."""
    path = f"/{bucket.name}/small"
    assert read(daemon, path) == LARGE[:20_000]
    daemon.await_publication()
    for file in daemon.cache_dir.rglob("*.tar"):
        os.truncate(file, 100)
    answer = ask(daemon, *signed(daemon, path, keys_of(daemon)))
    assert answer.status == 503
    assert b"the daemon cannot answer: the file is shorter than it was" in answer.body
    assert read(daemon, path) == LARGE[:20_000]


@pytest.mark.slow
def test_a_client_that_leaves_in_the_middle_holds_nothing(daemon: Daemon, bucket: Bucket) -> None:
    """Its object can be evicted at once, and the log has no traceback for it."""
    path = f"/{bucket.name}/large-0"
    read(daemon, path)
    address = address_of(daemon)
    keys = keys_of(daemon)
    for _ in range(100):
        with RawClient(daemon, path, keys, address) as client:
            client.head()
    eventually(lambda: daemon.leases() == 0)
    assert "Traceback" not in daemon.log.read_text()


@pytest.mark.slow
def test_more_open_ranges_than_are_answered_get_bytes_or_slow_down(
    patient: Daemon, bucket: Bucket
) -> None:
    """No request hangs: each has its bytes, or an error that makes SDKs try again."""
    path = f"/{bucket.name}/large-0"
    read(patient, path)
    address = address_of(patient)
    keys = keys_of(patient)
    with ExitStack() as opened:
        clients = [
            opened.enter_context(
                RawClient(patient, path, keys, address, Range=f"bytes={start}-{start + 20 * MIB}")
            )
            for start in range(1200)
        ]
        heads = [client.head() for client in clients]
        assert {head.split(" ", 2)[1] for head in heads} == {"206", "503"}
        refused = [client for client, head in zip(clients, heads, strict=True) if " 503 " in head]
        assert all(b"<Code>SlowDown</Code>" in client.body(100) for client in refused)
        assert clients[7].body(20 * MIB + 1) == LARGE[7 : 20 * MIB + 8]
    eventually(lambda: patient.leases() == 0)
    assert read(patient, path, Range="bytes=5-9") == LARGE[5:10]


@pytest.mark.slow
async def test_an_object_is_sent_as_it_arrives(faulty: FaultyS3, tmp_path: Path) -> None:
    """The first part is with the client before the store gives the second."""
    faulty.put("large", LARGE)
    faulty.hold("large", start=PART_BYTES, times=100)
    daemon = Daemon(tmp_path, *DOOR, "--shard-connections", "1", env=faulty.env())
    with ending(daemon):
        await asyncio.to_thread(daemon.start)
        client = await asyncio.to_thread(RawClient, daemon, "/faulty/large")
        with client:
            await asyncio.to_thread(client.head)
            assert await asyncio.to_thread(client.body, PART_BYTES) == LARGE[:PART_BYTES]
            faulty.answer_late()
            rest = await asyncio.to_thread(client.body, len(LARGE) - PART_BYTES)
            assert rest == LARGE[PART_BYTES:]


@pytest.mark.slow
async def test_a_store_that_changes_under_a_read_never_mixes_versions(
    faulty: FaultyS3, tmp_path: Path
) -> None:
    """The client sees that bytes are missing; its next request gets the new version."""
    faulty.put("large", LARGE)
    faulty.hold("large", start=PART_BYTES, times=1)
    daemon = Daemon(
        tmp_path, *DOOR, "--shard-connections", "1", "--listing-ttl-s", "0", env=faulty.env()
    )
    with ending(daemon):
        await asyncio.to_thread(daemon.start)
        client = await asyncio.to_thread(RawClient, daemon, "/faulty/large")
        with client:
            await asyncio.to_thread(client.head)
            assert await asyncio.to_thread(client.body, PART_BYTES) == LARGE[:PART_BYTES]
            faulty.put("large", LARGE[::-1])
            faulty.answer_late()
            rest = await asyncio.to_thread(client.body, len(LARGE) - PART_BYTES)
            assert rest != LARGE[PART_BYTES:]
            assert LARGE[PART_BYTES:].startswith(rest)
        assert await asyncio.to_thread(read, daemon, "/faulty/large") == LARGE[::-1]


async def test_a_client_that_leaves_no_longer_waits(faulty: FaultyS3, tmp_path: Path) -> None:
    """A store that does not answer keeps no request of a client that is gone."""
    faulty.put("large", LARGE)
    faulty.fail(Mischief.SILENCE, key="large", times=100)
    daemon = Daemon(tmp_path, *DOOR, env=faulty.env())

    def waiters() -> list[int]:
        return [transfer["waiters"] for transfer in daemon.status()["transfers"]]

    with ending(daemon):
        await asyncio.to_thread(daemon.start)
        client = await asyncio.to_thread(RawClient, daemon, "/faulty/large")
        await asyncio.to_thread(eventually, lambda: waiters() == [1])
        client.socket.close()
        await asyncio.to_thread(eventually, lambda: waiters() in ([0], []))


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        (Mischief.FORBIDDEN, 403, "AccessDenied"),
        (Mischief.INTERNAL_ERROR, 503, "ServiceUnavailable"),
    ],
)
async def test_errors_of_the_store_have_their_codes(
    faulty: FaultyS3, tmp_path: Path, fault: Mischief, status: int, code: str
) -> None:
    """Refusals of the store are refusals; errors that may be over later are for another try."""
    faulty.put("large", LARGE)
    faulty.fail(fault, key="large", method="HEAD", times=100)
    faulty.fail(fault, key="large", method="GET", times=100)
    daemon = Daemon(tmp_path, *DOOR, "--attempts", "1", env=faulty.env())
    with ending(daemon):
        await asyncio.to_thread(daemon.start)
        keys = await asyncio.to_thread(keys_of, daemon)
        target, headers = await asyncio.to_thread(lambda: signed(daemon, "/faulty/large", keys))
        answer = await asyncio.to_thread(ask, daemon, target, headers)
    assert answer.status == status
    assert answer.code == code


async def test_a_store_that_changes_under_a_long_range_never_mixes_versions(
    faulty: FaultyS3, tmp_path: Path
) -> None:
    """Each piece is of the version that the head names, even if the cache is too small."""
    faulty.put("large", LARGE)
    faulty.hold("large", start=2 * PART_BYTES, times=100)
    daemon = Daemon(tmp_path, *DOOR, "--listing-ttl-s", "0", capacity="20MB", env=faulty.env())
    with ending(daemon):
        await asyncio.to_thread(daemon.start)
        client = await asyncio.to_thread(RawClient, daemon, "/faulty/large", Range="bytes=10-")
        with client:
            assert " 206 " in await asyncio.to_thread(client.head)
            assert await asyncio.to_thread(client.body, PART_BYTES) == LARGE[10 : PART_BYTES + 10]
            faulty.put("large", LARGE[::-1])
            faulty.answer_late()
            rest = await asyncio.to_thread(client.body, len(LARGE) - PART_BYTES - 10)
            assert len(rest) < len(LARGE) - PART_BYTES - 10
            assert rest == LARGE[PART_BYTES + 10 :][: len(rest)]
        found = await asyncio.to_thread(read, daemon, "/faulty/large", Range="bytes=10-19")
        assert found == LARGE[::-1][10:20]


async def test_a_range_is_sent_as_it_arrives(faulty: FaultyS3, tmp_path: Path) -> None:
    """Its first part, fetched by itself, is sent before the store gives the next."""
    faulty.put("large", LARGE)
    for start in (RANGE_PART_BYTES, MAX_REQUEST_BYTES):
        faulty.hold("large", start=start, times=100)
    daemon = Daemon(tmp_path, *DOOR, env=faulty.env())
    with ending(daemon):
        await asyncio.to_thread(daemon.start)
        client = await asyncio.to_thread(RawClient, daemon, "/faulty/large", Range="bytes=10-")
        with client:
            await asyncio.to_thread(client.head)
            first_bytes = RANGE_PART_BYTES - 10
            assert await asyncio.to_thread(client.body, first_bytes) == LARGE[10:RANGE_PART_BYTES]
            faulty.answer_late()
            rest = await asyncio.to_thread(client.body, len(LARGE) - RANGE_PART_BYTES)
            assert rest == LARGE[RANGE_PART_BYTES:]
