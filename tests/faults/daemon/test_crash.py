"""kill -9 and SIGTERM at any point, a store that stops answering, an object that changes.

Nothing wrong is ever served, what has arrived is kept, everyone is told, and nothing that hangs
keeps the daemon.
"""

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from shardcache.errors import StoppingError
from shardcache.shared.exceptions import from_json
from shardcache_client.daemon.connection import DaemonConnection, ReaderIdentity
from shardcache_client.dataset import ShardDataset
from shardcache_client.reader import ShardReader
from shardcache_client.samples.token_blocks import TokenBlocks
from support.programs.cli import Ran, shardcache
from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S
from support.programs.raw_session import RawSession
from support.shards.tars import make_tar, random_samples, token_tar
from support.stores.faulty_s3 import FaultyS3
from support.stores.mischief import Mischief

pytestmark = pytest.mark.slow

PART_BYTES = 64 * 1024
PARTS = 8
SAMPLES = 10
MEMBER_BYTES = PARTS * PART_BYTES // SAMPLES - 3 * 1024
FLAGS = (
    "--part-size",
    str(PART_BYTES),
    "--stall-timeout-s",
    "300",
    "--listing-ttl-s",
    "0",
    "--attempts",
    "3",
)

T = TypeVar("T")


def shard(number: int, *, seed: int = 0) -> bytes:
    """Return a tar that takes a little less than 8 parts."""
    return make_tar(
        random_samples(SAMPLES, {"bin": MEMBER_BYTES}, seed=seed, first=number * SAMPLES)
    )


def read(daemon: Daemon, urls: str | list[str], *, partial_reads: bool = True) -> dict[str, bytes]:
    """Return every sample by its key."""
    dataset = ShardDataset(
        urls, socket=daemon.socket, timeout_s=GUARD_S, partial_reads=partial_reads
    )
    return {sample["__key__"]: sample["bin"] for sample in dataset}


def samples_of(*numbers: int, seed: int = 0) -> dict[str, bytes]:
    """Return what reading those shards must give."""
    shards = [
        random_samples(SAMPLES, {"bin": MEMBER_BYTES}, seed=seed, first=number * SAMPLES)
        for number in numbers
    ]
    return {str(sample["__key__"]): bytes(sample["bin"]) for some in shards for sample in some}  # type: ignore[arg-type]


def first_bytes(server: FaultyS3, key: str) -> list[int]:
    """Return where the ranges asked for of an object begin, in order."""
    asked = [
        ranged
        for method, name, ranged, _ in server.seen
        if method == "GET" and name == key and ranged
    ]
    return [int(ranged.removeprefix("bytes=").split("-")[0]) for ranged in asked]


def journalled_parts(daemon: Daemon) -> int:
    """Return how many finished parts the journals of arriving shards hold."""
    journals = [path.read_bytes() for path in (daemon.cache_dir / "partial").glob("*.journal")]
    return sum(
        (len(journal) - len(journal.partition(b"\n")[0]) - 1) // 8
        for journal in journals
        if journal
    )


async def aside(function: Callable[..., T], *args: object, **options: object) -> T:
    """Call what blocks next to the store, which lives on this event loop."""
    return await asyncio.to_thread(function, *args, **options)


@pytest.fixture
async def daemon(tmp_path: Path, faulty: FaultyS3) -> AsyncIterator[Daemon]:
    """A daemon before a store that misbehaves, for calls from threads, as they block."""
    running = Daemon(tmp_path, *FLAGS, env=faulty.env())
    await aside(running.start)
    yield running
    await aside(running.kill)


