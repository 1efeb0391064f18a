"""A broadcast event."""

import asyncio
import contextlib


class Signal:
    """Broadcast event: `notify` wakes the tasks that are in `wait` at that moment.

    Its `count` reveals missed ones.
    """

    def __init__(self) -> None:
        self.count = 0  # of calls of `notify`
        self._event = asyncio.Event()

    async def wait(self, limit_s: float | None = None) -> None:
        """Wait for the next `notify`, or `limit_s`, if given."""
        if limit_s is None:
            await self._event.wait()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._event.wait()

    def notify(self) -> None:
        """Wake all waiters."""
        self.count += 1
        self._event.set()
        self._event = asyncio.Event()
