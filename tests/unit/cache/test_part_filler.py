"""part_filler.py: a part that arrives wakes whoever waits for it, also those that lack space."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shardcache.cache.waiting.stages import Stage
from shardcache.cache.waiting.waits import Wait
from shardcache.shared.protocol import ShardRef
from shardcache.store.part_file import JOURNAL_BYTES, PartFile
from support.programs.daemon import eventually
from support.programs.guard import GUARD_S
from support.shards.open_cache import Ground, ground
from support.shards.opening import opening_blocked
from support.stores.canary import GatedStore

PART_BYTES = 64 * 1024
PARTS = 40
BODY = random.Random(3).randbytes(PARTS * PART_BYTES)
NAME = "table"
OTHERS = ("one", "other")
CACHED = 6  # parts that fit


class Reading:
    """One caller's wait for consecutive parts of an object, which it holds from then on."""

    def __init__(self, cache: "RangeCache", url: str, *parts: int) -> None:
        start = parts[0] * PART_BYTES
        self._cache = cache
        self._url = url
        self.wait = Wait(bytes=(start, start + len(parts) * PART_BYTES))
        self._task = asyncio.create_task(self._read())

    async def begun(self, stage: Stage) -> None:
        """Return once the caller waits, in this stage."""
        await until(lambda: self.wait.has_own_stages and self._stage is stage)

    @property
    def _stage(self) -> Stage | None:
        return None if self.wait.stages is None else self.wait.stages.present

    @property
    def is_over(self) -> bool:
        return self._task.done()

    async def read(self) -> PartFile:
        """Return the file with the parts, once they are there."""
        async with asyncio.timeout(GUARD_S):
            return await self._task

    async def _read(self) -> PartFile:
        assert self.wait.bytes is not None
        leasing = self._cache.parts.fetching.leasing
        file = await leasing.acquire_range(ShardRef(self._url, is_file=True), self.wait)
        assert isinstance(file, PartFile)
        self._cache.residency.retain(file, file.parts_of(self.wait.bytes))
        return file


class RangeCache:
    """A cache of few parts, and a store that lets the bytes of a table go up to some part.

    Attributes:
        url: the table.
        others: two objects whose bytes are let go at once.
    """

    def __init__(self, here: Ground, store: GatedStore) -> None:
        self.parts = here.parts()
        self.residency = self.parts.core.residency.parts
        self.changed = self.parts.core.residency.changed
        self.store = store
        self.space = here.store.space
        self.url = store.put(NAME, BODY)
        self.others = [store.put(name, BODY) for name in OTHERS]
        for name in OTHERS:
            store.let(name)

    def let(self, count: int) -> None:
        """Let the first parts of the table go."""
        self.store.let(NAME, count * PART_BYTES)

    def reading(self, *parts: int, url: str | None = None) -> Reading:
        return Reading(self, url or self.url, *parts)

    async def hold(self, *parts: int) -> PartFile:
        """Read parts that the store lets go, and hold them."""
        return await self.reading(*parts).read()


async def until(condition: Callable[[], bool]) -> None:
    """Return once a condition holds."""
    await asyncio.to_thread(eventually, condition, pause_s=0.001)


@asynccontextmanager
async def range_cache(folder: Path, store: GatedStore) -> AsyncIterator[RangeCache]:
    capacity_bytes = 3 * JOURNAL_BYTES + CACHED * PART_BYTES
    options: dict[str, Any] = {
        "capacity": str(capacity_bytes),
        "range_part_size": str(PART_BYTES),
        "part_size": str(PART_BYTES),
    }
    async with ground(folder, **options) as here:
        yield RangeCache(here, store)


async def leave_parts(folder: Path, store: GatedStore, *parts: int) -> None:
    """Have an earlier daemon cache parts, which this one has to check."""
    async with range_cache(folder, store) as cache:
        cache.let(max(parts) + 1)
        for part in parts:
            await cache.hold(part)


def damage(file: PartFile, part: int) -> None:
    """Change bytes of a part on the disk."""
    with file.partial.path.open("r+b") as damaged:
        damaged.seek(part * PART_BYTES)
        damaged.write(bytes(100))
        os.fsync(damaged.fileno())


