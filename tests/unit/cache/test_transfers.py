"""Every reader of a transfer is answered, and a failed one may be fetched ahead again."""

import asyncio
from collections.abc import Callable

import pytest

from shardcache.cache.fetching.retry_gate import RetryGate
from shardcache.cache.fetching.transfers import Transfers
from shardcache.cache.planner import Planner
from shardcache.cache.waiting.arrival import Arrival
from shardcache.cache.waiting.signals import Signal
from shardcache.cache.waiting.transfer import Transfer
from shardcache.cache.waiting.waits import PostponedError, PriorityClass, Wait
from shardcache.errors import NotFoundError, OriginUnavailableError, ShardcacheError
from shardcache.shared.protocol import ShardRef
from shardcache.store.shard import Shard
from shardcache.telemetry.metrics import Counters

REF = ShardRef("s3://bucket/a.tar")
SHARD = Shard("key", 1, 1, 0.0)
AWAY = OriginUnavailableError("the store is away")


class Origin:
    """Ends each transfer as its list says: with an exception, or else with a shard."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self.outcomes = list(outcomes)

    async def fetch(self, _transfer: Transfer) -> Shard:
        await asyncio.sleep(0)
        outcome = self.outcomes.pop(0)
        if outcome is not None:
            raise outcome
        return SHARD

    async def read(self, *, ahead: bool) -> Shard | Arrival:
        """Return what a reader gets, from its own transfer or one begun ahead of it."""
        async with asyncio.TaskGroup() as group:
            transfers = Transfers(
                self.fetch, lambda: None, Planner({}), Counters(), Signal(), group
            )
            if ahead:
                transfers.start("a", REF, PriorityClass.PLANNED)
            return await transfers.wait("a", REF, PriorityClass.PLANNED, Wait())


@pytest.mark.parametrize(
    ("raised", "is_told"),
    [
        (NotFoundError("gone", url=REF.url), lambda exn: exn.code == "not_found"),
        (ZeroDivisionError(), lambda exn: "ZeroDivisionError" in exn.message),
        (PostponedError(), lambda exn: isinstance(exn, OriginUnavailableError)),
    ],
    ids=["the origin's error", "a bug", "postponed at the last moment"],
)
async def test_a_failed_transfer_answers_its_reader(
    raised: Exception, is_told: Callable[[ShardcacheError], bool]
) -> None:
    """At the first try, by a typed error, which ends that shard alone."""
    origin = Origin(raised)
    with pytest.RaisesGroup(ShardcacheError) as caught:
        await origin.read(ahead=False)
    error = caught.value.exceptions[0]
    assert isinstance(error, ShardcacheError)
    assert is_told(error)
    assert not origin.outcomes


async def test_joining_a_failing_transfer_retries_once() -> None:
    """The last of a prefetch's tries is not the only one of the reader that joined it."""
    assert await Origin(AWAY, None).read(ahead=True) is SHARD


@pytest.mark.parametrize(("tries", "exn"), [(3, AWAY), (1, NotFoundError("no such object"))])
def test_a_shard_that_keeps_failing_is_not_prefetched_again(
    tries: int, exn: ShardcacheError
) -> None:
    """Any arrival resumes the plan after an outage; a bad object is given up in time.

    A missing one is asked for once, until a reader gets it.
    """
    failures = RetryGate()
    for number in range(1, tries + 1):
        failures.failed("bad", exn)
        failures.failed("other", AWAY)
        assert {"bad", "other"} == {name for name in ("bad", "other") if name in failures}
        again = failures.succeeded("good")
        assert ("bad" in again) == ("bad" not in failures) == (number < tries)
    failures.succeeded("bad")
    assert "bad" not in failures


def test_the_number_of_remembered_failures_is_bounded() -> None:
    """Of shards that nobody will ever get, only so many are known, the newest."""
    failures = RetryGate(remembered=10)
    for number in range(1000):
        failures.failed(f"shard{number}", NotFoundError("gone"))
    assert len(failures) == 10
    assert "shard0" not in failures
    assert "shard999" in failures
