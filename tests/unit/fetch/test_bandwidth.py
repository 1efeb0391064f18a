"""A rate that is kept, and who has it."""

from __future__ import annotations

import asyncio
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.config import Settings
from shardcache.errors import ConfigError
from shardcache.fetch.limits import Bandwidth
from shardcache.fetch.priority import WAITING, Claim, Priority, RoundRobin
from support.programs.guard import GUARD_S

RATE = 1_000_000
GRANT = RATE // 50
ANY = Claim(lambda: Priority(2))


class Readers:
    """Tasks that take one grant after the other until so much was granted to all of them."""

    def __init__(self, limit_bytes_per_s: int, total_bytes: float) -> None:
        self.bandwidth = Bandwidth(limit_bytes_per_s)
        self.granted: Counter[str] = Counter()
        self._total_bytes = total_bytes

    async def run(self, *priorities: tuple[str, Priority]) -> float:
        """Let readers run, by name; return how long it took."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        async with asyncio.TaskGroup() as group:
            for name, priority in priorities:
                group.create_task(self._read(name, priority))
        return loop.time() - began_s

    async def _read(self, name: str, priority: Priority) -> None:
        claim = Claim(lambda: priority)
        while self.granted.total() < self._total_bytes:
            self.granted[name] += int(await self.bandwidth.grant(claim, 10**9))
            await asyncio.sleep(0)  # what a read does between two grants


async def test_all_grants_together_keep_to_the_rate() -> None:
    """However many ask; a burst of a tenth of a second comes on top."""
    readers = Readers(RATE, 30 * GRANT)
    elapsed_s = await readers.run(*((str(number), Priority(2)) for number in range(8)))
    assert readers.granted.total() <= RATE * (elapsed_s + 0.1)


async def test_without_a_limit_all_may_be_read_at_once() -> None:
    """Nothing is counted, nothing waits."""
    bandwidth = Bandwidth(None)
    assert await bandwidth.grant(ANY, 1) == math.inf
    bandwidth.settle(-(10**12))
    assert await bandwidth.grant(ANY, 1) == math.inf


async def test_who_waits_has_it_all() -> None:
    """One reader of a waiting job against four that fetch ahead: these get what was there before anyone waited."""
    readers = Readers(RATE, 40 * GRANT)
    ahead = [(f"ahead{number}", Priority(2, 0.0)) for number in range(4)]
    await readers.run(*ahead, ("waiting", Priority(WAITING, 5.0)))
    assert readers.granted["waiting"] >= 20 * GRANT


async def test_parties_have_equal_parts() -> None:
    """One with eight reads and one with a single one, when both are at it all the time."""
    readers = Readers(RATE, 40 * GRANT)
    many = [(f"many{number}", Priority(WAITING, 0.0, "many")) for number in range(8)]
    await readers.run(*many, ("few", Priority(WAITING, 5.0, "few")))
    assert readers.granted["few"] >= 12 * GRANT


async def test_what_came_without_a_grant_is_paid_by_the_next() -> None:
    """And what was granted for nothing need not be paid again."""
    bandwidth, loop = Bandwidth(RATE), asyncio.get_running_loop()
    bandwidth.settle(-20 * GRANT)
    began_s = loop.time()
    assert await bandwidth.grant(ANY, GRANT) == GRANT
    paid_bytes = RATE * (loop.time() - began_s + 0.1)
    assert paid_bytes >= 21 * GRANT
    bandwidth.settle(10**6 * GRANT)
    granted = [await bandwidth.grant(ANY, GRANT) for _ in range(1000)]
    assert sum(granted) == 1000 * GRANT


async def test_a_cancelled_reader_leaves_the_payment_to_the_others() -> None:
    """Whoever pays for all may go in the middle of it."""
    bandwidth = Bandwidth(RATE)
    bandwidth.settle(-20 * GRANT)
    first = asyncio.create_task(bandwidth.grant(ANY, GRANT))
    second = asyncio.create_task(bandwidth.grant(ANY, GRANT))
    await asyncio.sleep(0)
    first.cancel()
    async with asyncio.timeout(GUARD_S):
        assert await second == GRANT
    assert first.cancelled()


@given(st.lists(st.integers(0, 5)))
def test_turns_go_round(parties: list[int]) -> None:
    """Of two parties that which was served last comes last; those never served come first."""
    round_robin = RoundRobin()
    for party in parties:
        round_robin.serve(party)
    order = sorted(range(6), key=round_robin.last)
    last = {party: index for index, party in enumerate(parties)}
    assert [last[party] for party in order if party in last] == sorted(last.values())
    assert all(party not in last for party in order[: 6 - len(last)])


@pytest.mark.parametrize(("written", "meant"), [("500MB", 500_000_000), ("1.5MiB/s", 1_572_864), (100_000, 100_000)])
def test_rates_are_read_as_people_write_them(written: object, meant: int) -> None:
    """A size, with or without what everybody adds to it in their mind."""
    assert Settings.load({"max_bandwidth": written}).max_bandwidth == meant


@pytest.mark.parametrize("written", ["1", "0", "fast", "10 requests/s"])
def test_a_rate_that_can_only_be_a_slip_is_refused(written: str) -> None:
    """Anything under 64 KiB a second would never end."""
    with pytest.raises(ConfigError, match="--max-bandwidth"):
        Settings.load({"max_bandwidth": written})
