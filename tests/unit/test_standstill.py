"""standstill.py: who gives up when nobody can go on, and that nobody does while anything may still change."""

from __future__ import annotations

import time

import pytest

from shardcache.cache.standstill import check_progress
from shardcache.cache.transfers import Class, Transfer
from shardcache.cache.waiting import Stage, Wait
from shardcache.errors import CapacityError
from shardcache.protocol import ShardRef
from shardcache.store.shard import Shard
from shardcache.store.space import Space, footprint_bytes

MB = 1_000_000


def held(*leases: int) -> list[Shard]:
    """Return shards of 10 MB that are held so many times each."""
    return [Shard(f"key-{number}", 10 * MB, 0, 0.0, leases=count) for number, count in enumerate(leases)]


def waiting(in_hand: int, *, stage: Stage = Stage.SPACE, needed: bool = True, size_bytes: int = 10 * MB) -> Transfer:
    """Return a transfer that one reader waits for which has so many shards in hand."""
    transfer = Transfer("name", ShardRef("s3://bucket/a.tar"), Class.PLANNED, total_bytes=size_bytes)
    transfer.waits.add(Wait("job", time.monotonic() if needed else None, in_hand=lambda: in_hand))
    transfer.stages.enter(stage)
    return transfer


def gives_up(transfers: list[Transfer], in_use: list[Shard], capacity: int) -> list[bool]:
    """Return for each transfer whether it is the one that has to give up."""
    found = []
    for transfer in transfers:
        try:
            check_progress(transfer, transfers, in_use, Space(capacity))
            found.append(False)
        except CapacityError:
            found.append(True)
    return found


async def test_when_all_wait_for_what_they_hold_themselves_the_last_gives_up() -> None:
    """The other can go on as soon as that one's reader has left."""
    transfers = [waiting(2), waiting(2)]
    assert gives_up(transfers, held(1, 1, 1, 1), 45 * MB) == [False, True]


async def test_the_error_says_what_would_be_enough() -> None:
    """It counts the readers, and names the arithmetic and the options."""
    transfers = [waiting(1), waiting(2)]
    with pytest.raises(CapacityError, match=r"30\.0 MB of the cache's 35\.0 MB .* 2 reader") as caught:
        check_progress(transfers[1], transfers, held(1, 1, 1), Space(35 * MB))
    assert "readers x (shuffle_window + 1)" in caught.value.remedy and "--capacity" in caught.value.remedy
    assert caught.value.url == "s3://bucket/a.tar"


async def test_a_shard_that_two_readers_hold_counts_for_both() -> None:
    """Its bytes are there once."""
    transfers = [waiting(1), waiting(1)]
    assert gives_up(transfers, held(2), 15 * MB) == [False, True]
    assert gives_up(transfers, held(2), 25 * MB) == [False, False]


@pytest.mark.parametrize(
    ("other", "in_use"),
    [
        (waiting, held(1, 1, 1, 1, 1)),  # somebody reads, or checks, a shard who waits for nothing
        (lambda in_hand: waiting(in_hand, stage=Stage.NETWORK), held(1, 1, 1, 1)),
        (lambda in_hand: waiting(in_hand, needed=False), held(1, 1, 1, 1)),
        (lambda in_hand: waiting(in_hand, size_bytes=MB), held(1, 1, 1, 1)),
    ],
    ids=["another reads", "another's shard is coming", "another has something to read", "another's shard has room"],
)
async def test_nobody_gives_up_while_a_shard_may_be_given_back(other: object, in_use: list[Shard]) -> None:
    """One reader that goes on, or will, is enough."""
    assert callable(other)
    assert gives_up([waiting(2), other(2)], in_use, 45 * MB) == [False, False]


async def test_what_nobody_holds_can_make_room() -> None:
    """Only what is in hands counts as taken: all else goes, or comes and goes, by itself."""
    room = 20 * MB + footprint_bytes(10 * MB)
    assert gives_up([waiting(2)], held(1, 1), room) == [False]
    assert gives_up([waiting(2)], held(1, 1), room - 1) == [True]
