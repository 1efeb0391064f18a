"""Pausable read from an origin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from shardcache.fetch.parts.stall_timeout import StallTimeout
from shardcache.fetch.parts.stopwatch import Stopwatch


class Coming:
    """Bytes of one download that belong to unfinished parts.

    Args:
        written: called when more of them are in the file.
    """

    def __init__(self, written: Callable[[], object] = lambda: None) -> None:
        self._written = written
        self._parts: dict[int, tuple[PausableRead, int]] = {}

    def __repr__(self) -> str:
        return f"Coming({self.size_bytes} bytes of {len(self._parts)} parts)"

    @property
    def size_bytes(self) -> int:
        """Number of such bytes received so far."""
        return sum(pausable_read.received_bytes - before_bytes for pausable_read, before_bytes in self._parts.values())

    def begin(self, part: int, pausable_read: PausableRead) -> None:
        """Count a read's bytes from now on as those of a part, in place of an earlier attempt's."""
        self._parts[part] = pausable_read, pausable_read.received_bytes
        pausable_read.when_written = self._written

    def written_bytes(self, part: int) -> int:
        """Return the size of a part's beginning that is in the file already; 0 once it is finished."""
        return self._parts[part][0].written_bytes if part in self._parts else 0

    def end(self, part: int) -> None:
        """Stop counting a part: it is on disk."""
        self._parts.pop(part, None)


class PausableRead:
    """A `transport.flow.Flow` that pauses while it has no slot or no byte credit.

    Args:
        size_bytes: number of bytes to read.
        grant: waits for byte credit and returns it, given the number of bytes wanted.
        prompt: as `Flow.prompt`.

    Attributes:
        leave_bytes: unused byte credit; negative after bytes without credit.
        received_bytes: bytes received so far.
        written_bytes: size of the body's beginning that is in the file, as far as known.
        when_written: called when that grows.
        first_byte_s: reading time before the first byte; None until it arrives.
        worked: reading time, pauses excluded.
    """

    def __init__(
        self,
        stall_timeout: StallTimeout,
        size_bytes: int,
        grant: Callable[[float], Awaitable[float]],
        *,
        prompt: bool = False,
    ) -> None:
        self._stall_timeout = stall_timeout
        self._left_bytes = size_bytes
        self._grant = grant
        self._rest: Callable[[], object] | None = None
        self._has_slot = asyncio.Event()
        self._has_slot.set()
        self.leave_bytes: float = 0
        self.prompt = prompt
        self.received_bytes = self.written_bytes = 0
        self.when_written: Callable[[], object] = lambda: None
        self.first_byte_s: float | None = None
        self.worked = Stopwatch()

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Time the read during the block, which begins once reading is allowed.

        Raises OriginUnavailableError when too little arrives for too long, pauses excluded.
        """
        async with self._stall_timeout.limit():
            await self.ready()
            self.worked.run()
            try:
                yield
            finally:
                self.worked.stop()

    @property
    def rate_bytes_per_s(self) -> float:
        """Bytes per second of reading time."""
        return self.received_bytes / self.worked.elapsed_s if self.received_bytes and self.worked.elapsed_s else 0.0

    def heard(self) -> None:
        """Restart the stall time-out: the peer lives, and has nothing to send yet."""
        if self._may_read:
            self._stall_timeout.restart()

    # slots.Pausable

    def halt(self) -> None:
        """Pause."""
        self._has_slot.clear()
        self._interrupt()

    def resume(self) -> None:
        """Continue after `halt`."""
        self._has_slot.set()

    # transport.flow.Flow

    def received(self, count: int) -> None:
        """Count received bytes."""
        self._stall_timeout.received(count)
        if self.first_byte_s is None:
            self.first_byte_s = self.worked.elapsed_s
        self.received_bytes += count
        self._left_bytes -= count
        self.leave_bytes -= count
        if self._wants_leave:
            self._interrupt()

    def written(self, size_bytes: int) -> None:
        """As `Flow.written`."""
        self.written_bytes = size_bytes
        self.when_written()

    async def ready(self) -> None:
        """Return once the next bytes may be read."""
        if self._may_read:
            return
        self.worked.stop()
        with self._stall_timeout.suspended():
            while not self._may_read:
                await self._has_slot.wait()
                if self._wants_leave:
                    self.leave_bytes += await self._grant(self._left_bytes - self.leave_bytes)
        self.worked.run()

    @contextmanager
    def interruptible(self, rest: Callable[[], object]) -> Iterator[None]:
        """Call `rest` whenever, during the block, the read has to stop until it is `ready` again."""
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
