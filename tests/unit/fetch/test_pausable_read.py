"""When a read rests, and what its clock makes of that."""

from __future__ import annotations

import asyncio
import math

import pytest

from shardcache.errors import OriginUnavailableError
from shardcache.fetch.reads import PausableRead, StallTimeout
from shardcache.transport.flow import nothing

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


def tap_of(size_bytes: int, purse: Purse) -> PausableRead:
    """Return a tap that gives up soon."""
    return PausableRead(StallTimeout(LIMIT_S, "s3://b/a.tar", nothing), size_bytes, purse.grant)


async def test_without_a_limit_nothing_is_ever_wanted_twice() -> None:
    """One grant without end is enough for all bytes, and nobody is interrupted."""
    purse, calls = Purse(math.inf), []
    pausable_read = tap_of(100, purse)
    async with pausable_read.limit():
        with pausable_read.interruptible(lambda: calls.append(1)):
            for _ in range(10):
                pausable_read.received(10)
                await pausable_read.ready()
    assert (purse.wanted, calls) == ([100], [])


async def test_a_grant_that_is_used_up_interrupts_and_its_debt_is_paid_first() -> None:
    """40 of 100 bytes granted and 55 come: 15 are owed, 45 to come are wanted with them; the end wants nothing."""
    purse, calls = Purse(40, 10, 50), []
    pausable_read = tap_of(100, purse)
    async with pausable_read.limit():
        with pausable_read.interruptible(lambda: calls.append(1)):
            pausable_read.received(30)
            assert calls == []
            pausable_read.received(25)
            assert calls == [1]
            await pausable_read.ready()
            pausable_read.received(45)
            await pausable_read.ready()
        assert calls == [1]
    assert purse.wanted == [100, 60, 50]
    assert pausable_read.credit_bytes == 0


async def test_a_halted_read_rests_until_it_has_a_slot_again_however_long() -> None:
    """The clock that notices stalls does not run meanwhile, and runs again afterwards."""
    purse, calls = Purse(math.inf), []
    pausable_read = tap_of(100, purse)
    with pytest.raises(OriginUnavailableError, match="nothing was received"):
        async with pausable_read.limit():
            with pausable_read.interruptible(lambda: calls.append(1)):
                pausable_read.halt()
                asyncio.get_running_loop().call_later(4 * LIMIT_S, pausable_read.resume)
                await pausable_read.ready()
                calls.append(2)
                await asyncio.Event().wait()
    assert calls == [1, 2]


async def test_waiting_for_leave_is_no_stall_either() -> None:
    """Before the first byte as well as later."""
    purse = Purse()
    pausable_read = tap_of(100, purse)

    def pay() -> None:
        purse.grants.append(100)
        purse.filled.set()

    asyncio.get_running_loop().call_later(4 * LIMIT_S, pay)
    async with pausable_read.limit():
        pausable_read.received(100)
    assert pausable_read.credit_bytes == 0


async def test_who_is_halted_wants_no_leave() -> None:
    """Bytes that others could have are not granted to a read without a slot."""
    purse = Purse(100)
    pausable_read = tap_of(100, purse)
    pausable_read.halt()
    ready = asyncio.create_task(pausable_read.ready())
    await asyncio.sleep(0)
    assert purse.wanted == []
    pausable_read.resume()
    await ready
    assert purse.wanted == [100]
