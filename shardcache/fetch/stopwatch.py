"""Time by the event loop's clock, and a stopwatch that can be paused.

A read uses a stopwatch for its reading time, which does not run while the read is paused.
"""

import asyncio


def now_s() -> float:
    """Return the time by the event loop's clock."""
    return asyncio.get_running_loop().time()


class Stopwatch:
    """Stopwatch, initially stopped; belongs to the running event loop."""

    def __init__(self) -> None:
        self._counted_s = 0.0  # total time of the runs that have ended
        self._running_since_s: float | None = None  # None while it is stopped
        self._runs = asyncio.Event()

    @property
    def elapsed_s(self) -> float:
        """Total running time."""
        if self._running_since_s is None:
            return self._counted_s
        return self._counted_s + now_s() - self._running_since_s

    def run(self) -> None:
        """Start, or continue after `stop`."""
        if self._running_since_s is None:
            self._running_since_s = now_s()
            self._runs.set()

    def stop(self) -> None:
        """Stop."""
        self._counted_s = self.elapsed_s
        self._running_since_s = None
        self._runs.clear()

    async def reaches(self, limit_s: float) -> None:
        """Wait until the running time reaches `limit_s`."""
        # The loop is needed because the stopwatch may be paused during the sleep.
        while True:
            left_s = limit_s - self.elapsed_s
            if left_s <= 0:
                return
            await self._runs.wait()
            await asyncio.sleep(left_s)
