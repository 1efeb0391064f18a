"""Connections that all downloads of a node share; who needs one most goes first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Waiter:
    priority: Callable[[], int]
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Slots:
    """A semaphore with priorities that may change while one waits.

    Whoever waits is asked for its priority at the moment a slot becomes free: the lowest number goes first, and
    among equals whoever has waited longest.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiters: list[_Waiter] = []  # in order of arrival

    def __repr__(self) -> str:
        return f"<Slots {self._free} free, {len(self._waiters)} waiting>"

    @asynccontextmanager
    async def slot(self, priority: Callable[[], int]) -> AsyncIterator[None]:
        """Hold one slot for the block."""
        await self._acquire(priority)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, priority: Callable[[], int]) -> None:
        # Nobody waits while a slot is free, so a free one is never taken from somebody more urgent.
        if self._free:
            self._free -= 1
            return
        waiter = _Waiter(priority)
        self._waiters.append(waiter)
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.cancelled():
                self._waiters.remove(waiter)
            else:  # it was given a slot and cancelled in the same turn of the loop
                self._release()
            raise

    def _release(self) -> None:
        waiting = [waiter for waiter in self._waiters if not waiter.turn.done()]
        if not waiting:
            self._free += 1
            return
        waiter = min(waiting, key=lambda waiter: waiter.priority())
        self._waiters.remove(waiter)
        waiter.turn.set_result(None)
