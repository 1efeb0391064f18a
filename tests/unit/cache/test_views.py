"""Timelines: a job's next minutes, counted by shard place and time, the first ones named."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shardcache.cache.views.job_timelines import (
    HORIZON_S,
    INTERVALS,
    Lane,
    Presence,
    Use,
    soonest_gaps,
)

JOB = ("job", 7)
USES = st.lists(
    st.builds(
        Use,
        st.floats(0.0, HORIZON_S),
        st.sampled_from("abcdef"),
        st.just(JOB),
        st.sampled_from(Presence),
    ),
    max_size=40,
).map(lambda uses: sorted(uses, key=lambda use: use.in_s))


def lane_of(readers: list[list[Use]]) -> Lane:
    """Return the lane of a job with these readers."""
    lane = Lane(JOB)
    for uses in readers:
        lane.add(uses)
    return lane


@given(st.lists(st.tuples(st.integers(0, INTERVALS - 1), st.sampled_from(Presence)), max_size=40))
def test_every_use_is_counted_once_in_its_interval(uses: list[tuple[int, Presence]]) -> None:
    """By presence; a use at the very end of the horizon belongs to the last interval."""
    interval_s = HORIZON_S / INTERVALS
    readers = [[Use((at + 0.5) * interval_s, "a", JOB, presence)] for at, presence in uses]
    counts = lane_of([*readers, [Use(HORIZON_S, "a", JOB, Presence.CACHED)]]).to_json(
        lambda _: True
    )["counts"]
    wanted = Counter([*uses, (INTERVALS - 1, Presence.CACHED)])
    assert counts == {
        presence.value: [wanted[at, presence] for at in range(INTERVALS)] for presence in Presence
    }


@given(st.lists(USES, max_size=4))
def test_the_soonest_uses_are_named_and_gaps_once_each(readers: list[list[Use]]) -> None:
    """The first uses of all readers together, in order; each missing shard's first use."""
    lane = lane_of(readers)
    uses = sorted((use for each in readers for use in each), key=lambda use: use.in_s)
    assert [use.in_s for use in lane.soonest] == [use.in_s for use in uses[: len(lane.soonest)]]
    missing: dict[str, float] = {}
    for use in uses:
        if use.presence is not Presence.CACHED:
            missing.setdefault(use.url, use.in_s)
    named = {use.url: use.in_s for use in soonest_gaps([lane])}
    assert named.items() <= missing.items()
    assert list(named.values()) == sorted(named.values())
    assert min(named.values(), default=None) == min(missing.values(), default=None)


def test_a_shard_being_fetched_is_named_behind_another_jobs_gaps() -> None:
    """A job without any of its shards does not hide those that arrive for another one."""
    starved = Lane(("starved", 7))
    ahead = Lane(("ahead", 7))
    starved.add(
        [
            Use(0.1 * number, f"now-{number}", starved.client, Presence.MISSING)
            for number in range(40)
        ]
    )
    fetching = Use(100.0, "coming", ahead.client, Presence.FETCHING)
    ahead.add([fetching, Use(200.0, "later", ahead.client, Presence.MISSING)])
    named = soonest_gaps([starved, ahead])
    assert {use.client for use in named[:-1]} == {starved.client}
    assert named[-1] == fetching


def test_a_hidden_shard_is_counted_and_not_named() -> None:
    """Whoever may not see it learns that some shard is missing."""
    shown = lane_of([[Use(1.0, "secret", JOB, Presence.MISSING)]]).to_json(lambda _: False)
    assert "secret" not in str(shown)
    assert sum(shown["counts"]["missing"]) == 1