@pytest.mark.parametrize("end", [Daemon.kill, Daemon.stop])
async def test_finished_parts_outlive_the_daemon(
    daemon: Daemon, faulty: FaultyS3, end: Callable[[Daemon], object]
) -> None:
    """Only the missing part is asked for again after kill -9 or SIGTERM in a download."""
    url = faulty.put("a.tar", shard(0))
    last = (PARTS - 1) * PART_BYTES
    faulty.fail(Mischief.SILENCE, key="a.tar", times=1, start=last)
    asking = asyncio.create_task(asyncio.to_thread(read, daemon, url))
    await aside(
        eventually,
        lambda: journalled_parts(daemon) == PARTS - 1 and last in first_bytes(faulty, "a.tar"),
    )
    before = len(first_bytes(faulty, "a.tar"))
    assert not await aside(end, daemon)
    await aside(daemon.start)
    assert await asking == samples_of(0)
    assert first_bytes(faulty, "a.tar")[before:] == [last]


async def test_a_transfer_outlives_the_reader_that_asked_first(
    daemon: Daemon, faulty: FaultyS3
) -> None:
    """It continues without them, and no part is requested twice."""
    url = faulty.put("a.tar", shard(0))
    faulty.fail(Mischief.STALL, key="a.tar", times=1, start=0)
    with RawSession(daemon) as session:
        session.plan([url], [0])
        session.send(type="lease", id=9, position=0)
        await aside(eventually, lambda: len(first_bytes(faulty, "a.tar")) >= 1)
    await aside(
        eventually, lambda: daemon.sessions() == 0 and len(first_bytes(faulty, "a.tar")) >= PARTS
    )
    transfers = (await aside(daemon.status))["transfers"]
    assert [(transfer["url"], transfer["waiters"]) for transfer in transfers] == [(url, 0)]
    assert len(first_bytes(faulty, "a.tar")) == PARTS


async def test_numbers_of_tokens_outlast_an_outage(daemon: Daemon, faulty: FaultyS3) -> None:
    """The last index file is used while the store is away, with all that blocks need."""
    faulty.put("0.tar", token_tar([[1, 2, 3], [4]]))
    row = {"url": "0.tar", "nsamples": 2, "ntokens": 4}
    url = faulty.put("index.json", json.dumps({"wids_version": 1, "shardlist": [row]}).encode())

    def blocks() -> list[list[int]]:
        return [
            sample["tokens"].tolist()
            for sample in ShardReader(url, tokens=TokenBlocks(2), socket=daemon.socket)
        ]

    assert await aside(blocks) == [[1, 2], [3, 4]]
    faulty.fail(Mischief.INTERNAL_ERROR, key="index.json", method="HEAD")
    await aside(daemon.restart)
    assert await aside(blocks) == [[1, 2], [3, 4]]


def stalled(store: FaultyS3, key: str = "stalled.tar") -> str:
    """Put a shard whose last part never comes, and return its url."""
    url = store.put(key, shard(0))
    store.fail(Mischief.SILENCE, key=key, start=(PARTS - 1) * PART_BYTES)
    return url


async def begun(daemon: Daemon, url: str) -> asyncio.Task[Ran]:
    """Have a stalled shard warmed, and return once all of it is here that comes."""
    warming = asyncio.create_task(asyncio.to_thread(shardcache, "warm", url, socket=daemon.socket))
    await aside(eventually, lambda: journalled_parts(daemon) == PARTS - 1)
    return warming


async def test_restart_does_not_disturb_readers(
    daemon: Daemon, faulty: FaultyS3, caplog: pytest.LogCaptureFixture
) -> None:
    """Open files stay readable, the rest comes from the next daemon, and logs stay at INFO."""
    urls = [faulty.put(f"{number}.tar", shard(number)) for number in range(3)]
    samples = iter(ShardDataset(urls, socket=daemon.socket, timeout_s=GUARD_S, partial_reads=False))
    found = [(await aside(next, samples))["__key__"]]
    assert await aside(daemon.stop) == 0
    found += [(await aside(next, samples))["__key__"] for _ in range(SAMPLES - 1)]
    with caplog.at_level(logging.INFO, "shardcache"):
        rest = asyncio.create_task(
            asyncio.to_thread(lambda: [sample["__key__"] for sample in samples])
        )
        await aside(eventually, lambda: "retrying for up to" in caplog.text)
        await aside(daemon.start)
        found += await rest
    assert found == list(samples_of(0, 1, 2))
    lines = [record for record in caplog.records if record.module == "patience"]
    assert [(line.levelno, "stopping" in line.getMessage()) for line in lines] == [
        (logging.INFO, True)
    ]


