"""Waking whoever waits for the state of the cache to change."""

from __future__ import annotations

import asyncio


class Signal:
    """`notify` wakes every task that is in `wait`, now; of what was before, only `count` tells.

    Attributes:
        count: how often there was a `notify`.
    """

    def __init__(self) -> None:
        self.count = 0
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Return at the next `notify`."""
        await self._event.wait()

    def notify(self) -> None:
        """Wake all waiters."""
        self.count += 1
        self._event.set()
        self._event = asyncio.Event()
