"""Reads of bodies: paused without a slot or byte credit, timed, given up when they stall.

A read follows the body of one request. The request sender passes a `PausableRead` to the origin as
the `Flow` of the body. The scheduler pauses a read by taking its connection slot away. Byte credit
is the number of bytes that a read may take before it has to wait for more; a bandwidth limit grants
it. A read stalls if too few bytes arrive while it is not paused.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeAlias

from shardcache.fetch.stopwatch import Stopwatch, now_s
from shardcache.shared.exceptions import OriginUnavailableError
from shardcache.transport.between.flow import Flow, Received, nothing

Grant: TypeAlias = Callable[[float], Awaitable[float]]
"""Waits for byte credit and returns it; the argument is the number of bytes wanted."""

MIN_BYTES_PER_S = 1024
"""Minimum rate of a read; a slower request is given up.

Its network may be failing, or its server may stall on purpose.
"""

# Share of the stall time-out by which a request may time out late. With this slack, the timer need
# not be rescheduled for every byte.
_SLACK = 0.1


def _no_callback() -> None:
    """Stand in for a callback that was not given."""


async def _unlimited(wanted_bytes: float) -> float:
    """Grant unlimited byte credit, for a read without a bandwidth limit."""
    return math.inf


class StalledError(OriginUnavailableError):
    """Too little of an answer arrived for too long."""


class PausableRead(Flow):
    """A read that pauses while it has no slot or no byte credit, and fails when it stalls.

    Its duration is not limited, as long as enough bytes keep arriving while it is not paused.

    Args:
        url: url of the object, for errors.
        stall_timeout_s: time within which enough bytes must arrive: `MIN_BYTES_PER_S` on average,
            or a single byte if the size is unknown.
        tally: called with each number of bytes received.
        size_bytes: number of bytes to read; 0 if unknown.
        grant: waits for byte credit and returns it, given the number of bytes wanted.
        prompt: True if a reader is waiting for the first bytes, so that they are reported at once.

    Attributes:
        credit_bytes: unused byte credit; negative if more bytes were received than credited.
        received_bytes: number of bytes received so far.
        written_bytes: number of bytes of the body, from its beginning, that are known to be in the
            file.
        when_written: called when `written_bytes` grows.
        first_byte_s: reading time until the first byte arrived; None before that.
        last_byte_s: reading time until the latest byte arrived; minus infinity before the first.
        reading_time: a stopwatch that runs while bytes may be read, not during pauses.
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
        self._left_bytes = size_bytes  # number of bytes still to come; 0 or less if unknown
        self._grant = grant
        self.prompt = prompt
        # Timer of the stall time-out; None outside of `stall_timeout`.
        self._timer: asyncio.Timeout | None = None
        self._enough_bytes = 1  # number of bytes that restarts the timer
        if size_bytes:
            self._enough_bytes = max(1, int(stall_timeout_s * MIN_BYTES_PER_S))
        self._lately_bytes = 0  # number of bytes received since the timer was last restarted
        # The time-out runs with the reading time, in which these two are: when the read counts as
        # stalled, and from when the time-out may be restarted again.
        self._stalls_at_s = stall_timeout_s
        self._restarts_from_s = 0.0
        self._pause: Callable[[], object] = _no_callback  # stops the transport's read
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
    async def stall_timeout(self) -> AsyncIterator[None]:
        """Give the read up if it stalls during the block, which begins once reading is allowed.

        The reading time runs during the block. Raises StalledError when too few bytes arrive for
        too long; pauses do not count.
        """
        try:
            async with asyncio.timeout(self._stall_timeout_s) as self._timer:
                await self.ready()
                self.reading_time.run()
                try:
                    yield
                finally:
                    self.reading_time.stop()
        except TimeoutError:
            # Origins translate their own timeouts, so this TimeoutError comes from the timer above.
            raise self._stall_error() from None
        finally:
            self._timer = None

    def _stall_error(self) -> StalledError:
        amount = "nothing was"
        if self._lately_bytes:
            amount = f"only {self._lately_bytes} bytes were"
        message = f"{amount} received for {self._stall_timeout_s:g} s"
        return StalledError(message, url=self._url)

    @property
    def rate_bytes_per_s(self) -> float:
        """Bytes received per second of reading time; 0 before the first byte."""
        elapsed_s = self.reading_time.elapsed_s
        if not self.received_bytes or not elapsed_s:
            return 0.0
        return self.received_bytes / elapsed_s

    def heard(self) -> None:
        """Restart the stall time-out, as the peer is alive but has nothing to send yet."""
        if self._may_read:
            self._restart()

    # Methods of `slot_claims.Pausable`: called by the scheduler

    def halt(self) -> None:
        """Pause, as the slot was taken away."""
        self._has_slot.clear()
        self._pause()

    def resume(self) -> None:
        """Continue after `halt`, with another slot."""
        self._has_slot.set()

    # Methods of `Flow`: called by the transport

    def received(self, count: int, first_arrival_s: float | None = None) -> None:
        """Count received bytes; restart the timer when enough have arrived.

        For the arguments, see `Flow.received`.
        """
        self._tally(count)

        self._lately_bytes += count
        if self._lately_bytes >= self._enough_bytes:
            self._restart()

        self.last_byte_s = self.reading_time.elapsed_s
        if self.first_byte_s is None:
            # The transport may report the first byte some time after its arrival.
            late_s = 0.0
            if first_arrival_s is not None:
                late_s = time.monotonic() - first_arrival_s
            self.first_byte_s = max(0.0, self.last_byte_s - late_s)

        self.received_bytes += count
        self._left_bytes -= count
        self.credit_bytes -= count
        if self._wants_credit:
            self._pause()

    def written(self, size_bytes: int) -> None:
        """Record how many bytes of the body are in the file; see `Flow.written`."""
        self.written_bytes = size_bytes
        self.when_written()

    async def ready(self) -> None:
        """Return once the next bytes may be read."""
        if self._may_read:
            return
        self.reading_time.stop()
        # A pause does not count as a stall, so the timer is stopped. After the pause, it has the
        # time that was left before: otherwise, a read that is paused often would never stall.
        if self._timer is not None and not self._timer.expired():
            self._timer.reschedule(None)
        while not self._may_read:
            await self._has_slot.wait()
            if self._wants_credit:
                # The credit is 0 or negative; the grant has to make up for a negative one too.
                wanted_bytes = self._left_bytes - self.credit_bytes
                self.credit_bytes += await self._grant(wanted_bytes)
        self._schedule_timer()
        self.reading_time.run()

    @contextmanager
    def interruptible(self, pause: Callable[[], object]) -> Iterator[None]:
        """Call `pause` during the block whenever the read has to stop; see `Flow.interruptible`."""
        self._pause = pause
        try:
            yield
        finally:
            self._pause = _no_callback

    @property
    def _may_read(self) -> bool:
        """True if the read has a slot and, if it needs byte credit, has some left."""
        return self._has_slot.is_set() and not self._wants_credit

    @property
    def _wants_credit(self) -> bool:
        """True if the byte credit is used up and bytes are still to come."""
        is_spent = self.credit_bytes <= 0
        return is_spent and self._left_bytes > 0

    def _restart(self) -> None:
        """Restart the stall time-out, unless it was restarted a moment ago (see `_SLACK`)."""
        self._lately_bytes = 0
        present_s = self.reading_time.elapsed_s
        if present_s < self._restarts_from_s:
            return
        self._restarts_from_s = present_s + _SLACK * self._stall_timeout_s
        self._stalls_at_s = present_s + (1 + _SLACK) * self._stall_timeout_s
        if self._may_read:  # bytes may still arrive at the beginning of a pause
            self._schedule_timer()

    def _schedule_timer(self) -> None:
        """Set the timer to the moment at which the read stalls if it is not paused before."""
        if self._timer is None or self._timer.expired():
            return
        left_s = self._stalls_at_s - self.reading_time.elapsed_s
        self._timer.reschedule(now_s() + left_s)


