"""Waking whoever waits for the state of the cache to change."""

from __future__ import annotations

import asyncio


class Signal:
    """`notify` wakes every task that is in `wait`, now; it remembers nothing."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Return at the next `notify`."""
        await self._event.wait()

    def notify(self) -> None:
        """Wake all waiters."""
        self._event.set()
        self._event = asyncio.Event()
