"""SIGTERM: what has arrived is kept, everyone is told, nothing that hangs keeps the daemon."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from shardcache.errors import StoppingError, from_json
from shardcache_client import ShardDataset
from shardcache_client.daemon.connection import DaemonConnection, FarewellError, ReaderIdentity
from support.programs.cli import Ran, shardcache
from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S
from support.programs.raw_session import RawSession
from support.shards.tars import make_tar, random_samples
from support.stores.faulty_s3 import Fault, FaultyS3

PART_BYTES = 64 * 1024
PARTS = 8
RECORD_BYTES = 8  # of a part, in the journal
SAMPLES = 10
MEMBER_BYTES = PARTS * PART_BYTES // SAMPLES - 3 * 1024
FLAGS = ("--part-size", str(PART_BYTES), "--stall-timeout-s", "300", "--listing-ttl-s", "0")

T = TypeVar("T")


def shard(number: int) -> bytes:
    """Return a tar that takes a little less than 8 parts."""
    return make_tar(random_samples(SAMPLES, {"bin": MEMBER_BYTES}, first=number * SAMPLES))


def keys(*numbers: int) -> list[str]:
    """Return the keys of the samples of some shards."""
    return [f"{key:06d}" for number in numbers for key in range(number * SAMPLES, (number + 1) * SAMPLES)]


def read(daemon: Daemon, urls: str | list[str]) -> list[str]:
    """Return the keys of all samples, in order."""
    return [sample["__key__"] for sample in ShardDataset(urls, socket=daemon.socket, timeout_s=GUARD_S)]


def first_bytes(store: FaultyS3, key: str) -> list[int]:
    """Return where the ranges asked for of an object begin, in order."""
    asked = [ranged for method, name, ranged, _ in store.seen if method == "GET" and name == key and ranged]
    return [int(ranged.removeprefix("bytes=").split("-")[0]) for ranged in asked]


async def aside(function: Callable[..., T], *args: object) -> T:
    """Call what blocks next to the store, which lives on this event loop."""
    return await asyncio.to_thread(function, *args)


@pytest.fixture
async def daemon(tmp_path: Path, faulty: FaultyS3) -> AsyncIterator[Daemon]:
    """A daemon before a store that misbehaves."""
    running = Daemon(tmp_path, *FLAGS, env=faulty.env())
    await aside(running.start)
    yield running
    await aside(running.kill)


def stalled(store: FaultyS3, key: str = "stalled.tar") -> str:
    """Put a shard whose last part never comes, and return its url."""
    url = store.put(key, shard(0))
    store.fail(key, Fault.SILENCE, start=(PARTS - 1) * PART_BYTES, times=1000)
    return url


def parts_here(daemon: Daemon) -> int:
    """Return how many parts of the only transfer under way are written down in its journal."""
    journals = list((daemon.cache_dir / "partial").glob("*.journal"))
    return len(journals[0].read_bytes().partition(b"\n")[2]) // RECORD_BYTES if journals else 0


async def begun(daemon: Daemon, url: str) -> asyncio.Task[Ran]:
    """Have a stalled shard warmed, and return once all of it is here that comes."""
    warming = asyncio.create_task(asyncio.to_thread(shardcache, "warm", url, socket=daemon.socket))
    await aside(eventually, lambda: parts_here(daemon) == PARTS - 1)
    return warming


async def test_finished_parts_are_kept(daemon: Daemon, faulty: FaultyS3) -> None:
    """A daemon that is stopped in the middle of a download leaves its parts to the next: one range is asked for."""
    url = faulty.put("a.tar", shard(0))
    faulty.fail("a.tar", Fault.SILENCE, start=(PARTS - 1) * PART_BYTES)
    reading = asyncio.create_task(asyncio.to_thread(read, daemon, url))
    last = (PARTS - 1) * PART_BYTES
    await aside(eventually, lambda: parts_here(daemon) == PARTS - 1 and last in first_bytes(faulty, "a.tar"))
    before = len(first_bytes(faulty, "a.tar"))
    assert await aside(daemon.stop) == 0
    await aside(daemon.start)
    assert await reading == keys(0)
    assert first_bytes(faulty, "a.tar")[before:] == [last]


async def test_restart_does_not_disturb_readers(
    daemon: Daemon, faulty: FaultyS3, caplog: pytest.LogCaptureFixture
) -> None:
    """Files in hand stay readable, the rest comes from the next daemon, and nothing is said above the level INFO."""
    urls = [faulty.put(f"{number}.tar", shard(number)) for number in range(3)]
    samples = iter(ShardDataset(urls, socket=daemon.socket, timeout_s=GUARD_S, partial_reads=False))
    found = [(await aside(next, samples))["__key__"]]
    assert await aside(daemon.stop) == 0
    found += [(await aside(next, samples))["__key__"] for _ in range(SAMPLES - 1)]
    with caplog.at_level(logging.INFO, "shardcache"):
        rest = asyncio.create_task(asyncio.to_thread(lambda: [sample["__key__"] for sample in samples]))
        await aside(eventually, lambda: "retrying for up to" in caplog.text)
        await aside(daemon.start)
        found += await rest
    assert found == keys(0, 1, 2)
    lines = [record for record in caplog.records if record.module == "choice"]
    assert [(line.levelno, "stopping" in line.getMessage()) for line in lines] == [(logging.INFO, True)]


async def test_readers_get_a_goodbye_with_its_own_code(daemon: Daemon, faulty: FaultyS3) -> None:
    """The goodbye has a code of its own, also for who has just connected and has not said hello."""
    with RawSession(daemon) as session:
        stopping = asyncio.create_task(asyncio.to_thread(daemon.stop))
        with pytest.raises(FarewellError):
            await aside(session.receive)
    assert await stopping == 0


async def test_hanging_store_and_readers_do_not_delay_the_exit(daemon: Daemon, faulty: FaultyS3) -> None:
    """A store that stalls, a warm that waits for it and readers that answer nothing: it ends with status 0."""
    url = stalled(faulty)
    warming = await begun(daemon, url)
    with RawSession(daemon, "deaf") as deaf, RawSession(daemon, "waiting") as waiting:
        deaf.plan([url], [0])
        waiting.plan([url], [0])
        waiting.send(type="lease", id=9, position=0)
        assert await aside(daemon.stop) == 0
    ran = await warming
    assert ran.code == 3 and "daemon" in ran.err and "Traceback" not in ran.err
    assert not daemon.socket.exists()
    assert "Traceback" not in daemon.log.read_text()


async def test_a_frozen_reader_does_not_keep_it(daemon: Daemon, faulty: FaultyS3) -> None:
    """One that has stopped to read its socket, with megabytes of answers before it, hears no goodbye and is left."""
    with RawSession(daemon) as session:
        for request in range(10):
            session.send(type="resolve", id=request, urls=["s3://faulty/{0..9999}.tar"])
        await aside(eventually, lambda: session.unread_bytes() > 100_000)
        assert await aside(daemon.stop) == 0


async def test_draining_daemon_says_so_and_refuses_new_work(daemon: Daemon, faulty: FaultyS3) -> None:
    """Health tells that it drains; sessions and errands get an error that says what to do."""
    warming = await begun(daemon, stalled(faulty))
    daemon.tell_to_stop()
    await aside(eventually, lambda: json.loads(daemon.request("GET", "/v1/health"))["status"] == "draining")
    refused = json.loads(await aside(daemon.request, "POST", "/v1/warm", {"urls": ["s3://faulty/a.tar"]}))
    assert isinstance(from_json(refused["error"]), StoppingError) and refused["error"]["remedy"]
    with pytest.raises(StoppingError, match="stopping"):
        await aside(DaemonConnection, daemon.socket, ReaderIdentity("late"))
    assert await aside(daemon.wait) == 0
    assert (await warming).code == 3


async def test_the_next_may_be_started_at_once(daemon: Daemon, faulty: FaultyS3) -> None:
    """A daemon over the same socket and folder waits for one that drains, and a job that comes then for both."""
    warming = await begun(daemon, stalled(faulty))
    url = faulty.put("a.tar", shard(1))
    next_daemon = Daemon(daemon.root, *FLAGS, env=faulty.env())
    daemon.tell_to_stop()
    await aside(eventually, lambda: json.loads(daemon.request("GET", "/v1/health"))["status"] == "draining")
    reading = asyncio.create_task(asyncio.to_thread(read, daemon, url))
    try:
        await aside(next_daemon.start)
        assert await aside(daemon.wait) == 0
        assert await reading == keys(1)
        assert (await warming).code == 3
        assert (await aside(next_daemon.status))["pid"] == next_daemon.pid
    finally:
        await aside(next_daemon.kill)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once(daemon: Daemon, faulty: FaultyS3, second: signal.Signals) -> None:
    """A second signal ends the drain at once; the next daemon starts with the folder as it is."""
    warming = await begun(daemon, stalled(faulty))
    daemon.tell_to_stop()
    await aside(eventually, lambda: json.loads(daemon.request("GET", "/v1/health"))["status"] == "draining")
    os.kill(daemon.pid, second)
    assert await aside(daemon.wait) == -second
    assert (await warming).code == 3
    await aside(daemon.start)
    assert await aside(read, daemon, faulty.put("a.tar", shard(1))) == keys(1)
