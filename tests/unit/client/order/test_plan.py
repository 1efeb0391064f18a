"""plan.py: what a reader will read, told to the daemon in pieces, each shard once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shardcache.protocol import ShardRef
from shardcache_client.order.manifest import Plan

readings = st.lists(st.integers(0, 30), max_size=60)


@cache
def manifest_of(shards: int) -> list[ShardRef]:
    """Return a manifest of so many shards."""
    return [ShardRef(f"s3://bucket/{number}.tar", "v", 10, 3) for number in range(shards)]


def mostly_in_order(length: int) -> Sequence[int]:
    """Return the numbers below `length`, each tenth of them for the second time in place of itself."""
    return [number - 5 if number % 10 == 7 else number for number in range(length)]


@given(readings, readings)
def test_a_plan_names_what_its_reader_reads(now: list[int], after: list[int]) -> None:
    """Both epochs of a plan lead to the shards that were given, repeated ones included, and no other is in it."""
    manifest = manifest_of(31)
    plan = Plan.of(manifest, 4, now, after)
    told = [plan.shard(position) for position in range(len(plan.order))]
    assert told == [manifest[number] for number in (*now, *after)]
    assert (plan.epoch, plan.reads) == (4, len(now))
    assert set(plan.order) == set(range(len(plan.shards)))


def told(messages: Iterable[tuple[str, dict[str, Any]]]) -> list[list[Any]]:
    """Put a plan together again as the daemon does: the rows of its shards, in reading order."""
    shards: list[Any] = []
    order: list[int] = []
    for number, (kind, fields) in enumerate(messages):
        assert kind == ("extend" if number else "plan")
        assert len(fields["order"]) <= (4_000 if number else 1_000)
        assert len(fields["shards"]) <= len(fields["order"]), "no shard is named before its piece"
        shards += fields["shards"]
        order += fields["order"]
        assert all(0 <= index < len(shards) for index in order), "a position's shard comes with it at the latest"
    return [shards[index] for index in order]


@settings(max_examples=30)
@given(st.integers(1, 12_000), st.integers(0, 2_000))
def test_plan_sent_in_pieces_is_the_plan(shards: int, start: int) -> None:
    """However long it is and wherever it begins, the pieces make up the same reading order, each shard told once."""
    now = mostly_in_order(shards)
    plan = Plan.of(manifest_of(12_000), 3, now, now[::-1])
    start = min(start, plan.reads)
    messages = list(plan.messages(start))
    assert told(messages) == [plan.shard(position).to_json() for position in range(start, len(plan.order))]
    assert sum(len(fields["shards"]) for _, fields in messages) == len(set(plan.order[start:]))
    assert messages[0][1]["epoch"] == 3
    assert messages[0][1]["reads"] == plan.reads - start


def test_a_reader_without_shards_has_a_plan_too() -> None:
    """It says that nothing is read, now or later, in one message."""
    assert list(Plan.of([], 0, [], []).messages()) == [("plan", {"epoch": 0, "reads": 0, "shards": [], "order": []})]