async def test_hanging_store_and_readers_do_not_delay_the_exit(
    daemon: Daemon, faulty: FaultyS3
) -> None:
    """It ends with status 0, though the store stalls and readers answer nothing."""
    url = stalled(faulty)
    warming = await begun(daemon, url)
    with RawSession(daemon, "deaf") as deaf, RawSession(daemon, "waiting") as waiting:
        deaf.plan([url], [0])
        waiting.plan([url], [0])
        waiting.send(type="lease", id=9, position=0)
        assert await aside(daemon.stop) == 0
    ran = await warming
    assert ran.code == 3
    assert "daemon" in ran.err
    assert "Traceback" not in ran.err
    assert not daemon.socket.exists()
    assert "Traceback" not in daemon.log.read_text()


async def test_a_frozen_reader_does_not_keep_it(daemon: Daemon, faulty: FaultyS3) -> None:
    """One that reads no more of its socket, with megabytes waiting, is left without goodbye."""
    with RawSession(daemon) as session:
        for request in range(10):
            session.send(type="resolve", id=request, urls=["s3://faulty/{0..9999}.tar"])
        await aside(eventually, lambda: session.unread_bytes() > 100_000)
        assert await aside(daemon.stop) == 0


async def test_draining_daemon_says_so_and_refuses_new_work(
    daemon: Daemon, faulty: FaultyS3
) -> None:
    """Health tells that it drains; sessions and errands get an error that says what to do."""
    warming = await begun(daemon, stalled(faulty))
    daemon.tell_to_stop()
    await aside(
        eventually, lambda: json.loads(daemon.request("GET", "/v1/health"))["status"] == "draining"
    )
    refused = json.loads(
        await aside(daemon.request, "POST", "/v1/warm", {"urls": ["s3://faulty/a.tar"]})
    )
    assert isinstance(from_json(refused["error"]), StoppingError)
    assert refused["error"]["remedy"]
    with pytest.raises(StoppingError, match="stopping"):
        await aside(
            DaemonConnection, daemon.socket, ReaderIdentity("late"), time.monotonic() + GUARD_S
        )
    assert await aside(daemon.wait) == 0
    assert (await warming).code == 3


async def test_the_next_may_be_started_at_once(daemon: Daemon, faulty: FaultyS3) -> None:
    """A daemon over the same socket and folder waits for one that drains, and a job for both."""
    warming = await begun(daemon, stalled(faulty))
    url = faulty.put("a.tar", shard(1))
    next_daemon = Daemon(daemon.root, *FLAGS, env=faulty.env())
    daemon.tell_to_stop()
    await aside(
        eventually, lambda: json.loads(daemon.request("GET", "/v1/health"))["status"] == "draining"
    )
    reading = asyncio.create_task(asyncio.to_thread(read, daemon, url))
    try:
        await aside(next_daemon.start)
        assert await aside(daemon.wait) == 0
        assert await reading == samples_of(1)
        assert (await warming).code == 3
        assert (await aside(next_daemon.status))["pid"] == next_daemon.pid
    finally:
        await aside(next_daemon.kill)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once(
    daemon: Daemon, faulty: FaultyS3, second: signal.Signals
) -> None:
    """A second signal ends the drain at once; the next daemon starts with the folder as it is."""
    warming = await begun(daemon, stalled(faulty))
    daemon.tell_to_stop()
    await aside(
        eventually, lambda: json.loads(daemon.request("GET", "/v1/health"))["status"] == "draining"
    )
    os.kill(daemon.pid, second)
    assert await aside(daemon.wait) == -second
    assert (await warming).code == 3
    await aside(daemon.start)
    assert await aside(read, daemon, faulty.put("a.tar", shard(1))) == samples_of(1)
