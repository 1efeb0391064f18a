"""An event loop that has nothing to do, as a measure of what the machine itself does to one."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from shardcache.server.service import LoopLag

_TESTS = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class IdleLoop:
    """One in a process of its own."""

    process: subprocess.Popen[str]

    def lag(self) -> dict[str, float]:
        """Return how late it was, as in the daemon's status, and end it."""
        answer, _ = self.process.communicate("\n")
        lag: dict[str, float] = json.loads(answer)
        return lag


@contextmanager
def idle_loop() -> Iterator[IdleLoop]:
    """Run one until its lag is asked for, or the block is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__], cwd=_TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        yield IdleLoop(process)


async def _idle() -> None:
    lag = LoopLag()
    async with asyncio.TaskGroup() as group:
        measuring = group.create_task(lag.run())
        await asyncio.to_thread(sys.stdin.readline)
        measuring.cancel()
    print(json.dumps(lag.to_json()))


if __name__ == "__main__":
    uvloop.run(_idle())
