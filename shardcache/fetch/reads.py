"""Reads of bodies: paused without a slot or byte credit, timed, given up when they stall."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeAlias

from shardcache.errors import OriginUnavailableError
from shardcache.fetch.stopwatch import Stopwatch, now_s
from shardcache.transport.between.flow import Flow, Received, nothing

Grant: TypeAlias = Callable[[float], Awaitable[float]]
"""Waits for byte credit and returns it, given the number of bytes wanted."""

MIN_BYTES_PER_S = 1024
"""Minimum rate: a slower connection is given up.

The network may be failing, or the peer stalls on purpose.
"""

# Share of the stall time-out by which a request may time out late, so that not every byte
# reschedules the timer.
_SLACK = 0.1


def _no_callback() -> None:
    """Stand in for a callback that nobody has given."""


async def _unlimited(wanted_bytes: float) -> float:
    return math.inf


class StalledError(OriginUnavailableError):
    """Too little of an answer arrived for too long."""


class PausableRead(Flow):
    """A read that pauses while it has no slot or no byte credit, and fails when it stalls.

    There is no limit on its duration, as long as enough keeps arriving while it does not pause.

    Args:
        stall_timeout_s: time within which enough must arrive: `MIN_BYTES_PER_S`, or anything if
            the size is unknown.
        tally: called with each number of bytes received.
        size_bytes: number of bytes to read; 0 if unknown.
        grant: waits for byte credit and returns it, given the number of bytes wanted.
        prompt: as `Flow.prompt`.

    Attributes:
        credit_bytes: unused byte credit; negative after bytes without credit.
        received_bytes: number of bytes received so far.
        written_bytes: size of the body's beginning that is in the file, as far as known.
        when_written: called when that grows.
        first_byte_s: reading time before the first byte; None until it arrives.
        last_byte_s: reading time before the last byte.
        reading_time: runs while bytes may be read, not during pauses.
    """

    def __init__(
        self,
        url: str,
        stall_timeout_s: float,
        tally: Received = nothing,
        size_bytes: int = 0,
        grant: Grant = _unlimited,
        *,
        prompt: bool = False,
    ) -> None:
        super().__init__(tally)
        self._url = url
        self._stall_timeout_s = stall_timeout_s
        self._left_bytes = size_bytes
        self._grant = grant
        self.prompt = prompt
        self._enough_bytes = 1
        if size_bytes:
            self._enough_bytes = max(1, int(stall_timeout_s * MIN_BYTES_PER_S))
        self._lately_bytes = 0  # received since the timer was last restarted
        self._restarts_from_s = 0.0  # time from which the timer may be restarted again
        self._limit: asyncio.Timeout | None = None  # the stall time-out's timer, during `limit`
        self._pause: Callable[[], object] = _no_callback
        self._has_slot = asyncio.Event()
        self._has_slot.set()
        self.credit_bytes = 0.0
        self.received_bytes = 0
        self.written_bytes = 0
        self.when_written: Callable[[], object] = _no_callback
        self.first_byte_s: float | None = None
        self.last_byte_s = -math.inf
        self.reading_time = Stopwatch()

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Time the read during the block, which begins once reading is allowed.

        Raises StalledError when too little arrives for too long, pauses excluded.
        """
        try:
            async with asyncio.timeout(self._stall_timeout_s) as self._limit:
                await self.ready()
                self.reading_time.run()
                try:
                    yield
                finally:
                    self.reading_time.stop()
        except TimeoutError:
            # Origins translate their own timeouts, so this one is the timer's.
            raise self._stall_error() from None
        finally:
            self._limit = None

    def _stall_error(self) -> StalledError:
        amount = "nothing was"
        if self._lately_bytes:
            amount = f"only {self._lately_bytes} bytes were"
        message = f"{amount} received for {self._stall_timeout_s:g} s"
        return StalledError(message, url=self._url)

    @property
    def rate_bytes_per_s(self) -> float:
        """Bytes per second of reading time."""
        elapsed_s = self.reading_time.elapsed_s
        if not self.received_bytes or not elapsed_s:
            return 0.0
        return self.received_bytes / elapsed_s

    def heard(self) -> None:
        """Restart the stall time-out: the peer lives, and has nothing to send yet."""
        if self._may_read:
            self._restart()

    # Methods of `slot_claims.Pausable`: called by the scheduler

    def halt(self) -> None:
        """Pause."""
        self._has_slot.clear()
        self._pause()

    def resume(self) -> None:
        """Continue after `halt`."""
        self._has_slot.set()

    # Methods of `Flow`: called by the transport

    def received(self, count: int) -> None:
        """Count received bytes, and restart the timer when they are enough."""
        self._tally(count)

        self._lately_bytes += count
        if self._lately_bytes >= self._enough_bytes:
            self._restart()

        self.last_byte_s = self.reading_time.elapsed_s
        if self.first_byte_s is None:
            self.first_byte_s = self.last_byte_s

        self.received_bytes += count
        self._left_bytes -= count
        self.credit_bytes -= count
        if self._wants_credit:
            self._pause()

    def written(self, size_bytes: int) -> None:
        """As `Flow.written`."""
        self.written_bytes = size_bytes
        self.when_written()

    async def ready(self) -> None:
        """Return once the next bytes may be read."""
        if self._may_read:
            return
        self.reading_time.stop()
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(None)  # a pause is no stall
            self._restarts_from_s = 0.0
        try:
            while not self._may_read:
                await self._has_slot.wait()
                if self._wants_credit:
                    wanted_bytes = self._left_bytes - self.credit_bytes
                    self.credit_bytes += await self._grant(wanted_bytes)
        finally:
            self._restart()
        self.reading_time.run()

    @contextmanager
    def interruptible(self, pause: Callable[[], object]) -> Iterator[None]:
        """As `Flow.interruptible`."""
        self._pause = pause
        try:
            yield
        finally:
            self._pause = _no_callback

    @property
    def _may_read(self) -> bool:
        return self._has_slot.is_set() and not self._wants_credit

    @property
    def _wants_credit(self) -> bool:
        is_spent = self.credit_bytes <= 0
        return is_spent and self._left_bytes > 0

    def _restart(self) -> None:
        """Restart the stall time-out, unless that was done a moment ago."""
        self._lately_bytes = 0
        if self._limit is None or self._limit.expired():
            return
        present_s = now_s()
        if present_s < self._restarts_from_s:
            return
        self._restarts_from_s = present_s + _SLACK * self._stall_timeout_s
        self._limit.reschedule(present_s + (1 + _SLACK) * self._stall_timeout_s)


class Coming:
    """Bytes of one download that belong to unfinished parts.

    Args:
        written: called when more of them are in the file.
    """

    def __init__(self, written: Callable[[], object] = _no_callback) -> None:
        self._written = written
        self._parts: dict[int, PausableRead] = {}

    def __repr__(self) -> str:
        return f"Coming({self.size_bytes} bytes of {len(self._parts)} parts)"

    @property
    def size_bytes(self) -> int:
        """Number of such bytes received so far."""
        return sum(read.received_bytes for read in self._parts.values())

    def begin(self, part: int, read: PausableRead) -> None:
        """Count a read's bytes as those of a part, in place of an earlier attempt's."""
        self._parts[part] = read
        read.when_written = self._written

    def written_bytes(self, part: int) -> int:
        """Return the size of a part's beginning that is in the file already.

        0 once the part is finished.
        """
        read = self._parts.get(part)
        return 0 if read is None else read.written_bytes

    def end(self, part: int) -> None:
        """Stop counting a part: it is on disk."""
        self._parts.pop(part, None)
