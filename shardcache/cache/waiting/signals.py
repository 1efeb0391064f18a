"""A broadcast event, by which tasks wait for the next change of anything in the cache.

After each notification, each task checks its own condition again, and waits for the next
notification if the condition is not met.
"""

import asyncio
import contextlib


class Signal:
    """Broadcast event: `notify` wakes the tasks that are in `wait` at that moment.

    Attributes:
        count: number of calls of `notify` so far. A task that remembers this number can find out
            later whether `notify` was called while the task did something else.
        next: the event that the next call of `notify` sets.
    """

    def __init__(self) -> None:
        self.count = 0
        self.next = asyncio.Event()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the next `notify`, but at most for `timeout_s`; None for no timeout."""
        if timeout_s is None:
            await self.next.wait()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.next.wait()

    async def wait_with(self, other: "Signal", timeout_s: float) -> None:
        """Wait for the next `notify` of either signal, but at most for `timeout_s`."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self.next, other.next)]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()  # a task that waits for an event ends at once, without an error

    def notify(self) -> None:
        """Wake all waiters."""
        self.count += 1
        self.next.set()
        self.next = asyncio.Event()
