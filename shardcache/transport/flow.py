"""Backpressure between a read and its scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeAlias

Received: TypeAlias = Callable[[int], None]
"""Called with the number of bytes just received, to tell a slow read from a stalled one."""


class Flow(Protocol):
    """Counts a read's bytes, and pauses it.

    Attributes:
        credit_bytes: byte credit of the read; exceeding it is harmless, but makes a bandwidth limit uneven.
        prompt: True if somebody is waiting for the first bytes, so that `written` should be called often.

    A read that pulls its bytes chunk by chunk awaits `ready` before each. One to which bytes are pushed is
    `interruptible`: its callback stops the read until `ready` returns. TCP flow control then stops the origin as well,
    and no byte is lost.
    """

    @property
    def credit_bytes(self) -> float: ...  # noqa: D102

    @property
    def prompt(self) -> bool: ...  # noqa: D102

    def received(self, count: int) -> None:
        """Count received bytes."""

    def written(self, size_bytes: int) -> None:
        """Record the size of the body's beginning that is in the file; not called for every read, nor at its end."""

    async def ready(self) -> None:
        """Return when the next bytes may be read."""

    def interruptible(self, pause: Callable[[], object]) -> AbstractContextManager[None]:
        """Call `pause` whenever, during the block, the read has to stop until it is `ready` again."""


def nothing(count: int) -> None:
    """Ignore what is received."""


class Free:
    """A flow without limits."""

    credit_bytes = math.inf
    prompt = False

    def __init__(self, received: Received = nothing) -> None:
        self.received = received

    def written(self, size_bytes: int) -> None:
        """As `Flow.written`: ignored."""

    async def ready(self) -> None:
        """As `Flow.ready`: immediately."""

    def interruptible(self, pause: Callable[[], object]) -> AbstractContextManager[None]:
        """As `Flow.interruptible`: never interrupted."""
        return nullcontext()
