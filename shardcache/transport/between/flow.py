"""Flow of a body's bytes, as a read reports and pauses it."""

import math
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

Commit: TypeAlias = Callable[[], Awaitable[bool]]
"""Called when a whole body has arrived and none of it is written; returns False to drop it."""

Received: TypeAlias = Callable[[int], None]
"""Called with the number of bytes just received, to tell a slow read from a stalled one."""


def nothing(count: int) -> None:
    """Ignore what is received."""


class Flow:
    """Counts a read's bytes, and pauses it; this one never does, see `fetch.reads.PausableRead`.

    A read that pulls its bytes chunk by chunk awaits `ready` before each. One to which bytes are
    pushed is `interruptible`: its callback stops the read until `ready` returns. TCP flow control
    then stops the origin as well, and no byte is lost.

    Args:
        tally: called with each number of bytes received.

    Attributes:
        credit_bytes: byte credit of the read; exceeding it is harmless, but makes a bandwidth limit
            uneven.
        prompt: True if somebody is waiting for the first bytes, so that `written` should be called
            often.
    """

    credit_bytes = math.inf
    prompt = False

    def __init__(self, tally: Received = nothing) -> None:
        self._tally = tally

    def received(self, count: int) -> None:
        """Count received bytes."""
        self._tally(count)

    def written(self, size_bytes: int) -> None:
        """Record the size of the body's beginning that is in the file.

        It is not called for every read, nor at its end.
        """

    async def ready(self) -> None:
        """Return when the next bytes may be read."""

    def interruptible(self, pause: Callable[[], object]) -> AbstractContextManager[None]:
        """Call `pause` during the block whenever the read has to stop until it is `ready`."""
        return nullcontext()
