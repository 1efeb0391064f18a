"""A broadcast event, by which tasks wait for the next change of anything in the cache.

After each notification, each task checks its own condition again, and waits for the next
notification if the condition is not met.

Hundreds of callers may wait for ranges of one object. Most changes, such as a part that arrives,
concern only a few of them. So a task may wait as somebody, and be woken by name.
"""

import asyncio
import contextlib
from collections.abc import Hashable, Iterable


class Signal:
    """Broadcast event: `notify` wakes the tasks that wait at that moment.

    Attributes:
        count: number of notifications so far. A task that remembers this number can find out later
            whether there was one while the task did something else.
        next: the event that the next notification sets.
    """

    def __init__(self) -> None:
        self.count = 0
        self.next = asyncio.Event()
        # Tasks that wait as somebody: a future for each, by who waits.
        self._named: dict[Hashable, asyncio.Future[None]] = {}

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the next notification, but at most for `timeout_s`; None for no timeout."""
        if timeout_s is None:
            await self.next.wait()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.next.wait()

    async def wait_with(self, other: "Signal", timeout_s: float) -> None:
        """Wait for the next notification of either signal, but at most for `timeout_s`."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self.next, other.next)]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()  # a task that waits for an event ends at once, without an error

    async def wait_as(self, waiter: Hashable) -> None:
        """Wait until `notify` is called, or `wake` with this waiter; `notify_unnamed` is ignored.

        Args:
            waiter: who waits; only one task may wait as the same waiter.
        """
        future = asyncio.get_running_loop().create_future()
        self._named[waiter] = future
        try:
            await future
        finally:
            if self._named.get(waiter) is future:  # the task was cancelled
                del self._named[waiter]

    def notify(self) -> None:
        """Wake all tasks that wait."""
        self.notify_unnamed()
        self.wake(list(self._named))

    def notify_unnamed(self) -> None:
        """Wake the tasks that wait, except those that wait as somebody."""
        self.count += 1
        self.next.set()
        self.next = asyncio.Event()

    def wake(self, waiters: Iterable[Hashable]) -> None:
        """Wake the tasks that wait as these waiters, of which some may not wait."""
        for waiter in waiters:
            future = self._named.pop(waiter, None)
            if future is not None and not future.done():
                future.set_result(None)
