"""One read from a store, which may be told to rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from shardcache.fetch.stall import Watch
from shardcache.fetch.stopwatch import Stopwatch


class Coming:
    """Bytes of one download that have come in and are not on disk yet."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[Tap, int]] = {}

    def __repr__(self) -> str:
        return f"Coming({self.size_bytes} bytes of {len(self._parts)} parts)"

    @property
    def size_bytes(self) -> int:
        """Their present number."""
        return sum(tap.received_bytes - before_bytes for tap, before_bytes in self._parts.values())

    def begin(self, part: int, tap: Tap) -> None:
        """Count what a tap gives from now on as bytes of a part, in place of an earlier try's."""
        self._parts[part] = tap, tap.received_bytes

    def end(self, part: int) -> None:
        """Count no more of a part: it is on disk."""
        self._parts.pop(part, None)


class Tap:
    """An `origin.base.Flow` which rests while it has no slot, or no leave for more bytes.

    Args:
        size_bytes: how many bytes are to come.
        grant: waits for leave to read, given the bytes that are wanted, and returns for how many it is.

    Attributes:
        leave_bytes: granted and not used yet; negative where more came.
        received_bytes: that came so far.
        first_byte_s: how long it had worked when the first of them came; None before that.
        worked: how long it has read, times of rest apart.
    """

    def __init__(self, watch: Watch, size_bytes: int, grant: Callable[[float], Awaitable[float]]) -> None:
        self._watch = watch
        self._left_bytes = size_bytes
        self._grant = grant
        self._rest: Callable[[], object] | None = None
        self._has_slot = asyncio.Event()
        self._has_slot.set()
        self.leave_bytes: float = 0
        self.received_bytes = 0
        self.first_byte_s: float | None = None
        self.worked = Stopwatch()

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Read during the block, which begins when the read may.

        Raises OriginUnavailableError when too little comes in for too long, times of rest apart.
        """
        async with self._watch.limit():
            await self.ready()
            self.worked.run()
            try:
                yield
            finally:
                self.worked.stop()

    @property
    def rate_bytes_per_s(self) -> float:
        """Bytes a second of the time that it has worked."""
        return self.received_bytes / self.worked.elapsed_s if self.received_bytes and self.worked.elapsed_s else 0.0

    # slots.Pausable

    def halt(self) -> None:
        """Rest from now on."""
        self._has_slot.clear()
        self._interrupt()

    def resume(self) -> None:
        """Go on."""
        self._has_slot.set()

    # origin.base.Flow

    def received(self, count: int) -> None:
        """Note that so many bytes came in."""
        self._watch.received(count)
        if self.first_byte_s is None:
            self.first_byte_s = self.worked.elapsed_s
        self.received_bytes += count
        self._left_bytes -= count
        self.leave_bytes -= count
        if self._wants_leave:
            self._interrupt()

    async def ready(self) -> None:
        """Return once the next bytes may be read."""
        if self._may_read:
            return
        self.worked.stop()
        with self._watch.suspended():
            while not self._may_read:
                await self._has_slot.wait()
                if self._wants_leave:
                    self.leave_bytes += await self._grant(self._left_bytes - self.leave_bytes)
        self.worked.run()

    @contextmanager
    def interruptible(self, rest: Callable[[], object]) -> Iterator[None]:
        """Have `rest` called whenever, during the block, the read shall stop until it is `ready` again."""
        self._rest = rest
        try:
            yield
        finally:
            self._rest = None

    @property
    def _may_read(self) -> bool:
        return self._has_slot.is_set() and not self._wants_leave

    @property
    def _wants_leave(self) -> bool:
        return self.leave_bytes <= 0 < self._left_bytes

    def _interrupt(self) -> None:
        if self._rest is not None:
            self._rest()
