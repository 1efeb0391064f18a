"""Long computations take turns on the event loop: one short piece at a time, whoever they are for.

Yielding between pieces is not enough: sixty-four readers that join at the same moment would do a piece each before the
loop comes to anything else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

# Some milliseconds of what is done to a shard of a plan or a manifest.
_PIECE = 256


class Turns:
    """Whose turn it is, in the order in which they asked."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def take(self, items: Sequence[T], act: Callable[[Sequence[T]], object]) -> None:
        """Call `act` with one piece of the items after the other. Raises what it raises."""
        for first in range(0, len(items), _PIECE):
            async with self._lock:
                act(items[first : first + _PIECE])
                await asyncio.sleep(0)

    async def wait(self) -> None:
        """Return when it is the caller's turn to do one thing, before it waits for anything again."""
        async with self._lock:
            await asyncio.sleep(0)
