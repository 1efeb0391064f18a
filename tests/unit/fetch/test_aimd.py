"""Search for a store's limit of concurrency."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardcache.fetch.limits import Aimd

LIMITS = st.integers(1, 64)


@given(LIMITS, st.lists(st.tuples(st.booleans(), st.integers(0, 3))))
def test_the_limit_stays_between_one_and_the_most(most: int, answers: list[tuple[bool, int]]) -> None:
    """Whatever comes, of whatever age; and one answer changes it by one at the most, upwards."""
    aimd = Aimd(most)
    for well, age in answers:
        before = aimd.limit
        (aimd.succeeded if well else aimd.refused)(aimd.generation - age)
        assert 1 <= aimd.limit <= most
        assert aimd.limit <= before + 1


@given(LIMITS, st.integers(1, 64))
def test_requests_that_fail_together_halve_it_once(most: int, failures: int) -> None:
    """Throttling of requests begun under one limit counts once."""
    aimd = Aimd(most)
    began = aimd.generation
    for _ in range(failures):
        aimd.refused(began)
    assert aimd.limit == max(1, most // 2)
    aimd.refused(aimd.generation)
    assert aimd.limit == max(1, most // 4)


@given(LIMITS)
def test_a_round_of_successes_adds_one_until_the_most(most: int) -> None:
    """As many successes as the limit is, and not one fewer; all the way back."""
    aimd = Aimd(most)
    while aimd.limit > 1:
        aimd.refused(aimd.generation)
    for limit in range(1, most):
        assert aimd.limit == limit
        for _ in range(limit - 1):
            aimd.succeeded(aimd.generation)
        assert aimd.limit == limit
        aimd.succeeded(aimd.generation)
    for _ in range(most):
        aimd.succeeded(aimd.generation)
    assert aimd.limit == most


def test_successes_of_another_limit_say_nothing() -> None:
    """An answer to what was sent before the limit fell does not raise it again."""
    aimd = Aimd(2)
    aimd.refused(0)
    for _ in range(10):
        aimd.succeeded(0)
    assert aimd.limit == 1
