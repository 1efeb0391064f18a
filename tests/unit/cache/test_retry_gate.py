"""Retries of prefetching after a failure."""

from __future__ import annotations

from shardcache.cache.transfers.retry_gate import RetryGate
from shardcache.errors import NotFoundError, OriginUnavailableError

AWAY = OriginUnavailableError("the store is away")


def test_a_success_brings_back_what_failed_while_the_store_was_away() -> None:
    """After an outage, the plan is fetched ahead again as soon as anything arrives."""
    failures = RetryGate()
    failures.failed("a", AWAY)
    failures.failed("b", AWAY)
    assert "a" in failures
    assert failures.succeeded("c") == {"a", "b"}
    assert "a" not in failures


def test_a_shard_that_keeps_failing_is_left_alone() -> None:
    """One bad object among good ones is not asked for without end."""
    failures = RetryGate()
    for _ in range(3):
        failures.failed("bad", AWAY)
        last = failures.succeeded("good")
    assert last == set()
    assert "bad" in failures


def test_what_no_retry_can_mend_is_not_tried_again() -> None:
    """A missing object stays missing, until a reader asks and it is there."""
    failures = RetryGate()
    failures.failed("gone", NotFoundError("no such object"))
    assert failures.succeeded("good") == set()
    assert "gone" in failures
    failures.succeeded("gone")
    assert "gone" not in failures


def test_failures_are_not_remembered_without_end() -> None:
    """Of shards that nobody will ever get, only so many are known, the newest."""
    failures = RetryGate(remembered=10)
    for number in range(1000):
        failures.failed(f"shard{number}", NotFoundError("gone"))
    assert len(failures) == 10
    assert "shard0" not in failures
    assert "shard999" in failures
