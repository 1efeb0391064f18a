"""The time of a shard's next use: the timeline against a slow and plain definition of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.plan.reader_plan import NEVER
from shardcache.plan.timeline import Timeline

SHARDS = st.sampled_from("abcdefg")
PLANS = st.lists(
    st.tuples(st.lists(SHARDS, max_size=8), st.integers(0, 8), st.sampled_from([0.5, 1.0, 7.0])),
    min_size=1,
    max_size=4,
)
Plans = list[tuple[list[str], int, float]]


def timeline_of(plans: Plans) -> Timeline:
    """Return a timeline at time 0 with one session a plan, each waiting at its cursor."""
    timeline = Timeline()
    timeline.tick(0.0)
    for session, (shards, cursor, pace_s) in enumerate(plans):
        timeline.declare(session, pace_s)
        timeline.extend(session, shards[:3])
        timeline.extend(session, shards[3:])
        timeline.waits(session, cursor)
    return timeline


def next_use_s(plans: Plans, shard: str) -> float:
    """Return when the first reader needs a shard, by looking at every position of every plan."""
    return min(
        (
            (at - min(cursor, len(plan))) * pace_s
            for plan, cursor, pace_s in plans
            for at, name in enumerate(plan)
            if name == shard and at >= cursor
        ),
        default=NEVER,
    )


def use_s(timeline: Timeline, *names: str) -> float:
    """Return when a shard of these names is needed."""
    use = timeline.next_use(names)
    if use is None:
        return NEVER
    plan, position = use
    return plan.start_s + plan.pace_s * position


@given(PLANS, SHARDS)
def test_next_use_is_the_soonest_of_any_session(plans: Plans, shard: str) -> None:
    """A shard is as near as the nearest reader that will still read it, by each one's own pace."""
    assert use_s(timeline_of(plans), shard) == pytest.approx(next_use_s(plans, shard))


@given(PLANS, st.sets(SHARDS), st.sets(SHARDS))
def test_a_session_is_covered_until_its_first_missing_shard(
    plans: Plans, here: set[str], coming: set[str]
) -> None:
    """A shard on its way does not count as cached, although it is cared for."""
    found = timeline_of(plans).covered_until_s(0, (here | coming).__contains__, coming - here)
    plan, at, _ = plans[0]
    assert found == pytest.approx(
        min((next_use_s(plans[:1], name) for name in plan[at:] if name not in here), default=NEVER)
    )


def test_a_shard_is_needed_under_each_of_its_names() -> None:
    """One plan knew the version, another only the url."""
    timeline = timeline_of([(["x", "url"], 0, 1.0), (["x", "y", "z", "key"], 0, 1.0)])
    assert use_s(timeline, "url", "key") == 1.0
    assert use_s(timeline, "key") == 3.0


def test_the_pace_follows_a_change() -> None:
    """After some shards at another speed, the old speed is as good as forgotten."""
    timeline = timeline_of([([str(number) for number in range(40)], 0, 1.0)])
    now_s = 0.0
    for position in range(20):
        timeline.reads(0, position)
        now_s += 10.0
        timeline.tick(now_s)
        timeline.done(0, position)
    assert use_s(timeline, "30") == pytest.approx(now_s + 100.0, rel=0.01)


def mixing(timeline: Timeline, pace_s: float, window: int) -> float:
    """Have session 0 mix its first shards, a window's part each beat; return the time."""
    now_s = 0.0
    for position in range(window):
        timeline.tick(now_s)
        timeline.reads(0, position)
        now_s += pace_s * (position + 1) / window
    timeline.tick(now_s)
    return now_s


def test_a_reader_that_mixes_shards_takes_the_first_ones_in_quick_succession() -> None:
    """Its pace is that of all it read until it gave the first one back."""
    timeline = timeline_of([([*"abcdefgh"], 0, 100.0)])
    now_s = mixing(timeline, pace_s=8.0, window=4)
    assert use_s(timeline, "f") > 100.0, "no pace is known yet"
    timeline.done(0, 0)
    timeline.reads(0, 4)
    assert use_s(timeline, "f") == pytest.approx(now_s + 8.0)
    timeline.tick(now_s + 16.0)
    timeline.done(0, 1)
    timeline.reads(0, 5)
    assert use_s(timeline, "g") == pytest.approx(now_s + 16.0 + 8.0 + 8.0 / 3), (
        "the third measure counts a third"
    )


def test_the_next_epoch_of_a_reader_that_mixes_shards_begins_at_the_pace_of_the_last() -> None:
    """The first shards of each plan come in quick succession, and none of them quickens it."""
    timeline = timeline_of([([*"abcdefgh"], 0, 100.0)])
    mixing(timeline, pace_s=8.0, window=4)
    timeline.done(0, 0)
    timeline.declare(0)
    timeline.extend(0, [*"abcdefgh"])
    for position in range(4):
        timeline.reads(0, position)
    assert use_s(timeline, "e") == pytest.approx(timeline.now_s + 8.0)


