"""Read of a body: paused while it has no slot or byte credit, timed without its pauses, given up when it stalls."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from shardcache.errors import OriginUnavailableError
from shardcache.fetch.scheduler import Claim, Limit, RoundRobin, now_s
from shardcache.transport.workers import Flow, Received, nothing
from shardcache.units import size

Grant: TypeAlias = Callable[[float], Awaitable[float]]

MIN_BYTES_PER_S = 1024
"""Minimum rate: a slower connection is given up, whether the network is failing or the peer stalls on purpose."""

_SLACK = 0.1  # fraction of the limit by which a request may time out late, so that not every byte reschedules the timer

_GRANTS_PER_S = 50
_BURST_GRANTS = 5


@dataclass(slots=True, eq=False)
class _CreditRequest:
    claim: Claim
    size_bytes: float
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Bandwidth:
    """Grants byte credit before each read, at most a fiftieth of a second's worth at a time.

    The recipient is chosen only when the rate allows it the bytes, so that waiting readers get the whole rate for as
    long as they use it. Clients of equal urgency take turns, and parts of one shard arrive one after the other. A read
    that cannot be cut to size may exceed its credit; later grants make up for it.
    """

    def __init__(self, bytes_per_s: int | None) -> None:
        self._bytes_per_s = bytes_per_s  # None for no limit
        self._grant_bytes = max(1, (bytes_per_s or 0) // _GRANTS_PER_S)
        self._left_bytes: float = _BURST_GRANTS * self._grant_bytes  # negative after reads without credit
        self._counted_s = math.inf
        self._orders: list[_CreditRequest] = []
        self._timer: asyncio.TimerHandle | None = None
        self._round_robin = RoundRobin()

    def limits(self) -> Iterator[Limit]:
        """Yield the limit, if there is one."""
        if self._bytes_per_s is not None:
            yield Limit("bandwidth", f"--max-bandwidth {size(self._bytes_per_s)}/s", self._timer is not None)

    async def grant(self, claim: Claim, wanted_bytes: float) -> float:
        """Wait for byte credit and return it: at most `wanted_bytes`; infinite without a limit."""
        if self._bytes_per_s is None:
            return math.inf
        order = _CreditRequest(claim, min(wanted_bytes, self._grant_bytes))
        self._orders.append(order)
        if self._timer is None:
            self._hand_out(self._bytes_per_s)
        try:
            await order.granted
        except asyncio.CancelledError:
            if order in self._orders:
                self._orders.remove(order)
            else:
                self.settle(order.size_bytes)
            raise
        return order.size_bytes

    def settle(self, unused_bytes: float) -> None:
        """Take back unused byte credit; negative for bytes read without credit."""
        if self._bytes_per_s is not None:
            self._left_bytes += unused_bytes

    def _hand_out(self, bytes_per_s: int) -> None:
        loop, self._timer = asyncio.get_running_loop(), None
        earned_bytes = bytes_per_s * max(0.0, loop.time() - self._counted_s)
        burst_bytes = _BURST_GRANTS * self._grant_bytes
        self._left_bytes = max(self._left_bytes, min(burst_bytes, self._left_bytes + earned_bytes))
        self._counted_s = loop.time()
        while self._orders:
            order = min(self._orders, key=self._rank)
            if (lacking_bytes := order.size_bytes - self._left_bytes) >= 1:  # fractions are rounding errors
                self._timer = loop.call_later(lacking_bytes / bytes_per_s, self._hand_out, bytes_per_s)
                return
            self._left_bytes -= order.size_bytes
            self._orders.remove(order)
            self._round_robin.serve(order.claim.priority().client)
            if not order.granted.cancelled():
                order.granted.set_result(None)

    def _rank(self, order: _CreditRequest) -> tuple[int, int, float, int]:
        priority = order.claim.priority()
        return priority.klass, self._round_robin.last(priority.client), priority.deadline_s, order.claim.arrival


def _nothing() -> None:
    """Stand in for a callback that nobody has given."""


async def _unlimited(wanted_bytes: float) -> float:
    return math.inf


class StalledError(OriginUnavailableError):
    """Too little of an answer arrived for too long."""


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
        return self._counted_s + (0.0 if since_s is None else now_s() - since_s)

    def run(self) -> None:
        """Start, or continue after `stop`."""
        if self._running_since_s is None:
            self._running_since_s = now_s()
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


class PausableRead(Flow):
    """A read that pauses while it has no slot or no byte credit, and fails when it stalls.

    There is no limit on its duration, as long as enough keeps arriving while it does not pause.

    Args:
        stall_timeout_s: time within which enough must arrive: `MIN_BYTES_PER_S`, or anything if the size is unknown.
        size_bytes: number of bytes to read; 0 if unknown.
        grant: waits for byte credit and returns it, given the number of bytes wanted.
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
        self._url = url
        self._stall_timeout_s = stall_timeout_s
        super().__init__(tally)
        self._left_bytes = size_bytes
        self._grant = grant
        self.prompt = prompt
        self._enough_bytes = max(1, int(stall_timeout_s * MIN_BYTES_PER_S)) if size_bytes else 1
        self._lately_bytes = 0  # received since the timer was last restarted
        self._restarts_from_s = 0.0
        self._limit: asyncio.Timeout | None = None
        self._pause: Callable[[], object] = _nothing
        self._has_slot = asyncio.Event()
        self._has_slot.set()
        self.credit_bytes = 0.0  # unused; negative after bytes without credit
        self.received_bytes = 0
        self.written_bytes = 0  # size of the body's beginning that is in the file, as far as known
        self.when_written: Callable[[], object] = _nothing  # called when that grows
        self.first_byte_s: float | None = None  # reading time before the first byte; None until it arrives
        self.last_byte_s = -math.inf  # reading time before the last byte
        self.worked = Stopwatch()  # reading time, pauses excluded

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Time the read during the block, which begins once reading is allowed.

        Raises StalledError when too little arrives for too long, pauses excluded.
        """
        try:
            async with asyncio.timeout(self._stall_timeout_s) as self._limit:
                await self.ready()
                self.worked.run()
                try:
                    yield
                finally:
                    self.worked.stop()
        except TimeoutError:
            # Origins translate their own timeouts, so this one is the timer's.
            amount = f"only {self._lately_bytes} bytes were" if self._lately_bytes else "nothing was"
            raise StalledError(f"{amount} received for {self._stall_timeout_s:g} s", url=self._url) from None
        finally:
            self._limit = None

    @property
    def rate_bytes_per_s(self) -> float:
        """Bytes per second of reading time."""
        return self.received_bytes / self.worked.elapsed_s if self.received_bytes and self.worked.elapsed_s else 0.0

    def heard(self) -> None:
        """Restart the stall time-out: the peer lives, and has nothing to send yet."""
        if self._may_read:
            self._restart()

    # scheduler.Pausable

    def halt(self) -> None:
        """Pause."""
        self._has_slot.clear()
        self._pause()

    def resume(self) -> None:
        """Continue after `halt`."""
        self._has_slot.set()

    # transport.workers.Flow

    def received(self, count: int) -> None:
        """Count received bytes, and restart the timer when they are enough."""
        self._tally(count)
        self._lately_bytes += count
        if self._lately_bytes >= self._enough_bytes:
            self._restart()
        self.last_byte_s = self.worked.elapsed_s
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
        self.worked.stop()
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(None)
            self._restarts_from_s = 0.0
        try:
            while not self._may_read:
                await self._has_slot.wait()
                if self._wants_credit:
                    self.credit_bytes += await self._grant(self._left_bytes - self.credit_bytes)
        finally:
            self._restart()
        self.worked.run()

    @contextmanager
    def interruptible(self, pause: Callable[[], object]) -> Iterator[None]:
        """As `Flow.interruptible`."""
        self._pause = pause
        try:
            yield
        finally:
            self._pause = _nothing

    @property
    def _may_read(self) -> bool:
        return self._has_slot.is_set() and not self._wants_credit

    @property
    def _wants_credit(self) -> bool:
        return self.credit_bytes <= 0 < self._left_bytes

    def _restart(self) -> None:
        """Restart the stall time-out."""
        self._lately_bytes, present_s = 0, now_s()
        if self._limit is not None and not self._limit.expired() and present_s >= self._restarts_from_s:
            self._restarts_from_s = present_s + _SLACK * self._stall_timeout_s
            self._limit.reschedule(present_s + (1 + _SLACK) * self._stall_timeout_s)


class Coming:
    """Bytes of one download that belong to unfinished parts."""

    def __init__(self, written: Callable[[], object] = _nothing) -> None:
        self._written = written  # called when more of them are in the file
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
        """Return the size of a part's beginning that is in the file already; 0 once it is finished."""
        return self._parts[part].written_bytes if part in self._parts else 0

    def end(self, part: int) -> None:
        """Stop counting a part: it is on disk."""
        self._parts.pop(part, None)
