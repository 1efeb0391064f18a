"""Reads of bodies: pauses, byte credit, their clock, and stalls, on a clock that leaps."""

import asyncio
import math
import time
from collections import Counter

import pytest

from shardcache.errors import OriginUnavailableError
from shardcache.fetch.limits.bandwidth import Bandwidth
from shardcache.fetch.limits.slot_claims import WAITING, Claim, Priority
from shardcache.fetch.reads import PausableRead
from support.programs.still_loop import leaping, pass_time

RATE = 1_000_000
GRANT = RATE // 50
ANY = Claim(lambda: Priority(2))
LIMIT_S = 20.0


def now_s() -> float:
    """Return the loop's time."""
    return asyncio.get_running_loop().time()


class Readers:
    """Tasks that take grants in turn until all of them together got a number of bytes."""

    def __init__(self, limit_bytes_per_s: int, total_bytes: float) -> None:
        self.bandwidth = Bandwidth(limit_bytes_per_s)
        self.granted: Counter[str] = Counter()
        self._total_bytes = total_bytes

    async def run(self, *priorities: tuple[str, Priority]) -> None:
        """Let readers run, by name."""
        async with asyncio.TaskGroup() as group:
            for name, priority in priorities:
                group.create_task(self._read(name, priority))

    async def _read(self, name: str, priority: Priority) -> None:
        claim = Claim(lambda: priority)
        while self.granted.total() < self._total_bytes:
            self.granted[name] += int(await self.bandwidth.grant(claim, 10**9))


@leaping
async def test_all_grants_together_keep_to_the_rate_and_use_it() -> None:
    """However many ask; a burst of a tenth of a second comes on top."""
    readers = Readers(RATE, 30 * GRANT)
    await readers.run(*((str(number), Priority(2)) for number in range(8)))
    assert 30 * GRANT <= readers.granted.total() <= 1.001 * RATE * (now_s() + 0.1) <= 38 * GRANT


@leaping
async def test_a_waiting_reader_gets_the_whole_bandwidth() -> None:
    """Four readers that fetch ahead get only the credit from before anyone waited."""
    readers = Readers(RATE, 40 * GRANT)
    ahead = [(f"ahead{number}", Priority(2, 0.0)) for number in range(4)]
    await readers.run(*ahead, ("waiting", Priority(WAITING, 5.0)))
    assert readers.granted["waiting"] >= 30 * GRANT


@leaping
async def test_clients_share_bandwidth_equally() -> None:
    """One with eight reads and one with a single one, when both are at it all the time."""
    readers = Readers(RATE, 40 * GRANT)
    many = [(f"many{number}", Priority(WAITING, 0.0, "many")) for number in range(8)]
    await readers.run(*many, ("few", Priority(WAITING, 5.0, "few")))
    assert readers.granted["few"] >= 16 * GRANT


@leaping
async def test_bytes_without_credit_are_paid_by_the_next_grant() -> None:
    """And what was granted for nothing need not be paid again."""
    bandwidth = Bandwidth(RATE)
    bandwidth.settle(-20 * GRANT)
    assert await bandwidth.grant(ANY, GRANT) == GRANT
    assert now_s() == pytest.approx(16 / 50, rel=0.001)  # five of 21 were there
    bandwidth.settle(1000 * GRANT)
    assert sum([await bandwidth.grant(ANY, GRANT) for _ in range(1000)]) == 1000 * GRANT
    assert now_s() == pytest.approx(16 / 50, rel=0.001)


@leaping
async def test_a_cancelled_reader_leaves_its_credit_to_the_others() -> None:
    """In the queue, and in the moment in which it was granted."""
    bandwidth = Bandwidth(RATE)
    bandwidth.settle(-5 * GRANT)
    queued, granted, last = (asyncio.create_task(bandwidth.grant(ANY, GRANT)) for _ in range(3))
    await asyncio.sleep(0)
    queued.cancel()
    asyncio.get_running_loop().call_later(1.01 / 50, granted.cancel)
    pass_time(1.01 / 50)
    assert await last == await bandwidth.grant(ANY, GRANT) == GRANT
    assert now_s() == pytest.approx(2 / 50, rel=0.001)  # in which two are earned
    assert queued.cancelled()
    assert granted.cancelled()


class Purse:
    """Gives the grants that it is filled with, and records what was wanted."""

    def __init__(self, *grants: float) -> None:
        self.grants: asyncio.Queue[float] = asyncio.Queue()
        self.wanted: list[float] = []
        for grant in grants:
            self.grants.put_nowait(grant)

    async def grant(self, wanted_bytes: float) -> float:
        """Return the next grant, once there is one."""
        self.wanted.append(wanted_bytes)
        return await self.grants.get()