def test_a_loader_that_fills_its_queues_shows_no_pace() -> None:
    """The pace is unknown until a second of reading was seen, then that of all."""
    timeline = timeline_of([([*"abcdefgh"], 0, 100.0)])
    for position in range(3):
        timeline.reads(0, position)
        timeline.tick(0.01 * (position + 1))
        timeline.done(0, position)
    assert timeline.shards_per_s(0) == 0.0
    timeline.reads(0, 3)
    timeline.tick(2.0)
    timeline.done(0, 3)
    assert timeline.shards_per_s(0) == pytest.approx(2.0)


def test_sessions_of_a_job_share_its_pace() -> None:
    """Sessions that have read nothing take it over, even when its source is gone."""
    timeline = Timeline()
    timeline.tick(0.0)
    for session, job in (("a", "job"), ("b", "job"), ("stranger", "other")):
        timeline.declare(session, job=job)
        timeline.extend(session, [f"{session}-{number}" for number in range(9)])
        timeline.waits(session, 0)
    timeline.reads("a", 0)
    timeline.tick(5.0)
    timeline.done("a", 0)
    assert use_s(timeline, "b-2") == 5.0 + 2 * 5.0
    assert use_s(timeline, "stranger-2") == 5.0 + 2 * 1.0
    timeline.forget("a")
    timeline.forget("b")
    for session, job in (("c", "job"), ("d", "other")):
        reader_plan = timeline.declare(session, job=job)
        assert (reader_plan.measurements > 0) == (job == "job"), "that of the other job is unknown"
        assert reader_plan.seconds_per_shard == (5.0 if job == "job" else pytest.approx(5.0))


def test_waiting_does_not_count_towards_the_pace() -> None:
    """Of five seconds from one to the next, four were spent waiting for bytes: the pace is one."""
    timeline = timeline_of([([*"abcdefgh"], 0, 100.0)])
    timeline.reads(0, 0, waited_s=7.0)
    timeline.tick(5.0)
    timeline.done(0, 0, waited_s=11.0)
    timeline.reads(0, 1, waited_s=11.0)
    assert use_s(timeline, "d") == pytest.approx(5.0 + 2 * 1.0)
    timeline.tick(6.0)
    timeline.waits(0, 2, waited_s=11.0)
    timeline.tick(50.0)
    timeline.reads(0, 2, waited_s=55.0)
    assert use_s(timeline, "d") == pytest.approx(50.0 + 1.0)


def test_releases_out_of_turn_do_not_move_the_cursor() -> None:
    """The plan goes on from the newest, and its return ends the plan."""
    timeline = timeline_of([([*"abcde"], 0, 1.0)])
    for position in range(3):
        timeline.reads(0, position)
    timeline.done(0, 1)
    assert use_s(timeline, "c") < NEVER
    timeline.done(0, 2)
    assert use_s(timeline, "c") == NEVER
    assert use_s(timeline, "d") < NEVER
    timeline.done(0, 0)
    timeline.reads(0, 4)
    timeline.done(0, 4)
    assert use_s(timeline, "e") == NEVER


def test_shards_taken_again_show_no_pace() -> None:
    """Shards that come all at once after a daemon's restart say nothing of it."""
    timeline = timeline_of([([*"abcdefgh"], 0, 10.0)])
    for position in (3, 0, 2, 1):
        timeline.reads(0, position)
    assert use_s(timeline, "f") == 20.0
    timeline.tick(8.0)
    timeline.reads(0, 4)
    assert use_s(timeline, "f") == pytest.approx(8.0 + 8.0)


def test_a_session_that_hangs_recedes_and_comes_back() -> None:
    """Others come first while a reader stands still unusually long, unless it waits."""
    timeline = timeline_of([([*"abcde"], 0, 1.0)])
    timeline.reads(0, 0)
    timeline.tick(1.0)
    timeline.reads(0, 1)
    timeline.tick(1.5)
    assert use_s(timeline, "d") == 3.0
    timeline.tick(61.0)
    assert use_s(timeline, "d") == 121.0
    timeline.waits(0, 2)
    timeline.tick(100.0)
    assert use_s(timeline, "d") == 101.0


@given(PLANS, st.floats(0.0, 20.0), st.integers(0, 9))
def test_shards_ahead_are_the_plan_from_the_cursor_on(
    plans: Plans, until_s: float, most: int
) -> None:
    """Shards come in reading order with their times, up to the number asked for."""
    timeline = timeline_of(plans)
    for session, (shards, cursor, pace_s) in enumerate(plans):
        uses = [((at - cursor) * pace_s, at, shards[at]) for at in range(cursor, len(shards))]
        wanted = [use for use in uses if use[0] <= until_s][:most]
        found = list(timeline.ahead(session, until_s, most))
        assert [use[1:] for use in found] == [use[1:] for use in wanted]
        assert [use[0] for use in found] == pytest.approx([use[0] for use in wanted])
    assert list(timeline.ahead("nobody", until_s, most)) == []
