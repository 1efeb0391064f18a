"""Stopwatch for working time, pauses excluded."""

from __future__ import annotations

import asyncio


class Stopwatch:
    """Stopwatch, initially stopped; belongs to the running event loop."""

    def __init__(self) -> None:
        self._counted_s = 0.0
        self._running_since_s: float | None = None
        self._runs = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Stopwatch {self.elapsed_s:.3f} s, {'running' if self._runs.is_set() else 'stopped'}>"

    @property
    def elapsed_s(self) -> float:
        """Total running time."""
        since_s = self._running_since_s
        return self._counted_s + (0.0 if since_s is None else _now_s() - since_s)

    def run(self) -> None:
        """Start, or continue after `stop`."""
        if self._running_since_s is None:
            self._running_since_s = _now_s()
            self._runs.set()

    def stop(self) -> None:
        """Stop."""
        self._counted_s, self._running_since_s = self.elapsed_s, None
        self._runs.clear()

    async def reaches(self, limit_s: float) -> None:
        """Wait until the running time reaches `limit_s`."""
        while (left_s := limit_s - self.elapsed_s) > 0:
            await self._runs.wait()
            await asyncio.sleep(left_s)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