def parts_in(file: PartFile, first: int, last: int) -> bytes:
    body = file.partial.path.read_bytes()
    return body[first * PART_BYTES : (last + 1) * PART_BYTES]


@pytest.fixture
def store() -> Iterator[GatedStore]:
    with GatedStore() as running:
        yield running


async def test_a_part_arrives_while_others_wait_for_space(
    tmp_path: Path, store: GatedStore
) -> None:
    """Its reader may have to read it before the others can get their space."""
    async with range_cache(tmp_path, store) as cache:
        cache.let(3)
        held = await cache.hold(0, 1, 2)
        first = cache.reading(5)
        await first.begun(Stage.NETWORK)
        gated = cache.reading(20)
        await gated.begun(Stage.NETWORK)
        large = cache.reading(10, 11, 12)
        await large.begun(Stage.SPACE)
        late = cache.reading(5)
        await until(lambda: late.wait.stages is not None)
        cache.let(6)
        await first.read()
        await late.read()
        assert not large.is_over
        cache.residency.release(held, [0, 1, 2])
        cache.let(PARTS)
        await large.read()
        await gated.read()


async def test_parts_of_an_earlier_daemon_need_no_arrival(
    tmp_path: Path, store: GatedStore
) -> None:
    """Its reader gets a part once it is checked, whatever else is being fetched."""
    await leave_parts(tmp_path, store, 0)
    async with range_cache(tmp_path, store) as cache:
        gated = cache.reading(20)
        await gated.begun(Stage.NETWORK)
        await cache.hold(0)
        assert not gated.is_over
        cache.let(PARTS)
        await gated.read()


async def test_parts_that_are_there_are_not_evicted_for_others(
    tmp_path: Path, store: GatedStore
) -> None:
    """A reader gets its part before the space of the part is given to a larger range."""
    await leave_parts(tmp_path, store, 0, 1)
    fetched = store.ranges()
    async with range_cache(tmp_path, store) as cache:
        small = cache.reading(0)
        large = cache.reading(10, 11, 12, 13, 14)
        held = await small.read()
        assert store.ranges() == fetched
        assert not large.is_over
        cache.residency.release(held, [0])
        cache.let(PARTS)
        await large.read()


async def test_a_wait_that_joins_during_a_check_is_checked_as_well(
    tmp_path: Path, store: GatedStore
) -> None:
    """Its part would be fetched, and counted twice."""
    await leave_parts(tmp_path, store, 0, 1)
    fetched = store.ranges()
    async with range_cache(tmp_path, store) as cache:
        [path] = (tmp_path / "cache" / "partial").glob("*.part")
        with opening_blocked(path):
            first = cache.reading(0)
            await until(lambda: cache.residency.leased_bytes > 0)
            late = cache.reading(1)
            await until(lambda: late.wait.stages is not None)
        await first.read()
        file = await late.read()
        assert file.kept_bytes == JOURNAL_BYTES + 2 * PART_BYTES
        assert cache.space.kept_bytes == file.kept_bytes
    assert store.ranges() == fetched


async def test_a_part_that_is_lost_is_fetched_again_once_the_others_are_there(
    tmp_path: Path,
    store: GatedStore,
) -> None:
    """It was found damaged while its reader waited for another; further ones may take long."""
    async with range_cache(tmp_path, store) as cache:
        cache.let(4)
        file = await cache.hold(3)
        cache.residency.release(file, [3])
        last = cache.reading(20)
        await last.begun(Stage.NETWORK)
        reading = cache.reading(3, 4)
        await reading.begun(Stage.NETWORK)
        damage(file, 3)
        assert await cache.residency.verify_part(file, 3)
        cache.let(5)
        await reading.read()
        assert parts_in(file, 3, 4) == BODY[3 * PART_BYTES : 5 * PART_BYTES]
        assert not last.is_over
        cache.let(PARTS)
        await last.read()


