"""Fair sharing of the event loop: long computations run one short piece at a time, across all of them.

Yielding between pieces is not enough: if 64 readers join at the same moment, each would run a piece before the loop
gets to anything else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

# Items per piece: a few milliseconds of typical work per shard of a plan or manifest.
_PIECE = 256


class Turns:
    """Turns on the event loop, in the order of request."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def take(self, items: Sequence[T], act: Callable[[Sequence[T]], object]) -> None:
        """Call `act` with the items, piece by piece. Raises as `act` does."""
        for first in range(0, len(items), _PIECE):
            async with self._lock:
                act(items[first : first + _PIECE])
                await asyncio.sleep(0)

    async def wait(self) -> None:
        """Wait for the caller's turn, which lasts until it next awaits."""
        async with self._lock:
            await asyncio.sleep(0)
