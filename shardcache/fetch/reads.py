"""Read of a body: paused while it has no slot or byte credit, timed without its pauses, given up when it stalls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from shardcache.errors import OriginUnavailableError
from shardcache.transport.flow import Received

MIN_BYTES_PER_S = 1024
"""Minimum rate: a slower connection is given up, whether the network is failing or the peer stalls on purpose."""

# Fraction of the limit by which a request may time out late, so that not every byte reschedules the timer.
_SLACK = 0.1


class StalledError(OriginUnavailableError):
    """Too little of an answer arrived for too long."""


class StallTimeout:
    """Stall timeout of a request: no limit on its duration, as long as enough of the answer keeps arriving.

    Args:
        limit_s: time within which enough must arrive.
        tally: called with every count received.
        min_bytes_per_s: minimum rate; by default anything is enough.
    """

    def __init__(self, limit_s: float, url: str, tally: Received, min_bytes_per_s: int = 0) -> None:
        self._limit_s = limit_s
        self._url = url
        self._tally = tally
        self._enough_bytes = max(1, int(limit_s * min_bytes_per_s))
        self._received_bytes = 0  # since the timer was last restarted
        self._restarts_from_s = 0.0
        self._limit: asyncio.Timeout | None = None

    def received(self, count: int) -> None:
        """Count what was received, and restart the timer when it is enough."""
        self._tally(count)
        self._received_bytes += count
        if self._received_bytes >= self._enough_bytes:
            self.restart()

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Run the timer during the block. Raises StalledError when too little arrived for too long."""
        try:
            async with asyncio.timeout(self._limit_s) as self._limit:
                yield
        except TimeoutError:
            # Origins translate their own timeouts, so this one is the timer's.
            amount = f"only {self._received_bytes} bytes were" if self._received_bytes else "nothing was"
            raise StalledError(f"{amount} received for {self._limit_s:g} s", url=self._url) from None
        finally:
            self._limit = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Stop the timer during the block, in which nothing is read."""
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(None)
            self._restarts_from_s = 0.0
        try:
            yield
        finally:
            self.restart()

    def restart(self) -> None:
        """Restart the timer."""
        self._received_bytes = 0
        now_s = _now_s()
        if self._limit is None or self._limit.expired() or now_s < self._restarts_from_s:
            return
        self._restarts_from_s = now_s + _SLACK * self._limit_s
        self._limit.reschedule(now_s + (1 + _SLACK) * self._limit_s)


class Stopwatch:
    """Stopwatch, initially stopped; belongs to the running event loop."""

    def __init__(self) -> None:
        self._counted_s = 0.0
        self._running_since_s: float | None = None
        self._runs = asyncio.Event()

    @property
    def elapsed_s(self) -> float:
        """Total running time."""
        since_s = self._running_since_s
        return self._counted_s + (0.0 if since_s is None else _now_s() - since_s)

    def run(self) -> None:
        """Start, or continue after `stop`."""
        if self._running_since_s is None:
            self._running_since_s = _now_s()
            self._runs.set()

    def stop(self) -> None:
        """Stop."""
        self._counted_s, self._running_since_s = self.elapsed_s, None
        self._runs.clear()

    async def reaches(self, limit_s: float) -> None:
        """Wait until the running time reaches `limit_s`."""
        while (left_s := limit_s - self.elapsed_s) > 0:
            await self._runs.wait()
            await asyncio.sleep(left_s)


class PausableRead:
    """A `transport.flow.Flow` that pauses while it has no slot or no byte credit.

    Args:
        size_bytes: number of bytes to read.
        grant: waits for byte credit and returns it, given the number of bytes wanted.
        prompt: as `Flow.prompt`.

    Attributes:
        credit_bytes: unused byte credit; negative after bytes without credit.
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
        self._pause: Callable[[], object] | None = None
        self._has_slot = asyncio.Event()
        self._has_slot.set()
        self.credit_bytes: float = 0
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

    # priority.Pausable

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
        self.credit_bytes -= count
        if self._wants_credit:
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
                if self._wants_credit:
                    self.credit_bytes += await self._grant(self._left_bytes - self.credit_bytes)
        self.worked.run()

    @contextmanager
    def interruptible(self, pause: Callable[[], object]) -> Iterator[None]:
        """As `Flow.interruptible`."""
        self._pause = pause
        try:
            yield
        finally:
            self._pause = None

    @property
    def _may_read(self) -> bool:
        return self._has_slot.is_set() and not self._wants_credit

    @property
    def _wants_credit(self) -> bool:
        return self.credit_bytes <= 0 < self._left_bytes

    def _interrupt(self) -> None:
        if self._pause is not None:
            self._pause()


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
        return sum(read.received_bytes - before_bytes for read, before_bytes in self._parts.values())

    def begin(self, part: int, read: PausableRead) -> None:
        """Count a read's bytes from now on as those of a part, in place of an earlier attempt's."""
        self._parts[part] = read, read.received_bytes
        read.when_written = self._written

    def written_bytes(self, part: int) -> int:
        """Return the size of a part's beginning that is in the file already; 0 once it is finished."""
        return self._parts[part][0].written_bytes if part in self._parts else 0

    def end(self, part: int) -> None:
        """Stop counting a part: it is on disk."""
        self._parts.pop(part, None)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