class UnfinishedParts:
    """Unfinished parts of one download, and the bytes of them that have arrived.

    Readers that read a shard as it arrives may use the bytes of an unfinished part that are already
    in the file.

    Args:
        when_written: called when more bytes of these parts are in the file.
    """

    def __init__(self, when_written: Callable[[], object] = _no_callback) -> None:
        self._when_written = when_written
        self._reads: dict[int, PausableRead] = {}  # by number of the part

    def __repr__(self) -> str:
        return f"UnfinishedParts({self.received_bytes} bytes of {len(self._reads)} parts)"

    @property
    def received_bytes(self) -> int:
        """Number of bytes of unfinished parts received so far."""
        return sum(read.received_bytes for read in self._reads.values())

    def begin(self, part: int, read: PausableRead) -> None:
        """Count the bytes of a read as those of a part, in place of the read of an earlier attempt.

        Args:
            part: number of the part; the first one if the read is for several.
        """
        self._reads[part] = read
        read.when_written = self._when_written

    def written_bytes(self, part: int) -> int:
        """Return how many bytes of an unfinished part, from its beginning, are in the file.

        The result is 0 once the part is finished.
        """
        read = self._reads.get(part)
        if read is None:
            return 0
        return read.written_bytes

    def end(self, part: int) -> None:
        """Stop counting a part, as it is finished."""
        self._reads.pop(part, None)
