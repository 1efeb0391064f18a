"""A change wakes the tasks that it concerns: all of them, the unnamed ones, or some by name."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from shardcache.cache.waiting.signals import Signal

UNNAMED = "unnamed"
ONE = "one"
OTHER = "other"
_TURNS = 5  # of the event loop: more than a task needs that is woken


async def woken(*calls: Callable[[Signal], object]) -> set[str]:
    """Return who is awake after some calls: of three tasks, two wait as somebody."""
    signal = Signal()
    awake: set[str] = set()

    async def wait(name: str, waiting: Awaitable[None]) -> None:
        await waiting
        awake.add(name)

    waits: list[Coroutine[Any, Any, None]] = [
        wait(UNNAMED, signal.wait()),
        wait(ONE, signal.wait_as(ONE)),
        wait(OTHER, signal.wait_as(OTHER)),
    ]
    tasks = [asyncio.create_task(each) for each in waits]
    await asyncio.sleep(0)  # now they wait
    for call in calls:
        call(signal)
    for _ in range(_TURNS):
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    return awake


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (Signal.notify, {UNNAMED, ONE, OTHER}),
        (Signal.notify_unnamed, {UNNAMED}),
        (lambda signal: signal.wake([ONE]), {ONE}),
        (lambda signal: signal.wake(["nobody", OTHER]), {OTHER}),
        (lambda signal: signal.wake([]), set()),
    ],
    ids=["all", "the unnamed", "one by name", "one who waits and one who does not", "nobody"],
)
async def test_who_is_woken(call: Callable[[Signal], object], expected: set[str]) -> None:
    assert await woken(call) == expected


async def test_waking_again_changes_nothing() -> None:
    """Several changes may come before the woken task runs."""
    assert await woken(lambda signal: signal.wake([ONE]), Signal.notify_unnamed) == {ONE, UNNAMED}
    assert await woken(Signal.notify, lambda signal: signal.wake([ONE])) == {UNNAMED, ONE, OTHER}


async def test_only_notifications_are_counted() -> None:
    """A task that compares the count looks again at what it may have missed."""
    signal = Signal()
    signal.wake([ONE])
    assert signal.count == 0
    signal.notify_unnamed()
    assert signal.count == 1
    signal.notify()
    assert signal.count == 2


async def test_a_cancelled_task_is_forgotten() -> None:
    """The same waiter can wait again, and is woken then."""
    signal = Signal()
    first = asyncio.create_task(signal.wait_as(ONE))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    again = asyncio.create_task(signal.wait_as(ONE))
    await asyncio.sleep(0)
    signal.wake([ONE])
    await asyncio.wait_for(again, timeout=1.0)
