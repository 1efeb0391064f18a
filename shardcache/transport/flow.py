"""Backpressure between a read and its scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeAlias

Received: TypeAlias = Callable[[int], None]
"""Called with the number of bytes that have just come in, so that a slow read can be told from a stalled one."""


class Flow(Protocol):
    """Reports a read's bytes, and pauses it.

    Attributes:
        leave_bytes: byte credit of the read; exceeding it is harmless, but makes a bandwidth limit uneven.

    A read that takes its bytes chunk by chunk awaits `ready` before each. One whose bytes come by themselves is
    `interruptible`: its callback stops the read until `ready` returns. The store then stops as well (TCP's flow
    control), and no byte is lost.
    """

    @property
    def leave_bytes(self) -> float: ...  # noqa: D102

    def received(self, count: int) -> None:
        """Count bytes that came in."""

    async def ready(self) -> None:
        """Return once the next bytes may be read."""

    def interruptible(self, rest: Callable[[], object]) -> AbstractContextManager[None]:
        """Call `rest` whenever, during the block, the read has to stop until it is `ready` again."""


def nothing(count: int) -> None:
    """Ignore what is received."""


class Free:
    """A flow without limits."""

    leave_bytes = math.inf

    def __init__(self, received: Received = nothing) -> None:
        self.received = received

    async def ready(self) -> None:
        """As `Flow.ready`: immediately."""

    def interruptible(self, rest: Callable[[], object]) -> AbstractContextManager[None]:
        """As `Flow.interruptible`: never interrupted."""
        return nullcontext()
