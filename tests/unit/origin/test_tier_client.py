"""The daemon's side of a tier: its breaker, and the owners that it leaves out."""

from __future__ import annotations

from shardcache.origin.registry import Breaker, SlowOwners


def test_failures_in_a_row_open_it() -> None:
    """A success in between starts the count again."""
    breaker = Breaker(max_failures=3, pause_s=10)
    for _ in range(2):
        breaker.failed(0.0)
    breaker.succeeded()
    for _ in range(2):
        breaker.failed(0.0)
    assert not breaker.is_open and breaker.admits(0.0)
    breaker.failed(0.0)
    assert breaker.is_open and not breaker.admits(9.9)


def test_two_stalls_in_a_row_open_it() -> None:
    """Not one, and not a stall and a quick failure."""
    breaker = Breaker(max_failures=16)
    breaker.failed(0.0)
    breaker.failed(20.0, stalled=True)
    assert not breaker.is_open
    breaker.failed(40.0, stalled=True)
    assert breaker.is_open


def test_an_open_breaker_admits_one_probe_per_rest() -> None:
    """Even if nothing is ever heard of the probe; its failure starts another rest, its success closes the breaker."""
    breaker = Breaker(max_failures=1, pause_s=10)
    breaker.failed(0.0)
    assert [breaker.admits(now_s) for now_s in (5.0, 10.0, 10.1, 19.9, 20.0)] == [False, True, False, False, True]
    breaker.failed(25.0)
    assert [breaker.admits(now_s) for now_s in (30.1, 34.9, 35.0)] == [False, False, True]
    breaker.succeeded()
    assert all(breaker.admits(35.0) for _ in range(100))


def test_an_owner_that_was_slow_twice_within_the_rest_is_left_out_for_it() -> None:
    """Others are not, nor is one that is slow now and then."""
    owners = SlowOwners(pause_s=60)
    for now_s in (0.0, 61.0):
        owners.add("a", now_s)
    assert not owners.any(61.0)
    owners.add("a", 70.0)
    assert owners.has("a", 129.9) and owners.any(129.9) and not owners.has("b", 70.0)
    assert not owners.has("a", 130.0) and not owners.any(130.0)
