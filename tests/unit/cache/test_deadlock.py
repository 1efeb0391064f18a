"""deadlock.py: who gives up when nobody can go on, and that nobody does while anything may still change."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from shardcache.cache.residency.deadlock import check_progress
from shardcache.cache.transfers.transfers import Class, KeyClaim, PostponedError, Transfer
from shardcache.cache.transfers.waiting import Wait
from shardcache.errors import CapacityError
from shardcache.protocol import ShardRef
from shardcache.store.shard import Shard
from shardcache.store.space import Space, footprint_bytes

MB = 1_000_000
CAPACITY = 100 * MB
SHARD_BYTES = footprint_bytes(10 * MB)


def held(*leases: int) -> list[Shard]:
    """Return shards of 10 MB that are held so many times each."""
    return [Shard(f"key-{number}", 10 * MB, 0, 0.0, leases=count) for number, count in enumerate(leases)]


@dataclass(eq=False)
class Keeper:
    """A reader that keeps a number of shards, and those that keep theirs for it."""

    shards: int
    others: tuple[Keeper, ...] = ()

    def leased_shards(self) -> int:  # noqa: D102
        return self.shards

    def kept_waiting(self) -> tuple[Keeper, ...]:  # noqa: D102
        return self.others


def waiting(
    in_hand: int | None,
    *,
    wanted_bytes: int = SHARD_BYTES,
    needed: bool = True,
    reserved_bytes: int = 0,
    behind: KeyClaim | None = None,
    others: tuple[Keeper, ...] = (),
) -> KeyClaim:
    """Return a shard on its way that one reader waits for which has that many shards in hand; nobody where None."""
    transfer = Transfer("name", ShardRef("s3://bucket/a.tar"), Class.PLANNED)
    if in_hand is not None:
        transfer.waits.add(Wait("job", time.monotonic() if needed else None, holder=Keeper(in_hand, others)))
    reservation = Space(CAPACITY).reserve()
    reservation.grow(reserved_bytes)
    return KeyClaim(
        transfers=[transfer],
        reservation=reservation,
        wanted_bytes=wanted_bytes,
        behind=behind,
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


async def test_when_all_wait_for_what_they_hold_themselves_the_last_gives_up() -> None:
    """The other can go on as soon as that one's reader has left."""
    claims = [waiting(2), waiting(2)]
    assert gives_up(claims, held(1, 1, 1, 1), 45 * MB) == [False, True]


async def test_the_error_says_what_would_be_enough() -> None:
    """It counts the readers, and names the arithmetic and the options."""
    claims = [waiting(1), waiting(2)]
    with pytest.raises(CapacityError, match=r"the cache's capacity is 35\.0 MB, 30\.0 MB of it .* 2 reader") as caught:
        check_progress(claims[1], claims, held(1, 1, 1), Space(35 * MB))
    assert "readers x (shuffle_window + 1)" in caught.value.remedy and "--capacity" in caught.value.remedy
    assert caught.value.url == "s3://bucket/a.tar"


async def test_a_shard_that_two_readers_hold_counts_for_both() -> None:
    """Its bytes are there once."""
    claims = [waiting(1), waiting(1)]
    assert gives_up(claims, held(2), 15 * MB) == [False, True]
    assert gives_up(claims, held(2), 25 * MB) == [False, False]


@pytest.mark.parametrize(
    ("other", "in_use"),
    [
        (waiting, held(1, 1, 1, 1, 1)),  # somebody reads, or checks, a shard who waits for nothing
        (lambda in_hand: waiting(in_hand, wanted_bytes=0), held(1, 1, 1, 1)),
        (lambda in_hand: waiting(in_hand, needed=False), held(1, 1, 1, 1)),
        (lambda in_hand: waiting(in_hand, wanted_bytes=MB), held(1, 1, 1, 1)),
    ],
    ids=["another reads", "another's shard is coming", "another has something to read", "another's shard has room"],
)
async def test_nobody_gives_up_while_a_shard_may_be_given_back(other: object, in_use: list[Shard]) -> None:
    """One reader that goes on, or will, is enough."""
    assert callable(other)
    assert gives_up([waiting(2), other(2)], in_use, 45 * MB) == [False, False]


async def test_what_nobody_holds_can_make_room() -> None:
    """Only what is in hands counts as taken: all else goes, or comes and goes, by itself."""
    room = 20 * MB + SHARD_BYTES
    assert gives_up([waiting(2)], held(1, 1), room) == [False]
    assert gives_up([waiting(2)], held(1, 1), room - 1) == [True]


async def test_room_that_a_waiting_shard_has_is_taken() -> None:
    """A compressed shard that is half inflated keeps what it has until it has the rest, or gives up."""
    assert gives_up([waiting(1, wanted_bytes=MB, reserved_bytes=30 * MB)], held(1), 40 * MB) == [True]
    assert gives_up([waiting(1, wanted_bytes=MB, reserved_bytes=30 * MB)], held(1), 41 * MB) == [False]


async def test_what_waits_for_the_turn_of_another_waits_for_its_room() -> None:
    """As long as that one goes on, nobody gives up; when it waits itself, both count, and what both have."""
    moving = waiting(0, wanted_bytes=0)
    assert gives_up([moving, waiting(1, wanted_bytes=0, behind=moving)], held(1), 15 * MB) == [False, False]
    stuck = waiting(1, wanted_bytes=MB, reserved_bytes=5 * MB)
    queued = waiting(0, wanted_bytes=0, behind=stuck, reserved_bytes=5 * MB)
    assert gives_up([stuck, queued], held(1), 20 * MB) == [True, False], "the one whose reader keeps a shard"


async def test_what_nobody_waits_for_gives_up_first() -> None:
    """It is postponed; whoever has nothing to read may have its room."""
    ahead, needed = waiting(None, reserved_bytes=10 * MB), waiting(1)
    with pytest.raises(PostponedError):
        check_progress(ahead, [ahead, needed], held(1), Space(25 * MB))
    check_progress(needed, [ahead, needed], held(1), Space(25 * MB))


async def test_workers_that_keep_their_shards_for_one_that_waits_count_as_waiting() -> None:
    """Their loader asks them for nothing before it has the batch of that one."""
    mate = Keeper(1)
    assert gives_up([waiting(0, others=(mate,))], held(1), 15 * MB) == [True]
    assert gives_up([waiting(0, others=(mate,)), waiting(0, others=(mate,))], held(1), 15 * MB) == [False, True]
    assert gives_up([waiting(0, others=(mate,))], held(1, 1), 25 * MB) == [False], "a stranger may give its own back"
