"""views.py: a job's next minutes are counted by when and where its shards are, the first few of them named."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shardcache.cache.views import BINS, HORIZON_S, Lane, Need, Presence, gaps

NEEDS = st.lists(
    st.tuples(st.floats(0.0, HORIZON_S), st.sampled_from("abcdef"), st.sampled_from(Presence)), max_size=40
).map(lambda needs: sorted(needs, key=lambda need: need[0]))


def lane_of(readers: list[list[Need]]) -> Lane:
    """Return the lane of a job with these readers."""
    lane = Lane("job", 7)
    for needs in readers:
        lane.add(needs, lambda name: f"s3://b/{name}")
    return lane


@given(st.lists(st.tuples(st.integers(0, BINS - 1), st.sampled_from(Presence)), max_size=40))
def test_every_need_is_counted_once_in_its_time(needs: list[tuple[int, Presence]]) -> None:
    """By where its shard is; a need at the very end of the horizon belongs to the last part."""
    part_s = HORIZON_S / BINS
    readers = [[((at + 0.5) * part_s, "a", presence)] for at, presence in needs] + [[(HORIZON_S, "a", Presence.CACHED)]]
    counts = lane_of(readers).to_json(lambda _: True)["counts"]
    wanted = Counter([*needs, (BINS - 1, Presence.CACHED)])
    assert {name: counts[name] for name in counts} == {
        presence.value: [wanted[at, presence] for at in range(BINS)] for presence in Presence
    }


@given(st.lists(NEEDS, max_size=4))
def test_the_soonest_uses_are_named_and_gaps_once_each(readers: list[list[Need]]) -> None:
    """The first needs of all readers together, in order; of what is not here, each shard's first need."""
    lane = lane_of(readers)
    times = sorted(in_s for needs in readers for in_s, _, _ in needs)
    assert [use.in_s for use in lane.soonest] == [round(in_s, 2) for in_s in times[: len(lane.soonest)]]
    missing: dict[str, float] = {}
    named = {use.url: use.in_s for use in gaps([lane])}
    for in_s, name, presence in sorted((need for needs in readers for need in needs), key=lambda need: need[0]):
        if presence is not Presence.CACHED:
            missing.setdefault(f"s3://b/{name}", round(in_s, 2))
    assert named.items() <= missing.items() and list(named.values()) == sorted(named.values())
    assert min(named.values(), default=None) == min(missing.values(), default=None)


def test_a_shard_being_fetched_is_named_with_its_job_behind_another_jobs_gaps() -> None:
    """A job that lacks all of its shards now does not hide those that another one needs later, where these arrive."""
    starved, ahead = Lane("starved", 7), Lane("ahead", 7)
    starved.add([(0.1 * number, f"now-{number}", Presence.MISSING) for number in range(40)], str)
    ahead.add([(100.0, "coming", Presence.FETCHING), (200.0, "later", Presence.MISSING)], str)
    named = gaps([starved, ahead])
    assert [use.job for use in named] == ["starved"] * (len(named) - 1) + ["ahead"]
    assert named[-1].url == "coming"


def test_a_hidden_shard_is_counted_and_not_named() -> None:
    """It counts all the same."""
    shown = lane_of([[(1.0, "secret", Presence.MISSING)]]).to_json(lambda _: False)
    assert "secret" not in str(shown) and sum(shown["counts"]["missing"]) == 1
