"""Estimates of origins: concurrent requests, links, lateness of parts, and hedges."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.fetch.limits.hedging import Hedging
from shardcache.fetch.limits.origin_states import Aimd, Link

SIZE = 8 * 1024 * 1024


@given(st.integers(1, 64), st.integers(1, 64))
def test_requests_that_fail_together_halve_the_limit_once(maximum: int, failures: int) -> None:
    """Throttling under one limit counts once, and its other answers do not raise the next."""
    aimd = Aimd(maximum)
    for _ in range(failures):
        aimd.refused(0)
    for _ in range(maximum):
        aimd.succeeded(0)
    assert aimd.limit == max(1, maximum // 2)
    aimd.refused(aimd.generation)
    assert aimd.limit == max(1, maximum // 4)


@given(st.integers(1, 64))
def test_a_round_of_successes_adds_one_up_to_the_maximum(maximum: int) -> None:
    """As many successes as the limit is, and not one fewer; all the way back."""
    aimd = Aimd(maximum)
    while aimd.limit > 1:
        aimd.refused(aimd.generation)
    for limit in range(1, maximum):
        for _ in range(limit - 1):
            aimd.succeeded(aimd.generation)
        assert aimd.limit == limit
        aimd.succeeded(aimd.generation)
    for _ in range(maximum):
        aimd.succeeded(aimd.generation)
    assert aimd.limit == maximum


def over(link: Link, *, saturating: float, connections: int, parts: int = 5) -> Link:
    """Let parts arrive over a saturated link with others in use; quick parts take 1 s."""
    for _ in range(parts):
        link.record_time(SIZE, max(1.0, connections / saturating), connections)
    return link


@pytest.mark.parametrize("connections", [4, 64])
def test_a_saturated_link_is_as_wide_however_many_share_it(connections: int) -> None:
    """Three connections saturate it; two more are tried."""
    link = over(Link(), saturating=3, connections=2)
    assert over(link, saturating=3, connections=connections).connections == 5


def test_one_slow_part_does_not_narrow_the_link() -> None:
    """A server busy for a moment counts as little as a short last part."""
    link = over(Link(), saturating=100, connections=8)
    link.record_time(SIZE, 50.0, 8)
    assert link.connections == 10
    link.record_time(SIZE // 64, 0.01, 8)
    assert over(link, saturating=100, connections=8).connections == 10


def test_a_link_that_became_slower_is_tried_with_more_connections_again() -> None:
    """A quick start is forgotten after some parts."""
    link = over(Link(), saturating=100, connections=8)
    for _ in range(5):
        link.record_time(SIZE, 10.0, 8)
    assert link.connections == 3
    for _ in range(64):
        link.record_time(SIZE, 10.0, 8)
    assert link.connections == 10


def taught(times_s: list[float], *, share: float = 0.02, size_bytes: int = SIZE) -> Hedging:
    """Return hedging after parts that took some times."""
    hedging = Hedging(share)
    for time_s in times_s:
        hedging.record_time(size_bytes, time_s)
    return hedging


@pytest.mark.parametrize(
    ("times_s", "patience_s"),
    [
        ([1.0] * 99, None),  # of fewer than a hundred, the slowest is no tail
        ([1.0] * 100, 1.0),
        # The nearest-rank 99th percentile.
        ([1000.0 + second for second in range(1, 1001)], 1990.0),
        # With two of a hundred at 30 s, five times the median is late as well.
        ([1.0] * 980 + [30.0] * 20, 5.0),
        # Where parts take milliseconds, a second request would cost more than it saves.
        ([0.001] * 200, 0.05),
    ],
)
def test_a_part_is_late_after_the_time_that_one_of_a_hundred_takes(
    times_s: list[float], patience_s: float | None
) -> None:
    """In whatever order the times came; without a share, nothing is ever late."""
    random.Random(1).shuffle(times_s)
    assert taught(times_s).patience_s(SIZE) == patience_s
    assert taught(times_s, share=0).patience_s(SIZE) is None


@given(st.integers(0, 2**32), st.integers(1001, 1300))
def test_only_the_last_thousand_parts_count(seed: int, count: int) -> None:
    """A store that became faster or slower is judged by what it is now."""
    draw = random.Random(seed)
    times_s = [draw.uniform(0.1, 100) for _ in range(count)]
    last_s = sorted(times_s[-1000:])
    assert taught(times_s).patience_s(SIZE) == min(last_s[989], 5 * last_s[499])


def test_a_part_is_compared_with_parts_of_its_size() -> None:
    """The small last part of a shard says nothing about the others."""
    hedging = taught([1.0] * 100)
    assert hedging.patience_s(SIZE // 16) is None
    assert hedging.patience_s(16 * SIZE) is None
    assert hedging.patience_s(SIZE + SIZE // 2) == 1.0


@pytest.mark.parametrize(
    ("received_bytes", "others", "due_s"),
    [
        # On a saturated link, the rest comes before a second request would bring all.
        (SIZE // 2, [SIZE / 4] * 8, 4.0),
        (SIZE // 2, [SIZE / 2] * 8, 2.0),
        (0, [SIZE / 4] * 8, 1.0),  # one that hangs is late whatever the others do
        (SIZE // 2, [1.0] * 8, 5.0),  # and so is any in the end
        (SIZE // 4, [], 1.0),  # without others in flight, the earlier ones are compared with
        (SIZE * 3 // 4, [], 3.0),
    ],
)
def test_a_late_part_is_hedged_when_a_second_request_is_likely_to_be_sooner(
    received_bytes: int, others: list[float], due_s: float
) -> None:
    """Judged by the rates of the other parts in flight."""
    assert taught([1.0] * 100).due_s(SIZE, 1.0, received_bytes, others) == pytest.approx(due_s)


def test_a_few_of_a_hundred_requests_are_hedged_and_no_more() -> None:
    """Every fiftieth part earns a request at 2 %, and peace saves up few of them."""
    hedging = taught([1.0] * 200)
    assert [hedging.spend() for _ in range(5)] == [True] * 4 + [False]
    rich = taught([1.0] * 100_000)
    assert sum(rich.spend() for _ in range(100)) == 8


def test_requests_for_several_parts_are_first_compared_with_single_ones() -> None:
    """They may take as many times as long until enough of their own size are known."""
    hedging = taught([1.0] * 100)
    assert hedging.patience_s(4 * SIZE) == 4.0
    assert hedging.due_s(4 * SIZE, 4.0, 3 * SIZE, []) == pytest.approx(12.0)
    for _ in range(100):
        hedging.record_time(4 * SIZE, 2.0, parts=4)
    assert hedging.patience_s(4 * SIZE) == 2.0
    assert hedging.patience_s(SIZE) == 1.0
    assert [hedging.spend(4), hedging.spend(4), hedging.spend(1)] == [True, True, False]


def test_requests_for_many_small_parts_are_hedged_as_well() -> None:
    """Ranges of up to 64 parts are compared with single ones, and cost as many of them."""
    hedging = taught([1.0] * 100)
    assert hedging.patience_s(64 * SIZE, parts=64) == 64.0
    for _ in range(50):
        hedging.record_time(16 * SIZE, 2.0, parts=16)
    assert [hedging.spend(16), hedging.spend(16)] == [True, False]


@pytest.mark.parametrize(
    ("received_bytes", "elapsed_s", "usual_s", "others_s", "left_s"),
    [
        (SIZE // 10, 1.0, 1.0, [], 9.0),  # late: it will take five times as long as others
        (SIZE // 4, 1.0, 1.0, [], None),
        (SIZE // 10, 0.9, 1.0, [], None),
        (SIZE // 10, 1.0, 1.0, [10.0, 10.0], None),  # all are slow: so is the object store's link
        # This one would take longer than the stall time-out.
        (SIZE // 30, 1.0, 1.0, [30.0, 30.0], 29.0),
        (SIZE // 10, 30.0, 200.0, [], None),
        # Its owner waits for the object store as well, up to five stall time-outs.
        (0, 99.0, 1.0, [], None),
        (0, 100.0, 1.0, [], 100.0),
    ],
)
def test_a_part_from_the_tier_is_late_if_it_will_take_five_times_as_long_as_others(
    received_bytes: int,
    elapsed_s: float,
    usual_s: float,
    others_s: list[float],
    left_s: float | None,
) -> None:
    """Its rate tells, as soon as it has taken as long as they do, at a stall time-out of 20 s."""
    rates = [SIZE / other_s for other_s in others_s]
    for share, expected_s in ((0.02, left_s), (0.0, None)):
        found_s = taught([usual_s], share=share).left_s(
            SIZE, received_bytes, elapsed_s, usual_s, rates, 20.0
        )
        assert found_s == (None if expected_s is None else pytest.approx(expected_s, rel=0.01))


def test_hedges_of_the_tier_begin_with_two_and_cost_nothing_if_they_win() -> None:
    """A slow owner is found within a hundred parts; a slow store gets few requests twice."""
    hedging = taught([1.0] * 50)
    assert [hedging.spend_free_first() for _ in range(4)] == [True, True, True, False]
    hedging.regain_free()
    assert hedging.spend_free_first()
    assert not hedging.spend()


def test_a_fifth_of_the_stall_timeout_is_usual_where_nothing_is_known() -> None:
    """And what takes milliseconds is never late."""
    assert Hedging().usual_s(SIZE, 20.0) == 4.0
    assert taught([0.01]).usual_s(SIZE, 20.0) == pytest.approx(0.8)
    assert taught([1.0, 3.0, 3.0]).usual_s(SIZE, 20.0) == 3.0
