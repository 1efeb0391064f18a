"""Shares of the line to the stores, seen from the stores' end."""

import asyncio
from collections.abc import Callable

import pytest

from shardcache.fetch.limits.origin_states import OriginLoad
from shardcache.fetch.limits.slot_claims import WAITING, Priority
from support.programs.downloads import PART, Rig
from support.stores.faulty_s3 import GaugedS3

MIB = 1024 * 1024
# More than the kernels of both sides hold back while nobody reads.
LARGE = 32 * MIB
BLOCK_BYTES = MIB  # of a body, read at a time


async def reached(condition: Callable[[], bool]) -> None:
    """Let everything run until a state is reached that no server tells of."""
    while not condition():  # noqa: ASYNC110 - nobody could set an event
        await asyncio.sleep(0)


async def test_a_paused_part_stops_its_sender_and_loses_nothing(rig: Rig, gauged: GaugedS3) -> None:
    """While a waiting reader's part has the only slot, the other's bytes stay in the store; each is sent once."""
    rig.downloader = rig.make(max_connections=1)
    planned, waiting = [await rig.stat(gauged.put(key, LARGE)) for key in ("planned", "waiting")]
    gauged.pauses |= {"planned": MIB, "waiting": 0}
    gauged.requests.clear()
    came_bytes: list[int] = []

    def note(done_bytes: int) -> None:
        came_bytes.append(rig.counters.origin_bytes)
        assert gauged.sent_bytes["planned"] < LARGE

    async with asyncio.TaskGroup() as group:
        paused = group.create_task(rig.download(planned, part_bytes=LARGE))
        await gauged.until(lambda: gauged.sent_bytes["planned"] >= MIB)
        group.create_task(rig.download(waiting, Priority(WAITING), part_bytes=LARGE, progress=note))
        await gauged.until(lambda: ("waiting", 0) in gauged.requests)
        gauged.go_on("planned")
        gauged.go_on("waiting")
    # A block that was being awaited when the part was paused still comes.
    assert came_bytes[-1] - LARGE <= MIB + BLOCK_BYTES
    assert paused.result().missing() == []
    assert gauged.requests == [("planned", 0), ("waiting", 0)]
    assert (rig.counters.origin_bytes, rig.counters.retries, rig.downloader.scheduler.pauses) == (2 * LARGE, 0, 1)


async def test_a_busy_store_gets_fewer_requests_until_it_takes_more(rig: Rig, gauged: GaugedS3) -> None:
    """503 SlowDown lowers what is asked at a time below what the store takes; success brings it back to the most."""
    rig.downloader = rig.make(max_connections=8, shard_connections=8, attempts=10)
    obj = await rig.stat(gauged.put("a.tar", 200 * PART, pause_after=0))
    gauged.capacity = 3
    async with asyncio.TaskGroup() as group:
        group.create_task(rig.download(obj))
        # Eight at once were five too many; then four, of which three are under way, one too many: it keeps to two.
        await reached(
            lambda: rig.downloader.scheduler.loads() == [OriginLoad("s3://gauged", connections=3, limit=2, throttled=2)]
        )
        assert gauged.refused == 6
        gauged.capacity = None
        gauged.most_at_once = 0
        while gauged.most_at_once < 8:
            await gauged.until(lambda: gauged.at_once >= rig.downloader.scheduler.loads()[0].limit)
            assert gauged.at_once <= max(3, rig.downloader.scheduler.loads()[0].limit)
            gauged.go_on("a.tar")
            await gauged.until(lambda: gauged.at_once == 0)
        gauged.pauses.clear()
        gauged.go_on("a.tar")
    assert gauged.refused == 6


@pytest.mark.slow
async def test_bandwidth_is_kept_all_along(rig: Rig, gauged: GaugedS3) -> None:
    """At no moment more bytes than the rate allows, but for what a burst and the kernel hold at the most."""
    rate, size = 4 * MIB, 6 * MIB
    rig.downloader = rig.make(max_bandwidth=rate)
    obj = await rig.stat(gauged.put("a.tar", size))
    loop, seen = asyncio.get_running_loop(), [(0.0, 0)]
    began_s = loop.time()

    def note(done_bytes: int) -> None:
        seen.append((loop.time() - began_s, done_bytes))

    await rig.download(obj, part_bytes=MIB, progress=note)
    assert seen[-1][1] == size
    for elapsed_s, done_bytes in seen:
        assert done_bytes <= rate * (elapsed_s + 0.1) + MIB
