"""Standards of our figures: the other policies do what their names say, and none gets an unfair cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.caching.policies import LRU, OfflineMin, StaticSubset, hits
from shardcache.plan.residents import Policy
from shardcache.plan.sieve import Sieve
from support.shards.replay import Job, Read, all_reads, least_fetches

CAPACITY = 4

Maker = Callable[[Sequence[Read]], Policy]

ONLINE: dict[str, Maker] = {
    "LRU": lambda _reads: LRU(),
    "SIEVE": lambda _reads: Sieve(),
    "static subset": lambda _reads: StaticSubset(CAPACITY - 3),
}
ALL: dict[str, Maker] = {**ONLINE, "offline MIN": OfflineMin}


@st.composite
def jobs(draw: st.DrawFn) -> list[Job]:
    """Up to three jobs, each at its own pace, no two events at one time."""
    return [
        Job(
            [draw(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=6))],
            start_s=number / 10,
            seconds_per_shard=draw(st.sampled_from([1.0, 1.5, 3.0])) + number / 1000,
        )
        for number in range(draw(st.integers(1, 3)))
    ]


def _fetches(policy: Policy, reads: Sequence[Read], capacity: int = CAPACITY) -> int:
    return len(reads) - hits(policy, reads, capacity).total()


def _one_job(*epochs: str) -> list[Read]:
    return all_reads([Job(epochs)])


@given(jobs())
@settings(max_examples=200)
def test_offline_min_is_the_optimum(some_jobs: list[Job]) -> None:
    """Exhaustive search finds no way to fetch less."""
    reads = all_reads(some_jobs)
    assert _fetches(OfflineMin(reads), reads) == least_fetches(some_jobs, CAPACITY)


@pytest.mark.parametrize("name", ONLINE)
@given(some_jobs=jobs())
@settings(max_examples=100)
def test_no_policy_beats_the_optimum(name: str, some_jobs: list[Job]) -> None:
    """None of them has more room, or lets go of what is in hand, or counts a hit that was none."""
    reads = all_reads(some_jobs)
    assert _fetches(ONLINE[name](reads), reads) >= least_fetches(some_jobs, CAPACITY)


@pytest.mark.parametrize("name", ALL)
def test_a_leased_shard_stays(name: str) -> None:
    """A shard that one job reads for long is there for the other one, however many that has read meanwhile."""
    slow = Job(["a"], seconds_per_shard=100.0)
    fast = Job(["bcdefghia"], start_s=0.5)
    reads = all_reads([slow, fast])
    assert reads[-1].shard == "a"
    assert hits(ALL[name](reads), reads, CAPACITY)[1, 0] == 1


@pytest.mark.parametrize("name", ALL)
def test_a_cache_that_holds_everything_fetches_everything_once(name: str) -> None:
    """With room for all shards the policies are alike: the first epoch misses, the others hit."""
    reads = _one_job("abcd", "dbca", "abdc")
    assert hits(ALL[name](reads), reads, CAPACITY) == {(0, 0): 0, (0, 1): 4, (0, 2): 4}
