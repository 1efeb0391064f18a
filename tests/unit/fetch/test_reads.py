"""When a read pauses, how long it works, and when it stalls."""

from __future__ import annotations

import asyncio
import math

import pytest

from shardcache.errors import OriginUnavailableError
from shardcache.fetch.reads import PausableRead, StallTimeout, Stopwatch
from shardcache.transport.flow import nothing


async def test_a_stopwatch_reaches_a_time_excluding_stops() -> None:
    """A stop puts the moment off."""
    watch = Stopwatch()
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(watch.reaches(0.02))
        watch.run()
        await asyncio.sleep(0.005)
        watch.stop()
        rested_s = watch.elapsed_s
        await asyncio.sleep(0.1)
        assert rested_s >= 0.02 or not waiting.done()
        watch.run()
    assert watch.elapsed_s >= 0.02


LIMIT_S = 0.05


class Purse:
    """Grants what it is told to, and notes what was wanted."""

    def __init__(self, *grants: float) -> None:
        self.grants = list(grants)
        self.wanted: list[float] = []
        self.filled = asyncio.Event()

    async def grant(self, wanted_bytes: float) -> float:
        """Return the next grant, once there is one."""
        self.wanted.append(wanted_bytes)
        while not self.grants:
            await self.filled.wait()
        return self.grants.pop(0)


def read_of(size_bytes: int, purse: Purse) -> PausableRead:
    """Return a read that gives up soon."""
    return PausableRead(StallTimeout(LIMIT_S, "s3://b/a.tar", nothing), size_bytes, purse.grant)


async def test_without_a_limit_nothing_is_ever_wanted_twice() -> None:
    """One infinite grant is enough for all bytes, and nothing is interrupted."""
    purse, calls = Purse(math.inf), []
    read = read_of(100, purse)
    async with read.limit():
        with read.interruptible(lambda: calls.append(1)):
            for _ in range(10):
                read.received(10)
                await read.ready()
    assert (purse.wanted, calls) == ([100], [])


async def test_a_grant_that_is_used_up_interrupts_and_its_debt_is_paid_first() -> None:
    """40 of 100 bytes granted and 55 come: 15 are owed, 45 to come are wanted with them; the end wants nothing."""
    purse, calls = Purse(40, 10, 50), []
    read = read_of(100, purse)
    async with read.limit():
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


async def test_a_halted_read_pauses_until_it_has_a_slot_again() -> None:
    """The clock that notices stalls does not run meanwhile, and runs again afterwards."""
    purse, calls = Purse(math.inf), []
    read = read_of(100, purse)
    with pytest.raises(OriginUnavailableError, match="nothing was received"):
        async with read.limit():
            with read.interruptible(lambda: calls.append(1)):
                read.halt()
                asyncio.get_running_loop().call_later(4 * LIMIT_S, read.resume)
                await read.ready()
                calls.append(2)
                await asyncio.Event().wait()
    assert calls == [1, 2]


async def test_waiting_for_credit_is_not_a_stall() -> None:
    """Before the first byte as well as later."""
    purse = Purse()
    read = read_of(100, purse)

    def pay() -> None:
        purse.grants.append(100)
        purse.filled.set()

    asyncio.get_running_loop().call_later(4 * LIMIT_S, pay)
    async with read.limit():
        read.received(100)
    assert read.credit_bytes == 0


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
