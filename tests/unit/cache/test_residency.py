"""residency.py: exactly the shards that nothing keeps are evictable, and a deadlock over space ends one claim."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("seed", first_quick(range(4)))
async def test_exactly_the_shards_that_nothing_keeps_are_evictable(  # noqa: C901  # a branch for each of its steps
    store: Store, seed: int
) -> None:
    """Leases, pins, removals that fail and damage of leased shards, in any order."""
    rng = random.Random(seed)
    kept = kept_in(store)
    planner = kept.planner
    pins = kept.pins
    residency = kept.residency
    leases: list[Shard] = []
    still_open: set[Shard] = set()

    def evictable() -> list[Shard]:
        return [
            shard
            for shard in store.shards.values()
            if not shard.must_stay and shard not in still_open
        ]

    async def remove(key: str, *, fails: bool) -> None:
        shard = store.shards[key]
        is_pinned = fails and rng.choice([True, False])
        with residency.evicting(shard):
            del store.shards[key]
            check()
            if is_pinned:
                await pins.add([pin_on(key)])
            if fails:
                store.shards[key] = shard
        assert shard.pinned is is_pinned, (
            "a pin that is added during a failing eviction keeps the shard"
        )
        if fails and not is_pinned:
            still_open.add(shard)

    def check() -> None:
        wanted_bytes = SIZE_BYTES * len(evictable())
        keys = planner.schedule.victims(wanted_bytes, NOW, 0.0) if wanted_bytes else []
        assert sorted(keys or ()) == sorted(shard.key for shard in evictable())
        assert planner.schedule.victims(wanted_bytes + 1, NOW, 0.0) is None
        assert residency.leased == set(leases)
        assert set(residency.pinned) == {
            shard.key for shard in store.shards.values() if shard.pinned
        }
        assert store.space.pinned_bytes == SIZE_BYTES * len(residency.pinned)

    for _ in range(STEPS):
        key = rng.choice(KEYS)
        match rng.choice(
            ["publish", "retain", "retain", "release", "pin", "unpin", "remove", "stays", "damage"]
        ):
            case "publish" if key not in store.shards:
                store.restore(Shard(key, SIZE_BYTES, 0, 0.0))
                residency.arrived(store.shards[key])
            case "retain":
                shard = residency.retain_cached(key)
                if shard is not None:
                    leases.append(shard)
                    still_open.discard(shard)
            case "release" if leases:
                residency.release(leases.pop(rng.randrange(len(leases))))
            case "pin":
                await pins.add([pin_on(key)])
                still_open.difference_update(residency.pinned.values())
            case "unpin":
                await pins.remove([pin_on(key)], None)
            case "remove" if any(shard.key == key for shard in evictable()):
                await remove(key, fails=False)
            case "stays" if any(shard.key == key for shard in evictable()):
                await remove(key, fails=True)
            case "damage" if key in store.shards:
                residency.gone(key)
                del store.shards[key]
        check()


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
    """Return a shard on its way that one reader waits for which has that many shards in hand; nobody where None."""
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
DEADLOCKS: dict[str, tuple[Callable[[], list[KeyClaim]], list[Shard], int, list[bool]]] = {
    "the latest gives up": (lambda: [waiting(2), waiting(2)], held(1, 1, 1, 1), 45 * MB, [False, True]),
    "a shard held twice is there once": (lambda: [waiting(1), waiting(1)], held(2), 15 * MB, [False, True]),
    "a shard held twice leaves room": (lambda: [waiting(1), waiting(1)], held(2), 25 * MB, [False, False]),
    "another reader reads": (lambda: [waiting(2), waiting(2)], held(1, 1, 1, 1, 1), 45 * MB, [False, False]),
    "another's shard is coming": (
        lambda: [waiting(2), waiting(2, wanted_bytes=0)], held(1, 1, 1, 1), 45 * MB, [False, False]
    ),
    "another has something to read": (
        lambda: [waiting(2), waiting(2, needed=False)], held(1, 1, 1, 1), 45 * MB, [False, False]
    ),
    "another's shard has room": (
        lambda: [waiting(2), waiting(2, wanted_bytes=MB)], held(1, 1, 1, 1), 45 * MB, [False, False]
    ),
    "unleased shards are free space": (lambda: [waiting(2)], held(1, 1), ROOM, [False]),
    "one byte too few": (lambda: [waiting(2)], held(1, 1), ROOM - 1, [True]),
    "a half inflated shard keeps its space": (
        lambda: [waiting(1, wanted_bytes=MB, reserved_bytes=30 * MB)], held(1), 40 * MB, [True]
    ),
    "a half inflated shard has room": (
        lambda: [waiting(1, wanted_bytes=MB, reserved_bytes=30 * MB)], held(1), 41 * MB, [False]
    ),
    "behind one that goes on": (
        lambda: behind(waiting(0, wanted_bytes=0), 1), held(1), 15 * MB, [False, False]
    ),
    "behind one that is stuck, whose reader keeps a shard": (
        lambda: behind(waiting(1, wanted_bytes=MB, reserved_bytes=5 * MB), 0, reserved_bytes=5 * MB),
        held(1), 20 * MB, [True, False],
    ),
    "a worker of its loader keeps a shard": (lambda: [waiting(0, others=(MATE,))], held(1), 15 * MB, [True]),
    "two wait for that worker's batch": (
        lambda: [waiting(0, others=(MATE,)), waiting(0, others=(MATE,))], held(1), 15 * MB, [False, True]
    ),
    "a stranger may give its own back": (lambda: [waiting(0, others=(MATE,))], held(1, 1), 25 * MB, [False]),
}  # fmt: skip


@pytest.mark.parametrize("case", DEADLOCKS)
async def test_only_the_claim_that_resolves_a_deadlock_gives_up(case: str) -> None:
    """Nobody does while some reader goes on, or may release a shard; else one, and the others continue."""
    claims, in_use, capacity, expected = DEADLOCKS[case]
    assert gives_up(claims(), in_use, capacity) == expected


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
