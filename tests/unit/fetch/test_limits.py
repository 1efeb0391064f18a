"""Limits of origins, links and bandwidth: how they are found, kept and shared."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.config import Settings
from shardcache.errors import ConfigError
from shardcache.fetch.limits import Aimd, Bandwidth, Link
from shardcache.fetch.priority import WAITING, Claim, Priority
from support.programs.guard import GUARD_S

LIMITS = st.integers(1, 64)


@given(LIMITS, st.integers(1, 64))
def test_requests_that_fail_together_halve_it_once(maximum: int, failures: int) -> None:
    """Throttling of requests begun under one limit counts once."""
    aimd = Aimd(maximum)
    began = aimd.generation
    for _ in range(failures):
        aimd.refused(began)
    assert aimd.limit == max(1, maximum // 2)
    aimd.refused(aimd.generation)
    assert aimd.limit == max(1, maximum // 4)


@given(LIMITS)
def test_a_round_of_successes_adds_one_until_the_most(maximum: int) -> None:
    """As many successes as the limit is, and not one fewer; all the way back."""
    aimd = Aimd(maximum)
    while aimd.limit > 1:
        aimd.refused(aimd.generation)
    for limit in range(1, maximum):
        assert aimd.limit == limit
        for _ in range(limit - 1):
            aimd.succeeded(aimd.generation)
        assert aimd.limit == limit
        aimd.succeeded(aimd.generation)
    for _ in range(maximum):
        aimd.succeeded(aimd.generation)
    assert aimd.limit == maximum


def test_successes_of_another_limit_say_nothing() -> None:
    """An answer to what was sent before the limit fell does not raise it again."""
    aimd = Aimd(2)
    aimd.refused(0)
    for _ in range(10):
        aimd.succeeded(0)
    assert aimd.limit == 1


PART = 8 * 1024 * 1024


def over(line: Link, *, fills: float, connections: int, parts: int = 5) -> Link:
    """Let parts arrive over a line that so many connections fill, with so many in use; quick parts take 1 s."""
    for _ in range(parts):
        line.took(PART, max(1.0, connections / fills), connections)
    return line


@pytest.mark.parametrize("connections", [4, 8, 16, 64])
def test_a_full_line_is_as_wide_however_many_share_it(connections: int) -> None:
    """Three connections fill it; two more are tried."""
    line = over(Link(), fills=3, connections=2)
    assert over(line, fills=3, connections=connections).connections == 5


def test_a_wide_line_takes_ever_more() -> None:
    """Where parts take no longer, more connections are tried than there were."""
    line = Link()
    for connections in (1, 3, 5, 7):
        assert over(line, fills=100, connections=connections).connections == connections + 2


def test_one_slow_part_says_nothing_of_the_line() -> None:
    """A server that was busy for a moment does not make the line narrow."""
    line = over(Link(), fills=100, connections=8)
    line.took(PART, 50.0, 8)
    assert line.connections == 10


def test_a_line_that_became_slower_is_not_taken_for_full_for_ever() -> None:
    """A quick start is forgotten after some parts: then more connections are tried again."""
    line = over(Link(), fills=100, connections=8)
    for _ in range(5):
        line.took(PART, 10.0, 8)
    assert line.connections == 3
    for _ in range(64):
        line.took(PART, 10.0, 8)
    assert line.connections == 10


def test_a_part_is_compared_with_parts_of_its_size() -> None:
    """That the small last part of a shard comes sooner does not make the others late."""
    line = over(Link(), fills=100, connections=8)
    line.took(PART // 64, 0.01, 8)
    assert over(line, fills=100, connections=8).connections == 10


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


async def test_a_waiting_reader_gets_the_whole_bandwidth() -> None:
    """One reader of a waiting job against four that fetch ahead: these get what was there before anyone waited."""
    readers = Readers(RATE, 40 * GRANT)
    ahead = [(f"ahead{number}", Priority(2, 0.0)) for number in range(4)]
    await readers.run(*ahead, ("waiting", Priority(WAITING, 5.0)))
    assert readers.granted["waiting"] >= 20 * GRANT


async def test_clients_share_bandwidth_equally() -> None:
    """One with eight reads and one with a single one, when both are at it all the time."""
    readers = Readers(RATE, 40 * GRANT)
    many = [(f"many{number}", Priority(WAITING, 0.0, "many")) for number in range(8)]
    await readers.run(*many, ("few", Priority(WAITING, 5.0, "few")))
    assert readers.granted["few"] >= 12 * GRANT


async def test_bytes_without_credit_are_paid_by_the_next_grant() -> None:
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


@pytest.mark.parametrize(("written", "meant"), [("500MB", 500_000_000), ("1.5MiB/s", 1_572_864), (100_000, 100_000)])
def test_rates_are_read_as_people_write_them(written: object, meant: int) -> None:
    """A size, with or without what everybody adds to it in their mind."""
    assert Settings.load({"max_bandwidth": written}).max_bandwidth == meant


@pytest.mark.parametrize("written", ["1", "0", "fast", "10 requests/s"])
def test_a_rate_that_can_only_be_a_slip_is_refused(written: str) -> None:
    """Anything under 64 KiB a second would never end."""
    with pytest.raises(ConfigError, match="--max-bandwidth"):
        Settings.load({"max_bandwidth": written})
