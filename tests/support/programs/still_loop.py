"""An event loop whose time passes only when a test says so."""

from __future__ import annotations

import asyncio


class StillLoop(asyncio.SelectorEventLoop):
    """Add to `now_s`, and give the tasks their turns."""

    now_s = 0.0

    def time(self) -> float:
        """Return the time."""
        return self.now_s


def pass_time(seconds: float) -> None:
    """Let time pass on the running loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, StillLoop)
    loop.now_s += seconds


async def turns() -> None:
    """Let every task that can run do so."""
    for _ in range(10):
        await asyncio.sleep(0)
