"""When a part is late, how many may be asked for twice, and what becomes of the two requests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import OriginUnavailableError
from shardcache.fetch.hedging import Hedging, race

SIZE = 8 * 1024 * 1024
STORE = "s3://bucket"


def taught(times_s: list[float], *, share: float = 0.02, size_bytes: int = SIZE) -> Hedging:
    """Return what has seen parts that took so long."""
    hedging = Hedging(share)
    for time_s in times_s:
        hedging.took(STORE, size_bytes, time_s)
    return hedging


def test_nothing_is_late_before_enough_was_seen() -> None:
    """Of fewer than a hundred parts the slowest is no tail."""
    assert taught([1.0] * 99).patience_s(STORE, SIZE) is None
    assert taught([1.0] * 100).patience_s(STORE, SIZE) == 1.0


def test_late_is_what_one_of_a_hundred_is() -> None:
    """The nearest-rank 99th percentile, in whatever order the times came."""
    times_s = [1000.0 + second for second in range(1, 1001)]
    random.Random(1).shuffle(times_s)
    assert taught(times_s).patience_s(STORE, SIZE) == 1990.0


def test_a_store_of_which_many_answers_hang_is_no_more_patient_for_that() -> None:
    """With two of a hundred at 30 s the percentile is 30 s; five times what half of them take is late as well."""
    assert taught([1.0] * 980 + [30.0] * 20).patience_s(STORE, SIZE) == 5.0


@given(st.integers(0, 2**32), st.integers(1001, 1300))
def test_only_the_last_thousand_count(seed: int, count: int) -> None:
    """A store that became faster or slower is judged by what it is now."""
    draw = random.Random(seed)  # a list of so many from Hypothesis is more than it takes for healthy
    times_s = [draw.uniform(0.1, 100) for _ in range(count)]
    last_s = sorted(times_s[-1000:])
    assert taught(times_s).patience_s(STORE, SIZE) == min(last_s[989], 5 * last_s[499])


def test_a_part_is_compared_with_parts_of_its_size_and_store() -> None:
    """The small last part of a shard says nothing of the others, nor one store of another."""
    hedging = taught([1.0] * 100)
    assert hedging.patience_s(STORE, SIZE // 16) is None
    assert hedging.patience_s(STORE, 16 * SIZE) is None
    assert hedging.patience_s("s3://other", SIZE) is None
    assert hedging.patience_s(STORE, SIZE + SIZE // 2) == 1.0


def test_on_a_full_line_a_late_part_is_late_because_all_are() -> None:
    """Half of it has come at the rate of the others: the rest comes sooner than a second request would bring all."""
    hedging = taught([1.0] * 100)
    assert hedging.due_s(STORE, SIZE, 1.0, SIZE // 2, [SIZE / 4] * 8) == pytest.approx(4.0)
    assert hedging.due_s(STORE, SIZE, 1.0, SIZE // 2, [SIZE / 2] * 8) == pytest.approx(2.0)


def test_a_part_that_hangs_is_late_whatever_the_others_do() -> None:
    """Nothing of it has come: its time is over when its patience is; and in the end any part's is."""
    hedging = taught([1.0] * 100)
    assert hedging.due_s(STORE, SIZE, 1.0, 0, [SIZE / 4] * 8) == 1.0
    assert hedging.due_s(STORE, SIZE, 1.0, SIZE // 2, [1.0] * 8) == 5.0


def test_a_part_that_is_alone_is_compared_with_those_before_it() -> None:
    """Most of it has come and then nothing: it takes a while until a second request would be sooner."""
    hedging = taught([1.0] * 100)
    assert hedging.due_s(STORE, SIZE, 1.0, SIZE // 4, []) == 1.0
    assert hedging.due_s(STORE, SIZE, 1.0, SIZE * 3 // 4, []) == pytest.approx(3.0)


def test_parts_of_milliseconds_are_not_late() -> None:
    """Where parts take milliseconds, a second request would cost more than it saves."""
    assert taught([0.001] * 200).patience_s(STORE, SIZE) == 0.05


def test_a_few_of_a_hundred_requests_are_hedged_and_no_more() -> None:
    """At 2 % every fiftieth part earns one second request, and a long time of peace no great store of them."""
    hedging = taught([1.0] * 200)
    assert [hedging.spend(STORE) for _ in range(5)] == [True] * 4 + [False]
    rich = taught([1.0] * 100_000)
    assert sum(rich.spend(STORE) for _ in range(100)) == 8


def test_requests_for_several_parts_are_first_compared_with_single_ones() -> None:
    """They may take as many times as long, until enough of their own size are known."""
    hedging = taught([1.0] * 100)
    assert hedging.patience_s(STORE, 4 * SIZE) == 4.0
    assert hedging.due_s(STORE, 4 * SIZE, 4.0, 3 * SIZE, []) == pytest.approx(12.0)
    for _ in range(100):
        hedging.took(STORE, 4 * SIZE, 2.0, parts=4)
    assert hedging.patience_s(STORE, 4 * SIZE) == 2.0
    assert hedging.patience_s(STORE, SIZE) == 1.0


def test_a_request_for_several_parts_earns_and_costs_as_many_times_as_much() -> None:
    """The share is one of bytes, and so is the memory that second requests take."""
    hedging = Hedging(0.02)
    for _ in range(50):
        hedging.took(STORE, 4 * SIZE, 1.0, parts=4)
    assert [hedging.spend(STORE, 4), hedging.spend(STORE, 1)] == [True, False]


def test_without_a_share_nothing_is_hedged() -> None:
    """0 turns it off."""
    assert taught([1.0] * 1000, share=0).patience_s(STORE, SIZE) is None


def left_s(
    received_bytes: int, elapsed_s: float, times_s: list[float], others_s: list[float], share: float = 0.02
) -> float | None:
    """Return what is left of a part from a tier, where others take so long, at a stall time-out of 20 s."""
    hedging = taught(times_s, share=share)
    usual_s = hedging.usual_s(STORE, SIZE, 20.0)
    rates = [SIZE / other_s for other_s in others_s]
    return hedging.left_s(SIZE, received_bytes, elapsed_s, usual_s, rates, 20.0)


def test_a_part_from_the_tier_is_late_if_it_will_take_five_times_as_long_as_others() -> None:
    """Its rate tells, as soon as it has taken as long as they do."""
    assert left_s(SIZE // 10, 1.0, [1.0], []) == pytest.approx(9.0, rel=0.01)
    assert left_s(SIZE // 4, 1.0, [1.0], []) is None
    assert left_s(SIZE // 10, 0.9, [1.0], []) is None
    assert left_s(SIZE // 10, 1.0, [1.0], [], share=0) is None


def test_no_part_from_the_tier_is_late_while_all_are_slow() -> None:
    """The object store's link is, and a request to it would be as slow; but for one that would take too long."""
    assert left_s(SIZE // 10, 1.0, [1.0], [10.0, 10.0]) is None
    assert left_s(SIZE // 30, 1.0, [1.0], [30.0, 30.0]) == pytest.approx(29.0, rel=0.01)
    assert left_s(SIZE // 10, 30.0, [200.0], []) is None


def test_a_part_that_its_owner_has_not_begun_is_late_after_five_stall_timeouts() -> None:
    """The owner waits for the object store as well."""
    assert left_s(0, 99.0, [1.0], []) is None
    assert left_s(0, 100.0, [1.0], []) == 100.0


def test_hedges_of_the_tier_begin_with_two_and_cost_nothing_if_they_win() -> None:
    """A slow owner is found before a hundred parts have come, and a slow object store is not asked for many twice."""
    hedging = taught([1.0] * 50)
    assert [hedging.tries(STORE) for _ in range(4)] == [True, True, True, False]
    hedging.won(STORE)
    assert hedging.tries(STORE) and not hedging.spend(STORE)


def test_a_fifth_of_the_stall_timeout_is_usual_where_nothing_is_known() -> None:
    """And what takes milliseconds is never late."""
    assert Hedging().usual_s(STORE, SIZE, 20.0) == 4.0
    assert taught([0.01]).usual_s(STORE, SIZE, 20.0) == pytest.approx(0.8)
    assert taught([1.0, 3.0, 3.0]).usual_s(STORE, SIZE, 20.0) == 3.0


class Rivals:
    """Two requests that end when they are told to, and note what became of them."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first_answer: asyncio.Future[None] = loop.create_future()
        self.second_answer: asyncio.Future[None] = loop.create_future()
        self.told: list[str] = []

    async def first(self) -> str:
        """Read and write."""
        try:
            await self.first_answer
            return "first"
        except asyncio.CancelledError:
            self.told.append("first cancelled")
            raise

    async def second(self, end_first: Callable[[], Awaitable[bool]]) -> str:
        """Read, and write if it is not too late."""
        try:
            await self.second_answer
        except asyncio.CancelledError:
            self.told.append("second cancelled")
            raise
        self.told.append("second writes" if await end_first() else "second too late")
        return "second"


@pytest.mark.parametrize("first_comes_first", [True, False])
async def test_answers_that_come_together_are_one(first_comes_first: bool) -> None:
    """In the same turn of the loop one of them wins, never both and never neither."""
    rivals = Rivals()
    answers = [rivals.first_answer, rivals.second_answer]
    loop = asyncio.get_running_loop()
    for answer in answers if first_comes_first else reversed(answers):
        loop.call_soon(answer.set_result, None)
    winner, first_won = await race(rivals.first(), 0.0, rivals.second)
    assert winner == ("first" if first_won else "second")
    assert first_won == ("second writes" not in rivals.told)


async def test_a_first_request_that_fails_ends_the_second() -> None:
    """Its error comes as it is, not in a group."""
    rivals = Rivals()
    asyncio.get_running_loop().call_soon(rivals.first_answer.set_exception, OriginUnavailableError("gone"))
    with pytest.raises(OriginUnavailableError, match="gone"):
        await race(rivals.first(), 0.0, rivals.second)


async def test_cancelling_a_race_cancels_both_requests() -> None:
    """A download that is given up leaves no request behind."""
    rivals = Rivals()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await race(rivals.first(), 0.0, rivals.second)
    assert sorted(rivals.told) == ["first cancelled", "second cancelled"]
