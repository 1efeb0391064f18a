"""Notification of tasks that wait for the cache's state to change."""

from __future__ import annotations

import asyncio


class Signal:
    """Broadcast event: `notify` wakes the tasks that are in `wait` at that moment; `count` reveals missed ones.

    Attributes:
        count: number of calls of `notify`.
    """

    def __init__(self) -> None:
        self.count = 0
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Wait for the next `notify`."""
        await self._event.wait()

    def notify(self) -> None:
        """Wake all waiters."""
        self.count += 1
        self._event.set()
        self._event = asyncio.Event()
