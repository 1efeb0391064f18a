"""kill -9 at any point, a store that stops answering, an object that changes: nothing wrong is ever served."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shardcache_client import ShardDataset, ShardReader, TokenBlocks
from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S
from support.programs.raw_session import RawSession
from support.shards.tars import make_tar, random_samples, token_tar
from support.stores.faulty_s3 import BUCKET, Fault, FaultyS3

PART_BYTES = 64 * 1024
PARTS = 8
SAMPLES = 10
FLAGS = ("--part-size", str(PART_BYTES), "--stall-timeout-s", "60", "--listing-ttl-s", "0", "--attempts", "3")


def shard(number: int, *, seed: int = 0) -> bytes:
    """Return a tar that takes a little less than 8 parts."""
    size = PARTS * PART_BYTES // SAMPLES - 3 * 1024
    return make_tar(random_samples(SAMPLES, {"bin": size}, seed=seed, first=number * SAMPLES))


def read(daemon: Daemon, urls: str | list[str], *, partial_reads: bool = True) -> dict[str, bytes]:
    """Return every sample by its key."""
    dataset = ShardDataset(urls, socket=daemon.socket, timeout_s=GUARD_S, partial_reads=partial_reads)
    return {sample["__key__"]: sample["bin"] for sample in dataset}


def samples_of(*numbers: int, seed: int = 0) -> dict[str, bytes]:
    """Return what reading those shards must give."""
    size = PARTS * PART_BYTES // SAMPLES - 3 * 1024
    shards = [random_samples(SAMPLES, {"bin": size}, seed=seed, first=number * SAMPLES) for number in numbers]
    return {str(sample["__key__"]): bytes(sample["bin"]) for some in shards for sample in some}  # type: ignore[arg-type]


def ranges(server: FaultyS3, key: str) -> list[str]:
    """Return the ranges asked for of an object, in order."""
    return [asked for method, name, asked, _ in server.seen if method == "GET" and name == key and asked]


def parts_requested(server: FaultyS3) -> int:
    """Return how many parts of any object were requested; one request may be for several."""
    asked = [re.fullmatch(r"bytes=(\d+)-(\d+)", header) for _, _, header, _ in server.seen if header]
    return sum(-(-(int(match[2]) + 1 - int(match[1])) // PART_BYTES) for match in asked if match)


def journalled_parts(daemon: Daemon) -> int:
    """Return how many finished parts the journals of arriving shards hold."""
    journals = (daemon.cache_dir / "partial").glob("*.journal")
    return sum((path.stat().st_size - len(path.read_bytes().splitlines(keepends=True)[0])) // 8 for path in journals)


@pytest.fixture
async def daemon(tmp_path: Path, faulty: FaultyS3) -> AsyncIterator[Daemon]:
    """A daemon before a store that misbehaves; its calls block, so they run in threads next to the store."""
    running = Daemon(tmp_path, *FLAGS, env=faulty.env())
    await asyncio.to_thread(running.start)
    yield running
    await asyncio.to_thread(running.kill)


async def test_finished_parts_outlive_a_kill(daemon: Daemon, faulty: FaultyS3) -> None:
    """After kill -9 in the middle of a download, only the part that was missing is asked for again."""
    url = faulty.put("a.tar", shard(0))
    last = (PARTS - 1) * PART_BYTES
    faulty.fail("a.tar", Fault.SILENCE, start=last)
    asking = asyncio.create_task(asyncio.to_thread(read, daemon, url))
    await asyncio.to_thread(eventually, lambda: journalled_parts(daemon) == PARTS - 1)
    await asyncio.to_thread(eventually, lambda: any(f"={last}-" in asked for asked in ranges(faulty, "a.tar")))
    asked_before = len(ranges(faulty, "a.tar"))
    await asyncio.to_thread(daemon.restart)
    assert await asking == samples_of(0)
    assert [asked.split("-")[0] for asked in ranges(faulty, "a.tar")[asked_before:]] == [f"bytes={last}"]


async def test_parts_of_a_replaced_object_are_not_reused(daemon: Daemon, faulty: FaultyS3) -> None:
    """Parts of one version are never finished with parts of another."""
    url = faulty.put("a.tar", shard(0))
    faulty.fail("a.tar", Fault.SILENCE, start=0)
    asking = asyncio.create_task(asyncio.to_thread(read, daemon, url))
    await asyncio.to_thread(eventually, lambda: journalled_parts(daemon) == PARTS - 1)
    await asyncio.to_thread(daemon.kill)
    faulty.put("a.tar", shard(0, seed=1))
    await asyncio.to_thread(daemon.start)
    assert await asking == samples_of(0, seed=1)


async def test_an_object_replaced_midway_is_read_whole_from_its_new_version(daemon: Daemon, faulty: FaultyS3) -> None:
    """Not one byte of the version that was seen first is served, where none may be before it is whole."""
    url = faulty.put("a.tar", shard(0))
    faulty.put("b.tar", shard(0, seed=1)[::-1])  # REPLACED turns the bytes round
    url = f"s3://{BUCKET}/b.tar"
    faulty.fail("b.tar", Fault.REPLACED, start=5 * PART_BYTES)
    assert await asyncio.to_thread(read, daemon, url, partial_reads=False) == samples_of(0, seed=1)


@pytest.mark.parametrize("after", [1, 4, 30])
async def test_killed_anywhere_nothing_wrong_is_served(daemon: Daemon, faulty: FaultyS3, after: int) -> None:
    """However far the fetching of six shards had come, a restart gives every sample, and every file checks out."""
    numbers = range(6)
    for number in numbers:
        faulty.put(f"{number}.tar", shard(number))
    urls = f"s3://{BUCKET}/{{0..5}}.tar"
    asking = asyncio.create_task(asyncio.to_thread(read, daemon, urls))
    await asyncio.to_thread(eventually, lambda: parts_requested(faulty) >= after)
    await asyncio.to_thread(daemon.restart)
    assert await asking == samples_of(*numbers)
    verdict = await asyncio.to_thread(daemon.request, "POST", "/v1/verify", {"prefix": ""})
    assert json.loads(verdict.splitlines()[-1]) | {"bytes": 0} == {
        "event": "done",
        "shards": 6,
        "corrupt": 0,
        "bytes": 0,
    }


async def test_a_transfer_outlives_the_reader_that_asked_first(daemon: Daemon, faulty: FaultyS3) -> None:
    """It continues without them, and no part is requested twice."""
    url = faulty.put("a.tar", shard(0))
    faulty.fail("a.tar", Fault.STALL, start=0)
    with RawSession(daemon) as session:
        session.plan([url], [0])
        session.send(type="lease", id=9, position=0)
        await asyncio.to_thread(eventually, lambda: len(ranges(faulty, "a.tar")) >= 1)
    await asyncio.to_thread(eventually, lambda: daemon.sessions() == 0 and len(ranges(faulty, "a.tar")) >= PARTS)
    transfers = (await asyncio.to_thread(daemon.status))["transfers"]
    assert [(transfer["url"], transfer["waiters"]) for transfer in transfers] == [(url, 0)]
    assert len(ranges(faulty, "a.tar")) == PARTS


async def test_cached_shards_are_served_while_the_store_is_unreachable(daemon: Daemon, faulty: FaultyS3) -> None:
    """A url of unknown version is asked about again; without an answer, the version seen last is served."""
    url = faulty.put("a.tar", shard(0))
    assert await asyncio.to_thread(read, daemon, url) == samples_of(0)
    faulty.fail("a.tar", Fault.SERVER_ERROR, method="HEAD", times=1000)
    assert await asyncio.to_thread(read, daemon, url) == samples_of(0)
    await asyncio.to_thread(daemon.restart)
    assert await asyncio.to_thread(read, daemon, url) == samples_of(0)


async def test_numbers_of_tokens_outlast_an_outage(daemon: Daemon, faulty: FaultyS3) -> None:
    """The index file that was read last is used while the store is away, and has all that blocks of tokens need."""
    faulty.put("0.tar", token_tar([[1, 2, 3], [4]]))
    row = {"url": "0.tar", "nsamples": 2, "ntokens": 4}
    url = faulty.put("index.json", json.dumps({"wids_version": 1, "shardlist": [row]}).encode())

    def blocks() -> list[list[int]]:
        return [sample["tokens"].tolist() for sample in ShardReader(url, tokens=TokenBlocks(2), socket=daemon.socket)]

    assert await asyncio.to_thread(blocks) == [[1, 2], [3, 4]]
    faulty.fail("index.json", Fault.SERVER_ERROR, method="HEAD", times=1000)
    await asyncio.to_thread(daemon.restart)
    assert await asyncio.to_thread(blocks) == [[1, 2], [3, 4]]


async def test_a_new_version_is_served_once_it_is_known(daemon: Daemon, faulty: FaultyS3) -> None:
    """A shard that was replaced in the store is fetched again under its new version."""
    url = faulty.put("a.tar", shard(0))
    assert await asyncio.to_thread(read, daemon, url) == samples_of(0)
    faulty.put("a.tar", shard(0, seed=1))
    assert await asyncio.to_thread(read, daemon, url) == samples_of(0, seed=1)


async def test_plan_continues_after_an_outage(daemon: Daemon, faulty: FaultyS3) -> None:
    """Shards that could not be fetched ahead while the store was broken are fetched ahead once it works."""
    for number in range(4):
        faulty.put(f"{number}.tar", shard(number))
        faulty.fail(f"{number}.tar", Fault.SERVER_ERROR, method="HEAD", times=4)
    urls = f"s3://{BUCKET}/{{0..3}}.tar"
    assert await asyncio.to_thread(read, daemon, urls) == samples_of(0, 1, 2, 3)
