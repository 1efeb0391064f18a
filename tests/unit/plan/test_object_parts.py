"""Runs of parts: which parts are fetched by one request, and in which order."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.plan.object_parts import runs


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([], []),
        ([3, 4, 5, 6], [range(3, 7)]),
        ([5, 6, 3, 4], [range(3, 7)]),
        ([6, 5, 4, 3], [range(3, 7)]),
        ([9, 0, 1], [range(9, 10), range(2)]),
        ([0, 1, 2, 3, 4, 5, 6], [range(4), range(4, 7)]),
    ],
)
def test_neighbours_are_one_run_in_whatever_order_they_are_wanted(
    parts: list[int], expected: list[range]
) -> None:
    """Up to the longest run; the run with the part that is wanted first comes first."""
    assert runs(parts, 4) == expected


@given(st.lists(st.integers(0, 60), unique=True), st.integers(1, 8))
def test_runs_have_each_part_once(parts: list[int], max_run: int) -> None:
    """None is too long, and no two of them could be one."""
    found = runs(parts, max_run)
    assert sorted(part for run in found for part in run) == sorted(parts)
    assert all(0 < len(run) <= max_run for run in found)
    ascending = sorted(found, key=lambda run: run.start)
    for run, following in pairwise(ascending):
        assert run.stop < following.start or len(run) == max_run
