"""Turns on the event loop: long computations run one short piece at a time.

A turn is one short piece of one computation, such as declaring a plan of a million shards. Only one
computation has a turn at a time, so other tasks run between the turns.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

# A turn ends after this time, or after this number of items. Turns are short because a request
# passes through the event loop about ten times until it is answered, and may wait for a turn each
# time.
_TURN_S = 0.001
_MAX_ITEMS = 256
_PIECE = 32  # number of items after which the clock is read, as reading it takes time, too


class Turns:
    """Turns on the event loop, which tasks get in the order in which they ask for them.

    It would not be enough that each computation yields to the event loop between its pieces. If 64
    readers joined at the same moment, each of the 64 computations would run a piece before the
    event loop ran any other task.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def take(self, items: Sequence[T], act: Callable[[Sequence[T]], object]) -> None:
        """Call `act` with the items, piece by piece. Raises as `act` does.

        Args:
            items: the items.
            act: called with each piece, which is at most `_PIECE` successive items.
        """
        done = 0
        while done < len(items):
            async with self._lock:
                stop = min(done + _MAX_ITEMS, len(items))
                until_s = time.perf_counter() + _TURN_S
                while done < stop:
                    act(items[done : done + _PIECE])
                    done += _PIECE
                    if time.perf_counter() > until_s:
                        break
                # The lock is still held here, so that other tasks run before anybody's next turn.
                await asyncio.sleep(0)

    async def wait(self) -> None:
        """Wait for the caller's turn, which begins with the return and ends at the next await."""
        # No task runs between the release of the lock and the return, so the turn follows the lock.
        async with self._lock:
            await asyncio.sleep(0)
