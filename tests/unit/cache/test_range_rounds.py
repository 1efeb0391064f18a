"""Many waits for ranges at once, in a cache of few parts: each ends, with the right bytes.

Each life of a cache has several rounds. In a round, readers wait for ranges of three objects and
hold them for a moment, others give up, and parts are verified and evicted meanwhile. The next life
finds the parts that the last one has left, and has to check them.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Coroutine
from pathlib import Path

import pytest

from shardcache.cache.fetching.leasing import Published
from shardcache.cache.waiting.waits import Wait
from shardcache.shared.exceptions import DiskError
from shardcache.shared.protocol import ShardRef
from shardcache.store.part_file import PartFile
from support.programs.guard import GUARD_S
from support.shards.open_cache import Ground, ground
from support.stores.canary import Canary

PART_BYTES = 64 * 1024
PARTS = 24  # of an object, the last one short
SIZE_BYTES = PARTS * PART_BYTES - 1000
BODIES = [random.Random(number).randbytes(SIZE_BYTES) for number in range(3)]
CACHED = (14, 18, 34)  # parts that fit: many times less than are wanted, or a whole object, too
LIVES = 4
ROUNDS = 6
_MOST_CHANGES = 20  # in the cache, for each reader of a round
_DELAY_S = 0.02
_HOLDING_S = 0.05


class DelayedStore(Canary):
    """Answers each ranged read after a while."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def wait(self, path: str, stop: int) -> int:
        time.sleep(_DELAY_S * self._rng.random() ** 3)
        return super().wait(path, stop)


class Life:
    """A cache from its start to its end."""

    def __init__(self, here: Ground, urls: list[str], rng: random.Random) -> None:
        parts = here.parts()
        self._leasing = parts.fetching.leasing
        self._transfers = parts.fetching.transfers
        self._residency = parts.core.residency
        self._store = here.store
        self._urls = urls
        self._rng = rng

    async def round(self) -> None:
        """Have readers come together, and see that all of them end, and leave nothing behind."""
        rng = self._rng
        tasks: list[Coroutine[None, None, None]] = []
        tasks += [self._read() for _ in range(rng.choice([2, 8, 30]))]
        tasks += [self._give_up() for _ in range(rng.choice([0, 3, 10]))]
        if rng.random() < 0.5:
            tasks.append(self._verify())
        if rng.random() < 0.3:
            tasks.append(self._evict())
        rng.shuffle(tasks)
        before = self._residency.changed.count
        async with asyncio.timeout(GUARD_S), asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(task)
        assert self._residency.changed.count - before < _MOST_CHANGES * len(tasks)
        async with asyncio.timeout(GUARD_S):
            while self._transfers.all():
                await self._residency.changed.wait(_DELAY_S)
        self._check()

    def _check(self) -> None:
        """See that the parts are counted, each once, and that nobody holds any."""
        kept_bytes = self._store.leftovers.size_bytes
        for file in self._store.parts.files():
            assert not file.leases
            assert not file.partial.done.keys() & file.partial.unchecked.keys()
            kept_bytes += file.kept_bytes
        kept_bytes += sum(shard.kept_bytes for shard in self._store.shards.values())
        assert self._store.space.used_bytes == kept_bytes

    async def _read(self) -> None:
        """Read a range, and hold it for a moment."""
        rng = self._rng
        number = rng.randrange(len(BODIES))
        wait = self._chosen()
        if rng.random() < 0.5:
            await self._pause(_DELAY_S)
        ref = ShardRef(self._urls[number], is_file=True)
        file = await self._leasing.acquire_range(ref, wait)
        assert wait.first_bytes is not None
        start, end = wait.first_bytes
        right = BODIES[number][start:end]
        if isinstance(file, Published):
            with self._residency.retained(file.shard):
                path = self._store.layout.tar(file.shard.key)
                assert path.read_bytes()[start:end] == right
                await self._pause(_HOLDING_S)
        else:
            await self._hold(file, (start, end), right)

    async def _hold(self, file: PartFile, span: tuple[int, int], right: bytes) -> None:
        """Compare a range of the parts in a file, and hold them for a moment."""
        start, end = span
        numbers = file.parts_of(span)
        self._residency.parts.retain(file, numbers)
        try:
            with contextlib.suppress(FileNotFoundError):  # it is the whole object's by now
                assert file.partial.path.read_bytes()[start:end] == right
            await self._pause(_HOLDING_S)
        finally:
            self._residency.parts.release(file, numbers)

    def _chosen(self) -> Wait:
        """Choose a range, and how it is read."""
        rng = self._rng
        start = rng.randrange(SIZE_BYTES - 10)
        end = min(SIZE_BYTES, start + rng.choice([1, 100, PART_BYTES, 3 * PART_BYTES]))
        wait = Wait(bytes=(start, end), in_order=rng.random() < 0.3)
        if end < SIZE_BYTES and rng.random() < 0.2:
            wait.ahead = (end, min(SIZE_BYTES, end + PART_BYTES))
        if rng.random() < 0.7:
            wait.idle_since_s = time.monotonic()
        return wait

    async def _give_up(self) -> None:
        """Begin to read, and give up."""
        reading = asyncio.ensure_future(self._read())
        await self._pause(_DELAY_S)
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading

    async def _verify(self) -> None:
        """Compare some of the parts with their checksums."""
        await self._pause(_DELAY_S)
        for file in self._store.parts.files():
            for part in file.kept_parts:
                if self._rng.random() < 0.3:
                    with contextlib.suppress(DiskError):  # the file has gone meanwhile
                        assert not await self._residency.parts.verify_part(file, part)

    async def _evict(self) -> None:
        """Evict all objects that nobody holds."""
        await self._pause(_DELAY_S)
        for file in self._store.parts.files():
            await self._residency.parts.evict_all(file)

    async def _pause(self, limit_s: float) -> None:
        await asyncio.sleep(limit_s * self._rng.random() ** 3)


_MORE = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 7)]


@pytest.mark.parametrize("seed", [0, *_MORE])
async def test_each_wait_ends_with_the_right_bytes(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    capacity_bytes = CACHED[seed % len(CACHED)] * PART_BYTES
    with DelayedStore(rng) as store:
        urls = [store.put(f"{number}.bin", body) for number, body in enumerate(BODIES)]
        for _ in range(LIVES):
            async with ground(
                tmp_path,
                capacity=str(capacity_bytes),
                range_part_size=str(PART_BYTES),
                part_size=str(PART_BYTES),
            ) as here:
                life = Life(here, urls, rng)
                for _ in range(ROUNDS):
                    await life.round()
