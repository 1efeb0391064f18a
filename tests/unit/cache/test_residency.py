"""residency.py: only shards that nothing keeps are evictable; a deadlock ends one claim."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shardcache.cache.space.deadlock import check_progress
from shardcache.cache.waiting.claims import KeyClaim
from shardcache.cache.waiting.transfer import Transfer
from shardcache.cache.waiting.waits import PostponedError, PriorityClass, Wait
from shardcache.errors import CapacityError
from shardcache.plan.reader_plan import NOW
from shardcache.shared.protocol import ShardRef
from shardcache.store.folder.pins_file import Pin
from shardcache.store.shard import Shard
from shardcache.store.space import Reservation, Space, footprint_bytes
from shardcache.store.store import Store
from support.cases import first_quick
from support.shards.stores import kept_in, open_store

KEYS = [f"key-{number}" for number in range(8)]
SIZE_BYTES = 100
STEPS = 200

MB = 1_000_000
CAPACITY = 100 * MB
SHARD_BYTES = footprint_bytes(10 * MB)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = open_store(tmp_path)
    yield store
    store.close()


def pin_on(key: str) -> Pin:
    """Return a pin that keeps the shard for a key."""
    return Pin(f"s3://bucket/{key}.tar", key, SIZE_BYTES, frozenset({7}))


class AnyOrder:
    """Leases, pins, removals that fail and damage of leased shards, drawn by a seed."""

    def __init__(self, store: Store, seed: int) -> None:
        self._store = store
        self._random = random.Random(seed)
        self._kept = kept_in(store)
        self._leases: list[Shard] = []
        self._still_open: set[Shard] = set()

    async def step(self) -> None:
        """Do something with some shard, if it can be done."""
        key = self._random.choice(KEYS)
        steps = (
            self._publish,
            self._retain,
            self._retain,
            self._release,
            self._pin,
            self._unpin,
            self._remove,
            self._fail_to_remove,
            self._damage,
        )
        await self._random.choice(steps)(key)

    def check(self) -> None:
        """Check that exactly the shards that nothing keeps may be evicted."""
        residency = self._kept.residency
        evictable = self._evictable()
        wanted_bytes = SIZE_BYTES * len(evictable)
        schedule = self._kept.planner.schedule
        keys = schedule.victims(wanted_bytes, NOW, 0.0) if wanted_bytes else []
        assert sorted(keys or ()) == sorted(shard.key for shard in evictable)
        assert schedule.victims(wanted_bytes + 1, NOW, 0.0) is None
        assert residency.leased == set(self._leases)
        pinned = {shard.key for shard in self._store.shards.values() if shard.pinned}
        assert set(residency.pinned) == pinned
        assert self._store.space.pinned_bytes == SIZE_BYTES * len(residency.pinned)

    def _evictable(self) -> list[Shard]:
        shards = self._store.shards.values()
        return [each for each in shards if not each.must_stay and each not in self._still_open]

    async def _publish(self, key: str) -> None:
        if key not in self._store.shards:
            self._store.restore(Shard(key, SIZE_BYTES, 0, 0.0))
            self._kept.residency.arrived(self._store.shards[key])

    async def _retain(self, key: str) -> None:
        shard = self._kept.residency.retain_cached(key)
        if shard is not None:
            self._leases.append(shard)
            self._still_open.discard(shard)

    async def _release(self, _key: str) -> None:
        if self._leases:
            number = self._random.randrange(len(self._leases))
            self._kept.residency.release(self._leases.pop(number))

    async def _pin(self, key: str) -> None:
        await self._kept.pins.add([pin_on(key)])
        self._still_open.difference_update(self._kept.residency.pinned.values())

    async def _unpin(self, key: str) -> None:
        await self._kept.pins.remove([pin_on(key)], None)

    async def _remove(self, key: str) -> None:
        shard = self._store.shards.get(key)
        if shard in self._evictable():
            with self._kept.residency.evicting(shard):
                del self._store.shards[key]
                self.check()
            assert not shard.pinned

    async def _fail_to_remove(self, key: str) -> None:
        """Keep a shard whose removal fails, open or with a pin that was added meanwhile."""
        shard = self._store.shards.get(key)
        if shard not in self._evictable():
            return
        is_pinned = self._random.choice([True, False])
        with self._kept.residency.evicting(shard):
            del self._store.shards[key]
            self.check()
            if is_pinned:
                await self._kept.pins.add([pin_on(key)])
            self._store.shards[key] = shard
        assert shard.pinned is is_pinned
        if not is_pinned:
            self._still_open.add(shard)

    async def _damage(self, key: str) -> None:
        if key in self._store.shards:
            self._kept.residency.gone(key)
            del self._store.shards[key]


@pytest.mark.parametrize("seed", first_quick(range(4)))
async def test_exactly_the_shards_that_nothing_keeps_are_evictable(store: Store, seed: int) -> None:
    """Leases, pins, removals that fail and damage of leased shards, in any order."""
    scene = AnyOrder(store, seed)
    for _ in range(STEPS):
        await scene.step()
        scene.check()


def held(*leases: int) -> list[Shard]:
    """Return shards of 10 MB that are held so many times each."""
    return [
        Shard(f"key-{number}", 10 * MB, 0, 0.0, leases=count) for number, count in enumerate(leases)
    ]


@dataclass(eq=False)
class Keeper:
    """A reader that keeps a number of shards, and those that keep theirs for it."""

    shards: int
    others: "tuple[Keeper, ...]" = ()

    def lease_count(self) -> int:
        return self.shards

    def kept_waiting(self) -> "tuple[Keeper, ...]":
        return self.others


MATE = Keeper(1)  # a worker of the same loader


def waiting(
    in_hand: int | None,
    *,
    wanted_bytes: int = SHARD_BYTES,
    needed: bool = True,
    reserved_bytes: int = 0,
    claim_ahead: KeyClaim | None = None,
    others: tuple[Keeper, ...] = (),
) -> KeyClaim:
    """Return a shard that a reader with so many in hand awaits; no reader if None."""
    transfer = Transfer("name", ShardRef("s3://bucket/a.tar"), PriorityClass.PLANNED)
    if in_hand is not None:
        transfer.waits.add(
            Wait(("job", 7), time.monotonic() if needed else None, holder=Keeper(in_hand, others))
        )
    reservation = Reservation(Space(CAPACITY))
    reservation.grow(reserved_bytes)
    return KeyClaim(
        transfers=[transfer],
        reservation=reservation,
        wanted_bytes=wanted_bytes,
        claim_ahead=claim_ahead,
        waits_since_s=time.monotonic(),
    )


def gives_up(claims: list[KeyClaim], in_use: list[Shard], capacity: int) -> list[bool]:
    """Return for each claim whether it is the one that has to give up."""
    found = []
    for claim in claims:
        try:
            check_progress(claim, claims, in_use, Space(capacity))
            found.append(False)
        except (CapacityError, PostponedError):
            found.append(True)
    return found


def behind(first: KeyClaim, in_hand: int, **facts: Any) -> list[KeyClaim]:
    """Return a claim, and one whose turn comes after it."""
    return [first, waiting(in_hand, wanted_bytes=0, claim_ahead=first, **facts)]


ROOM = 20 * MB + SHARD_BYTES


class FullCache(NamedTuple):
    """Claims that wait for space, the leased shards, and which of the claims have to give up."""

    claims: Callable[[], list[KeyClaim]]
    in_use: list[Shard]
    capacity_bytes: int
    gives_up: list[bool]


DEADLOCKS = {
    "the latest gives up": FullCache(
        claims=lambda: [waiting(2), waiting(2)],
        in_use=held(1, 1, 1, 1),
        capacity_bytes=45 * MB,
        gives_up=[False, True],
    ),
    "a shard held twice is there once": FullCache(
        claims=lambda: [waiting(1), waiting(1)],
        in_use=held(2),
        capacity_bytes=15 * MB,
        gives_up=[False, True],
    ),
    "a shard held twice leaves room": FullCache(
        claims=lambda: [waiting(1), waiting(1)],
        in_use=held(2),
        capacity_bytes=25 * MB,
        gives_up=[False, False],
    ),
    "another reader reads": FullCache(
        claims=lambda: [waiting(2), waiting(2)],
        in_use=held(1, 1, 1, 1, 1),
        capacity_bytes=45 * MB,
        gives_up=[False, False],
    ),
    "another's shard is coming": FullCache(
        claims=lambda: [waiting(2), waiting(2, wanted_bytes=0)],
        in_use=held(1, 1, 1, 1),
        capacity_bytes=45 * MB,
        gives_up=[False, False],
    ),
    "another has something to read": FullCache(
        claims=lambda: [waiting(2), waiting(2, needed=False)],
        in_use=held(1, 1, 1, 1),
        capacity_bytes=45 * MB,
        gives_up=[False, False],
    ),
    "another's shard has room": FullCache(
        claims=lambda: [waiting(2), waiting(2, wanted_bytes=MB)],
        in_use=held(1, 1, 1, 1),
        capacity_bytes=45 * MB,
        gives_up=[False, False],
    ),
    "unleased shards are free space": FullCache(
        claims=lambda: [waiting(2)],
        in_use=held(1, 1),
        capacity_bytes=ROOM,
        gives_up=[False],
    ),
    "one byte too few": FullCache(
        claims=lambda: [waiting(2)],
        in_use=held(1, 1),
        capacity_bytes=ROOM - 1,
        gives_up=[True],
    ),
    "a half inflated shard keeps its space": FullCache(
        claims=lambda: [waiting(1, wanted_bytes=MB, reserved_bytes=30 * MB)],
        in_use=held(1),
        capacity_bytes=40 * MB,
        gives_up=[True],
    ),
    "a half inflated shard has room": FullCache(
        claims=lambda: [waiting(1, wanted_bytes=MB, reserved_bytes=30 * MB)],
        in_use=held(1),
        capacity_bytes=41 * MB,
        gives_up=[False],
    ),
    "behind one that goes on": FullCache(
        claims=lambda: behind(waiting(0, wanted_bytes=0), 1),
        in_use=held(1),
        capacity_bytes=15 * MB,
        gives_up=[False, False],
    ),
    "behind one that is stuck, whose reader keeps a shard": FullCache(
        claims=lambda: behind(
            waiting(1, wanted_bytes=MB, reserved_bytes=5 * MB), 0, reserved_bytes=5 * MB
        ),
        in_use=held(1),
        capacity_bytes=20 * MB,
        gives_up=[True, False],
    ),
    "a worker of its loader keeps a shard": FullCache(
        claims=lambda: [waiting(0, others=(MATE,))],
        in_use=held(1),
        capacity_bytes=15 * MB,
        gives_up=[True],
    ),
    "two wait for that worker's batch": FullCache(
        claims=lambda: [waiting(0, others=(MATE,)), waiting(0, others=(MATE,))],
        in_use=held(1),
        capacity_bytes=15 * MB,
        gives_up=[False, True],
    ),
    "a stranger may give its own back": FullCache(
        claims=lambda: [waiting(0, others=(MATE,))],
        in_use=held(1, 1),
        capacity_bytes=25 * MB,
        gives_up=[False],
    ),
}


@pytest.mark.parametrize("case", DEADLOCKS)
async def test_only_the_claim_that_resolves_a_deadlock_gives_up(case: str) -> None:
    """No claim gives up while a reader may go on or release; otherwise only one does."""
    cache = DEADLOCKS[case]
    assert gives_up(cache.claims(), cache.in_use, cache.capacity_bytes) == cache.gives_up


async def test_the_deadlock_error_names_the_space_that_would_be_enough() -> None:
    """It counts the readers, and names the arithmetic and the options."""
    claims = [waiting(1), waiting(2)]
    with pytest.raises(
        CapacityError, match=r"the cache's capacity is 35\.0 MB, 30\.0 MB of it .* 2 reader"
    ) as caught:
        check_progress(claims[1], claims, held(1, 1, 1), Space(35 * MB))
    assert "ranks x (shuffle_window + 1)" in caught.value.remedy
    assert "--capacity" in caught.value.remedy
    assert caught.value.url == "s3://bucket/a.tar"


async def test_a_claim_without_waiting_readers_gives_up_first() -> None:
    """It is postponed; whoever has nothing to read may have its room."""
    ahead = waiting(None, reserved_bytes=10 * MB)
    needed = waiting(1)
    with pytest.raises(PostponedError):
        check_progress(ahead, [ahead, needed], held(1), Space(25 * MB))
    check_progress(needed, [ahead, needed], held(1), Space(25 * MB))
