"""Connections shared by urgency."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from shardcache.fetch.limits import Slots


async def turns() -> None:
    """Let every task that can run do so."""
    for _ in range(10):
        await asyncio.sleep(0)


class Users:
    """Tasks that hold a slot until they are told to let go."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.order: list[str] = []
        self._let_go: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, name: str, priority: Callable[[], int]) -> None:
        """Let a task ask for a slot."""
        self._let_go[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._use(name, priority))
        await turns()

    async def _use(self, name: str, priority: Callable[[], int]) -> None:
        async with self.slots.slot(priority):
            self.order.append(name)
            await self._let_go[name].wait()

    async def finish(self, name: str) -> None:
        """Let a task give its slot back."""
        self._let_go[name].set()
        await turns()

    async def cancel(self, name: str) -> None:
        """Cancel a task, wherever it is."""
        self._tasks[name].cancel()
        with pytest.raises(asyncio.CancelledError):
            await self._tasks[name]
        await turns()


async def test_no_more_than_the_limit_hold_a_slot() -> None:
    """The third of two waits for one to end."""
    users = Users(Slots(2))
    for name in "abc":
        await users.start(name, lambda: 1)
    assert users.order == ["a", "b"]
    await users.finish("b")
    assert users.order == ["a", "b", "c"]
    await users.finish("a")
    await users.finish("c")


async def test_the_urgent_overtake_and_equals_keep_their_order() -> None:
    """Lowest priority number first, first come first served within."""
    users = Users(Slots(1))
    urgency = {"held": 0, "warm": 2, "plan1": 1, "plan2": 1, "waiting": 0}
    for name in urgency:
        await users.start(name, partial(urgency.__getitem__, name))
    for name in ("held", "waiting", "plan1", "plan2", "warm"):
        await users.finish(name)
    assert users.order == ["held", "waiting", "plan1", "plan2", "warm"]


async def test_priority_is_asked_for_when_a_slot_becomes_free() -> None:
    """Whoever became urgent while queueing goes first."""
    users, urgency = Users(Slots(1)), {"a": 1, "b": 1}
    await users.start("held", lambda: 0)
    await users.start("a", lambda: urgency["a"])
    await users.start("b", lambda: urgency["b"])
    urgency["b"] = 0
    for name in ("held", "b", "a"):
        await users.finish(name)
    assert users.order == ["held", "b", "a"]


async def test_a_cancelled_waiter_costs_no_slot() -> None:
    """Cancelled in the queue, or in the very moment it was given the slot, it leaves the slot to the next."""
    users = Users(Slots(1))
    await users.start("held", lambda: 0)
    await users.start("queued", lambda: 0)
    await users.start("granted", lambda: 0)
    await users.start("next", lambda: 0)
    await users.cancel("queued")
    users._let_go["held"].set()
    await asyncio.sleep(0)  # "held" lets go and "granted" has its turn, but did not run yet
    await users.cancel("granted")
    assert users.order == ["held", "next"]
    await users.finish("next")
    async with asyncio.timeout(5), users.slots.slot(lambda: 0):
        pass
