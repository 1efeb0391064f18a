"""cache/readers/plan_memory.py: what all plans take together, as they come and go."""

import pytest

from shardcache.cache.listings.shard_listing import Listing
from shardcache.cache.readers.plan_memory import PlanMemory
from shardcache.errors import CapacityError
from shardcache.shared.lists.shard_columns import Shards
from shardcache.shared.protocol import ShardRef


def _listing() -> Listing:
    return Listing(Shards.of([ShardRef("s3://bucket/a.tar", "v1")]))


def test_plans_of_one_list_count_it_once() -> None:
    """A list takes memory until the last plan that has it ends; others have to fit beside it."""
    listing = _listing()
    memory = PlanMemory(2 * listing.memory_bytes)
    for _ in range(3):
        memory.begin(listing)
    memory.begin(_listing())
    for _ in range(2):
        memory.end(listing, 0)
    with pytest.raises(CapacityError):
        memory.begin(_listing())
    memory.end(listing, 0)
    memory.begin(_listing())


def test_positions_of_ended_plans_are_free_again() -> None:
    """A plan that would be too large next to another fits once that has ended."""
    first = _listing()
    second = _listing()
    room = 100
    memory = PlanMemory(2 * (first.memory_bytes + 64 * room))
    memory.begin(first)
    memory.extend(room + 1)
    memory.begin(second)
    with pytest.raises(CapacityError):
        memory.check(0, second, room)
    memory.end(first, room + 1)
    memory.check(0, second, room)


def test_announced_ranges_take_no_memory_of_plans() -> None:
    """They have a quarter as much for themselves, by the number of their names."""
    listing = _listing()
    memory = PlanMemory(1_000_000)
    assert memory.may_announce(600)
    memory.announce(600)
    assert not memory.may_announce(100)
    memory.begin(listing)
    memory.check(0, listing, 7_000)
    memory.announce(-600)
    assert memory.may_announce(600)