def read_of(size_bytes: int, purse: Purse) -> PausableRead:
    """Return a read whose limit anything restarts."""
    read = PausableRead("s3://b/a.tar", LIMIT_S, size_bytes=size_bytes, grant=purse.grant)
    read._enough_bytes = 1
    return read


@leaping
async def test_a_grant_that_is_used_up_interrupts_and_its_debt_is_paid_first() -> None:
    """15 bytes are owed if 55 come and 40 of 100 are granted; the end wants nothing."""
    purse = Purse(40, 10, 50)
    calls = []
    read = read_of(100, purse)
    async with read.stall_timeout():
        with read.interruptible(lambda: calls.append(1)):
            read.received(30)
            assert calls == []
            read.received(25)
            assert calls == [1]
            await read.ready()
            read.received(45)
            await read.ready()
        assert calls == [1]
    assert purse.wanted == [100, 60, 50]
    assert read.credit_bytes == 0


@leaping
async def test_a_halted_read_pauses_until_it_has_a_slot_again() -> None:
    """The clock that notices stalls does not run meanwhile, and runs again afterwards."""
    purse = Purse(math.inf)
    calls = []
    read = read_of(100, purse)
    with pytest.raises(OriginUnavailableError, match="nothing was received"):
        async with read.stall_timeout():
            with read.interruptible(lambda: calls.append(1)):
                read.halt()
                asyncio.get_running_loop().call_later(4 * LIMIT_S, read.resume)
                await read.ready()
                calls.append(2)
                await asyncio.Event().wait()
    assert calls == [1, 2]
    assert now_s() == pytest.approx(5 * LIMIT_S)


async def pause(read: PausableRead, time_s: float) -> None:
    """Pause a read for some time."""
    read.halt()
    asyncio.get_running_loop().call_later(time_s, read.resume)
    await read.ready()


@leaping
async def test_a_read_that_is_paused_often_stalls_all_the_same() -> None:
    """The pauses do not count, nor do they restart the clock; only bytes do."""
    read = read_of(100, Purse(math.inf))
    with pytest.raises(OriginUnavailableError, match="nothing was received"):
        async with read.stall_timeout():
            await asyncio.sleep(0.5 * LIMIT_S)
            read.received(10)
            for _ in range(5):
                await pause(read, LIMIT_S)
                await asyncio.sleep(0.5 * LIMIT_S)
    assert read.reading_time.elapsed_s == pytest.approx(1.6 * LIMIT_S)


@leaping
async def test_bytes_that_arrive_during_a_pause_do_not_end_it_as_a_stall() -> None:
    """A worker may have sent them before it was told of the pause, which may be long."""
    read = read_of(100, Purse(math.inf))
    async with read.stall_timeout():
        asyncio.get_running_loop().call_later(1.0, read.received, 10)
        await pause(read, 4 * LIMIT_S)
        read.received(90)
    assert read.received_bytes == 100


@leaping
async def test_waiting_for_credit_is_not_a_stall() -> None:
    """Before the first byte as well as later."""
    purse = Purse()
    read = read_of(100, purse)
    asyncio.get_running_loop().call_later(4 * LIMIT_S, purse.grants.put_nowait, 100)
    async with read.stall_timeout():
        read.received(100)
    assert read.credit_bytes == 0


@leaping
async def test_a_halted_read_asks_for_no_credit() -> None:
    """Bytes that others could have are not granted to a read without a slot."""
    purse = Purse(100)
    read = read_of(100, purse)
    read.halt()
    ready = asyncio.create_task(read.ready())
    await asyncio.sleep(0)
    assert purse.wanted == []
    read.resume()
    await ready
    assert purse.wanted == [100]


@leaping
async def test_a_slow_answer_may_take_longer_than_the_limit() -> None:
    """Enough bytes start the clock anew, and are tallied; too few do not."""
    counts: list[int] = []
    read = PausableRead("s3://b/a.tar", LIMIT_S, counts.append)
    async with read.stall_timeout():
        for _ in range(5):
            await asyncio.sleep(0.9 * LIMIT_S)
            read.received(1)
    assert sum(counts) == 5
    trickle = PausableRead("s3://b/a.tar", LIMIT_S, size_bytes=10**9)
    with pytest.raises(OriginUnavailableError, match="only 2000 bytes were received for 20 s"):
        async with trickle.stall_timeout():
            for _ in range(5):
                trickle.received(1000)
                await asyncio.sleep(0.9 * LIMIT_S)


@leaping
async def test_first_byte_that_is_reported_late_counts_from_its_arrival() -> None:
    """The workers report the first bytes of a short body together with its end."""
    read = PausableRead("s3://bucket/key", LIMIT_S, size_bytes=10)
    async with read.stall_timeout():
        pass_time(5.0)
        read.received(10, time.monotonic() - 2.0)
    assert read.first_byte_s is not None
    assert 2.0 <= read.first_byte_s <= 3.0
    assert read.last_byte_s == 5.0
