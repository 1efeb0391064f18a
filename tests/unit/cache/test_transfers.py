"""Whoever waits for a transfer is answered, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from shardcache.cache.planner import Planner
from shardcache.cache.transfers import RetryGate, Transfers
from shardcache.cache.waits import Arrival, Class, PostponedError, Signal, Transfer, Wait
from shardcache.errors import NotFoundError, OriginUnavailableError, ShardcacheError
from shardcache.metrics import Counters
from shardcache.protocol import ShardRef
from shardcache.store.shard import Shard

REF = ShardRef("s3://bucket/a.tar")
SHARD = Shard("key", 1, 1, 0.0)
AWAY = OriginUnavailableError("the store is away")


async def waited(fetch: Callable[[Transfer], Awaitable[Shard]], *, ahead: bool = False) -> Shard | Arrival:
    """Return what a reader gets, of a transfer of its own or of one that was begun ahead of it."""
    async with asyncio.TaskGroup() as group:
        transfers = Transfers(fetch, lambda: None, Planner(), Signal(), Counters(), group)
        if ahead:
            transfers.start("a", REF, Class.PLANNED)
        return await transfers.wait("a", REF, Class.PLANNED, Wait())


async def outcome(fetch: Callable[[Transfer], Awaitable[Shard]], *, ahead: bool = False) -> ShardcacheError:
    """Return the error that a reader gets."""
    with pytest.RaisesGroup(ShardcacheError) as caught:
        await waited(fetch, ahead=ahead)
    error = caught.value.exceptions[0]
    assert isinstance(error, ShardcacheError)
    return error


async def test_an_error_reaches_the_reader_as_itself() -> None:
    """The origin's error is what the reader is told, at the first try."""
    tries = 0

    async def fetch(transfer: Transfer) -> Shard:
        nonlocal tries
        tries += 1
        raise NotFoundError("gone", url=transfer.ref.url)

    assert (await outcome(fetch)).code == "not_found"
    assert tries == 1


async def test_a_bug_fails_one_shard() -> None:
    """An exception that nobody foresaw becomes an error of that shard, and the daemon goes on."""

    async def fetch(transfer: Transfer) -> Shard:
        raise ZeroDivisionError

    assert "ZeroDivisionError" in (await outcome(fetch)).message


async def test_a_postponed_transfer_answers_its_waiters() -> None:
    """A reader that came in at the last moment is told, and not left alone."""

    async def fetch(transfer: Transfer) -> Shard:
        raise PostponedError

    assert isinstance(await outcome(fetch), OriginUnavailableError)


async def test_joining_a_failing_transfer_retries_once() -> None:
    """The last of a prefetch's tries is not the only one of the reader that joined it."""
    tries = 0

    async def fetch(transfer: Transfer) -> Shard:
        nonlocal tries
        tries += 1
        await asyncio.sleep(0)
        if tries == 1:
            raise OriginUnavailableError("away")
        return SHARD

    assert await waited(fetch, ahead=True) is SHARD
    assert tries == 2


def test_a_success_after_an_outage_retries_failed_shards() -> None:
    """After an outage, the plan is fetched ahead again as soon as anything arrives."""
    failures = RetryGate()
    failures.failed("a", AWAY)
    failures.failed("b", AWAY)
    assert "a" in failures
    assert failures.succeeded("c") == {"a", "b"}
    assert "a" not in failures


def test_a_shard_that_keeps_failing_is_not_prefetched_again() -> None:
    """One bad object among good ones is not asked for without end."""
    failures = RetryGate()
    for _ in range(3):
        failures.failed("bad", AWAY)
        last = failures.succeeded("good")
    assert last == set()
    assert "bad" in failures


def test_a_permanent_failure_is_not_retried() -> None:
    """A missing object stays missing, until a reader asks and it is there."""
    failures = RetryGate()
    failures.failed("gone", NotFoundError("no such object"))
    assert failures.succeeded("good") == set()
    assert "gone" in failures
    failures.succeeded("gone")
    assert "gone" not in failures


def test_the_number_of_remembered_failures_is_bounded() -> None:
    """Of shards that nobody will ever get, only so many are known, the newest."""
    failures = RetryGate(remembered=10)
    for number in range(1000):
        failures.failed(f"shard{number}", NotFoundError("gone"))
    assert len(failures) == 10
    assert "shard0" not in failures
    assert "shard999" in failures
