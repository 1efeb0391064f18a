"""Flow of a body's bytes: the interface by which a read is counted, paused and limited.

The caller that fetches a body passes a `Flow` to the origin, and the transport reports the body's
bytes to it. Byte credit is the number of bytes that a read may take before it has to wait for more
credit.
"""

import math
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

Commit: TypeAlias = Callable[[], Awaitable[bool]]
"""Called when a whole body has arrived in memory; returns True to write it, False to drop it."""

Received: TypeAlias = Callable[[int], None]
"""Called with the number of bytes just received, so that a slow read does not count as stalled."""


def nothing(count: int) -> None:
    """Ignore the number of received bytes."""


class Flow:
    """Counts a read's bytes, and may pause the read.

    This class only counts; its subclass `fetch.reads.PausableRead` also pauses. A read that pulls
    its bytes chunk by chunk awaits `ready` before each chunk. A read to which bytes are pushed
    passes a callback to `interruptible`. The flow calls it to stop the read, which continues once
    `ready` returns. While the read is stopped, TCP flow control stops the origin as well, so no
    byte is lost.

    Args:
        tally: called with each number of bytes received.

    Attributes:
        credit_bytes: byte credit of the read, infinite for no limit. A read that exceeds its credit
            does no harm, but makes a bandwidth limit uneven.
        prompt: True if a reader is waiting for the first bytes, so that `received` should be called
            as soon as they arrive, and `written` often.
    """

    credit_bytes = math.inf
    prompt = False

    def __init__(self, tally: Received = nothing) -> None:
        self._tally = tally

    def received(self, count: int, first_arrival_s: float | None = None) -> None:
        """Count received bytes.

        Args:
            count: number of bytes.
            first_arrival_s: when the first byte of the body arrived, by the monotonic clock; None
                if it may count as arriving now.
        """
        self._tally(count)

    def written(self, size_bytes: int) -> None:
        """Record how many bytes of the body, from its beginning, are in the file.

        It is not called for every read, and not at the end of a read.
        """

    async def ready(self) -> None:
        """Return when the next bytes may be read."""

    def interruptible(self, pause: Callable[[], object]) -> AbstractContextManager[None]:
        """Return a context during which `pause` is called whenever the read has to stop."""
        return nullcontext()
