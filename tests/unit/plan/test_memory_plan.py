"""Choice of the shards whose pages stay in memory, without touching any."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.plan.page_plan import PagePlan

MANY_BYTES = 1_000_000


def never(_key: str) -> float:
    """Say that nobody plans to read a shard."""
    return math.inf


def rounds(shards: int, count: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each shard that is read, round after round, and in how many reads from there each is needed."""
    for read in range(shards * count):
        yield str(read % shards), {str(s): float((s - read - 1) % shards + 1) for s in range(shards)}


def hits_of_last_round(shards: int, fits: int) -> int:
    """Return how many shards of the third round were still in memory, where so many fit."""
    plan, inside, hits = PagePlan(), set[str](), 0
    for read, (key, needed_in) in enumerate(rounds(shards, 3)):
        hits += key in inside and read >= 2 * shards
        inside.add(key)
        inside -= set(plan.let_go(key, 1, fits, needed_in.__getitem__))
    return hits


@given(shards=st.integers(2, 60), data=st.data())
def test_each_round_finds_what_memory_holds(shards: int, data: st.DataObject) -> None:
    """Round after round over more than memory holds, as much is found as fits: LRU would find nothing."""
    fits = data.draw(st.integers(0, shards - 1))
    assert hits_of_last_round(shards, fits) == fits


@given(st.lists(st.tuples(st.sampled_from("abcdefghijklmnop"), st.integers(0, 50), st.integers(0, 100))))
def test_what_is_kept_fits(reads: list[tuple[str, int, int]]) -> None:
    """Whatever is read, however large, and however the memory changes: the shards kept fit into it."""
    plan, kept = PagePlan(), dict[str, int]()
    for key, size_bytes, spare_bytes in reads:
        kept[key] = size_bytes
        for gone in plan.let_go(key, size_bytes, spare_bytes, never):
            del kept[gone]
        assert sum(kept.values()) <= spare_bytes


def test_shard_that_nobody_plans_goes_first() -> None:
    """The pages of an ended job make room for those of a running one."""
    plan = PagePlan()
    assert plan.let_go("old", 10, 10, never) == []
    assert plan.let_go("new", 10, 10, {"old": math.inf, "new": 60.0}.__getitem__) == ["old"]


def test_shard_that_left_the_cache_gives_its_room_back() -> None:
    """A shard evicted from the disk holds no memory any more."""
    plan = PagePlan()
    plan.let_go("a", 10, 10, never)
    plan.gone("a")
    assert plan.let_go("b", 10, 10, never) == []


def test_next_shards_are_read_ahead_once() -> None:
    """A shard that several sessions read next is asked for once, a missing one not at all."""
    plan, sizes = PagePlan(), {"a": 1, "b": 2}
    assert plan.read_ahead(["a", "b", "a", "missing"], sizes.get, MANY_BYTES) == ["a", "b"]
    assert plan.read_ahead(["b", "a"], sizes.get, MANY_BYTES) == []


def test_missing_shard_is_read_ahead_when_it_has_come() -> None:
    """A shard that was not here when first looked for is not forgotten."""
    plan = PagePlan()
    assert plan.read_ahead(["a"], dict[str, int]().get, MANY_BYTES) == []
    assert plan.read_ahead(["a"], {"a": 1}.get, MANY_BYTES) == ["a"]


@pytest.mark.parametrize("spare_bytes", [0, MANY_BYTES], ids=["let go", "kept"])
def test_shard_is_read_ahead_for_its_next_round(spare_bytes: int) -> None:
    """Once it was read, it may be brought in again: the kernel may have taken what was kept."""
    plan = PagePlan()
    plan.read_ahead(["a"], {"a": 1}.get, MANY_BYTES)
    plan.let_go("a", 1, spare_bytes, never)
    assert plan.read_ahead(["a"], {"a": 1}.get, MANY_BYTES) == ["a"]


def test_shard_larger_than_memory_is_not_read_ahead() -> None:
    """Its first pages would go before they are read."""
    assert PagePlan().read_ahead(["big"], {"big": 11}.get, 10) == []
