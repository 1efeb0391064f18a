"""The timeline against a definition of it that is slow and plain."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardcache.plan.timeline import NEVER, Timeline

SHARDS = st.sampled_from("abcdefg")
PLANS = st.lists(st.tuples(st.lists(SHARDS, max_size=8), st.integers(0, 8)), min_size=1, max_size=4)


def timeline_of(plans: list[tuple[list[str], int]]) -> Timeline:
    """Return a timeline with one session a plan, each moved on to its cursor."""
    timeline = Timeline()
    for session, (shards, cursor) in enumerate(plans):
        timeline.declare(session, shards)
        timeline.advance(session, cursor)
    return timeline


def distance(plans: list[tuple[list[str], int]], shard: str) -> float:
    """Return how many shards the nearest reader is away, by looking at every position of every plan."""
    return min(
        (at - cursor for plan, cursor in plans for at, name in enumerate(plan) if name == shard and at >= cursor),
        default=NEVER,
    )


@given(PLANS, SHARDS)
def test_next_use_is_the_least_distance_of_any_session(plans: list[tuple[list[str], int]], shard: str) -> None:
    """A shard is as near as the nearest reader that will still read it."""
    assert timeline_of(plans).next_use(shard) == distance(plans, shard)


@given(PLANS, st.sets(SHARDS))
def test_next_missing_is_the_soonest_needed(plans: list[tuple[list[str], int]], present: set[str]) -> None:
    """No missing shard is needed sooner than the one named; nothing is named when all are here."""
    found = timeline_of(plans).next_missing(present.__contains__)
    missing = {name: distance(plans, name) for plan, cursor in plans for name in plan[cursor:] if name not in present}
    if found is None:
        assert not missing
    else:
        assert missing[found[0]] == found[1] == min(missing.values())


@given(PLANS, st.lists(st.tuples(st.booleans(), SHARDS), max_size=12))
def test_evictions_are_seen_whenever_they_come(
    plans: list[tuple[list[str], int]], changes: list[tuple[bool, str]]
) -> None:
    """However shards come and go between the questions, the answer is that of a timeline asked only once."""
    timeline, present = timeline_of(plans), set[str]()
    for arrives, shard in changes:
        if arrives:
            present.add(shard)
        elif shard in present:
            present.remove(shard)
            timeline.evicted(shard)
        asked_once = timeline_of(plans).next_missing(present.__contains__)
        found = timeline.next_missing(present.__contains__)
        assert (found and found[1]) == (asked_once and asked_once[1])


def test_a_forgotten_session_needs_nothing() -> None:
    """A plan ends with its session."""
    timeline = timeline_of([(["a", "b"], 0)])
    timeline.forget(0)
    assert timeline.next_use("a") == NEVER
    assert timeline.next_missing(lambda _name: False) is None


def test_a_reader_never_goes_back() -> None:
    """A late word of an earlier position moves nothing."""
    timeline = timeline_of([(["a", "b", "c"], 2)])
    timeline.advance(0, 1)
    assert timeline.next_use("b") == NEVER
