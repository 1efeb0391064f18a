"""Turns on the event loop: long computations run one short piece at a time."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

# A turn ends after this time or number of items. It is short, as a request passes through the loop
# about ten times until it is answered, and may wait for a turn each time.
_TURN_S = 0.001
_MAX_ITEMS = 256
_PIECE = 32  # number of items after which the clock is read


class Turns:
    """Turns on the event loop, in the order of request.

    Yielding between pieces is not enough: if 64 readers join at the same moment, each would run a
    piece before the loop gets to anything else.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def take(self, items: Sequence[T], act: Callable[[Sequence[T]], object]) -> None:
        """Call `act` with the items, piece by piece. Raises as `act` does."""
        done = 0
        while done < len(items):
            async with self._lock:
                max_done = min(done + _MAX_ITEMS, len(items))
                until_s = time.perf_counter() + _TURN_S
                while done < max_done:
                    act(items[done : done + _PIECE])
                    done += _PIECE
                    if time.perf_counter() > until_s:
                        break
                await asyncio.sleep(0)

    async def wait(self) -> None:
        """Wait for the caller's turn, which lasts until the caller's next await."""
        async with self._lock:
            await asyncio.sleep(0)