async def test_waits_for_space_do_not_wake_each_other(tmp_path: Path, store: GatedStore) -> None:
    """Those whose turn it is not: they would keep the processor busy, and the first one waiting."""
    async with range_cache(tmp_path, store) as cache:
        for url in cache.others:
            file = await cache.reading(3, url=url).read()
            cache.residency.release(file, [3])
        cache.let(2)
        held = await cache.hold(0, 1)
        first = cache.reading(10, 11, 12, 13, 14)
        await first.begun(Stage.SPACE)
        later = [cache.reading(3, 4, url=url) for url in cache.others]
        for reading in later:
            await reading.begun(Stage.SPACE)
        before = cache.changed.count
        for _ in range(100):  # turns of the event loop
            await asyncio.sleep(0)
        assert cache.changed.count == before
        cache.residency.release(held, [0, 1])
        cache.let(PARTS)
        file = await first.read()
        cache.residency.release(file, range(10, 15))
        for reading in later:
            await reading.read()


async def test_a_lost_part_that_arrives_again_is_in_use(tmp_path: Path, store: GatedStore) -> None:
    """Whoever wants its space must not choose it, again and again."""
    async with range_cache(tmp_path, store) as cache:
        cache.let(4)
        file = await cache.hold(3)
        cache.residency.release(file, [3])
        reading = cache.reading(3, 4)
        await reading.begun(Stage.NETWORK)
        damage(file, 3)
        assert await cache.residency.verify_part(file, 3)
        await until(lambda: 3 in file.partial.done)
        for url in cache.others:  # together more than fits
            other = await cache.reading(0, 1, 2, url=url).read()
            cache.residency.release(other, [0, 1, 2])
        assert 3 in file.partial.done
        cache.let(PARTS)
        await reading.read()
        assert parts_in(file, 3, 4) == BODY[3 * PART_BYTES : 5 * PART_BYTES]


async def test_a_part_that_arrives_in_a_removed_file_is_not_counted(
    tmp_path: Path, store: GatedStore
) -> None:
    """Its reader gets the part from the file that takes the place of the removed one."""
    store.bytewise = True
    async with range_cache(tmp_path, store) as cache:
        cache.let(4)
        file = await cache.hold(3)
        reading = cache.reading(20)
        await reading.begun(Stage.NETWORK)
        store.let(NAME, 20 * PART_BYTES + 1000)
        [transfer] = cache.parts.fetching.transfers.all()
        await until(lambda: transfer.unfinished.received_bytes > 0)  # into the open file
        file.partial.path.unlink()
        cache.residency.release(file, [3])
        cache.residency.give_up_if_removed(file)
        cache.let(PARTS)
        again = await reading.read()
        assert again is not file
        assert parts_in(again, 20, 20) == BODY[20 * PART_BYTES : 21 * PART_BYTES]
        await until(lambda: not cache.parts.fetching.transfers.all())
        assert cache.space.kept_bytes == again.kept_bytes


async def test_a_removed_file_is_noticed_by_the_next_fetch(
    tmp_path: Path, store: GatedStore
) -> None:
    """Even if no reader opens it, and reports the loss."""
    async with range_cache(tmp_path, store) as cache:
        cache.let(PARTS)
        file = await cache.hold(3)
        cache.residency.release(file, [3])
        file.partial.path.unlink()
        again = await cache.hold(10)
        assert again is not file
        assert parts_in(again, 10, 10) == BODY[10 * PART_BYTES : 11 * PART_BYTES]


async def test_a_part_that_somebody_else_has_checked_is_given_to_its_reader(
    tmp_path: Path, store: GatedStore
) -> None:
    """The scrubber, for example, while the filler waits for the space of another range."""
    await leave_parts(tmp_path, store, 0, 1, 3)
    async with range_cache(tmp_path, store) as cache:
        held = await cache.hold(0, 1)
        large = cache.reading(10, 11, 12, 13, 14)
        await large.begun(Stage.SPACE)
        late = cache.reading(3)
        await until(lambda: late.wait.stages is not None)
        assert not await cache.residency.verify_part(held, 3)
        await late.read()
        assert not large.is_over
        cache.residency.release(held, [0, 1, 3])
        cache.let(PARTS)
        await large.read()
