"""Turns on the event loop: long computations run one short piece at a time."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

# A turn ends after this time or number of items. A request passes through the loop about ten times
# until it is answered, and may meet a turn each time.
_TURN_S = 0.001
_MAX_ITEMS = 256
_PIECE = 32  # items between two looks at the clock


class Turns:
    """Turns on the event loop, in the order of request.

    Yielding between pieces is not enough: if 64 readers join at the same moment, each would run a
    piece before the loop gets to anything else.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def take(self, items: Sequence[T], act: Callable[[Sequence[T]], object]) -> None:
        """Call `act` with the items, piece by piece. Raises as `act` does."""
        at = 0
        while at < len(items):
            async with self._lock:
                stop = min(at + _MAX_ITEMS, len(items))
                until_s = time.perf_counter() + _TURN_S
                while at < stop:
                    act(items[at : at + _PIECE])
                    at += _PIECE
                    if time.perf_counter() > until_s:
                        break
                await asyncio.sleep(0)

    async def wait(self) -> None:
        """Wait for the caller's turn, which lasts until it next awaits."""
        async with self._lock:
            await asyncio.sleep(0)
