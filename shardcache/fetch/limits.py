"""Limits on what is requested: concurrent requests to an origin, connections that fill a link, bytes per second."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import partial
from statistics import median

from aiolimiter import AsyncLimiter

from shardcache.fetch.priority import Claim, RoundRobin

# The quickest parts among this many show the speed of an uncontended connection. Once all of them were contended, the
# estimate rises, and more connections are tried again.
_OBSERVED = 64
_QUICK = 0.1
# One slow part says nothing about the link.
_NEWEST = 5
# Connections are idle between parts, and a faster link than estimated shows only when more connections are tried.
_SPARE = 2

_GRANTS_PER_S = 50
_BURST_GRANTS = 5


class Aimd:
    """Concurrency limit that grows by one after a round of successes and halves when the origin throttles. Pure.

    After D.-M. Chiu and R. Jain, "Analysis of the Increase and Decrease Algorithms for Congestion Avoidance in Computer
    Networks", 1989: the only linear rule that leads many clients of one origin to equal shares.

    Requests sent under a limit that was too high fail together, which is one signal, not many: each request belongs to
    the `generation` in which it began, and only the first failure of a generation counts.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._successes = 0
        self.limit = maximum
        self.generation = 0

    def __repr__(self) -> str:
        return f"<Aimd {self.limit} of {self._maximum}, generation {self.generation}>"

    def succeeded(self, generation: int) -> None:
        """Record an answered request; one sent under another limit says nothing about this one."""
        if generation != self.generation or self.limit == self._maximum:
            return
        self._successes += 1
        if self._successes >= self.limit:
            self._successes = 0
            self.limit += 1

    def refused(self, generation: int) -> None:
        """Record a throttled request."""
        if generation != self.generation:
            return
        self.generation += 1
        self._successes = 0
        self.limit = max(1, self.limit // 2)


class Link:
    """Estimate of the number of connections that saturate the link to an origin: n connections whose parts take k times
    as long as quick ones do the work of n / k. Pure.

    Parts are compared with parts of a similar size: within a factor of two.
    """

    def __init__(self) -> None:
        self._times_s: defaultdict[int, deque[float]] = defaultdict(partial(deque[float], maxlen=_OBSERVED))
        self._saturating: deque[float] = deque(maxlen=_NEWEST)
        self._bytes_per_s: deque[float] = deque(maxlen=_NEWEST)

    def __repr__(self) -> str:
        return f"<Link {self.connections} connections>"

    @property
    def connections(self) -> int | None:
        """Connections to use where order matters more than the last bit of throughput; None while unknown."""
        return round(median(self._saturating)) + _SPARE if self._saturating else None

    @property
    def connection_bytes_per_s(self) -> float | None:
        """Rate of one connection while the others are in use; None while unknown."""
        return median(self._bytes_per_s) if self._bytes_per_s else None

    def took(self, size_bytes: int, time_s: float, connections: float) -> None:
        """Record a part's time and the mean number of connections in use while it was read."""
        times_s = self._times_s[size_bytes.bit_length()]
        times_s.append(time_s)
        quick_s = sorted(times_s)[int(_QUICK * len(times_s))]
        self._bytes_per_s.append(size_bytes / max(time_s, 1e-6))
        self._saturating.append(connections * (quick_s / time_s if time_s > quick_s else 1.0))


@dataclass(slots=True, eq=False)
class _Order:
    claim: Claim
    size_bytes: float
    granted: bool = False


class Bandwidth:
    """Grants byte credit before each read, at most a fiftieth of a second's worth at a time.

    The recipient is chosen only when the limiter lets the bytes through, so that waiting readers get the whole rate for
    as long as they use it. Clients of equal urgency take turns, and parts of one shard arrive one after the other. A
    read that cannot be cut to size may exceed its credit; later grants make up for it.

    Args:
        limit_bytes_per_s: None for no limit.
    """

    def __init__(self, limit_bytes_per_s: int | None) -> None:
        self._limited = limit_bytes_per_s is not None
        self._grant_bytes = max(1, (limit_bytes_per_s or 0) // _GRANTS_PER_S)
        self._limiter = AsyncLimiter(_BURST_GRANTS * self._grant_bytes, _BURST_GRANTS / _GRANTS_PER_S)
        self._paid_bytes: float = 0  # let through but not granted yet; negative after reads without credit
        self._payment: asyncio.Event | None = None  # in progress: one order waits for the limiter on behalf of all
        self._orders: list[_Order] = []
        self._round_robin = RoundRobin()

    def __repr__(self) -> str:
        return f"<Bandwidth {f'{self._grant_bytes * _GRANTS_PER_S} bytes/s' if self._limited else 'unlimited'}>"

    async def grant(self, claim: Claim, wanted_bytes: float) -> float:
        """Wait for byte credit and return it: at most `wanted_bytes`; infinite without a limit."""
        if not self._limited:
            return math.inf
        order = _Order(claim, min(wanted_bytes, self._grant_bytes))
        self._orders.append(order)
        try:
            while not order.granted:
                await self._pay()
        finally:
            if not order.granted:
                self._orders.remove(order)
        return order.size_bytes

    def settle(self, unused_bytes: float) -> None:
        """Take back unused byte credit; negative for bytes read without credit."""
        if self._limited:
            self._paid_bytes += unused_bytes

    async def _pay(self) -> None:
        if self._payment is not None:
            await self._payment.wait()
            return
        self._payment = asyncio.Event()
        try:
            due = min(max(0, self._next().size_bytes - self._paid_bytes), self._limiter.max_rate)
            await self._limiter.acquire(due)
            self._paid_bytes += due
            self._hand_out()
        finally:
            self._payment.set()
            self._payment = None

    def _hand_out(self) -> None:
        while self._orders and (order := self._next()).size_bytes <= self._paid_bytes:
            self._paid_bytes -= order.size_bytes
            self._orders.remove(order)
            self._round_robin.serve(order.claim.priority().client)
            order.granted = True

    def _next(self) -> _Order:
        def rank(order: _Order) -> tuple[int, int, float, int]:
            priority = order.claim.priority()
            return priority.klass, self._round_robin.last(priority.client), priority.deadline_s, order.claim.arrival

        return min(self._orders, key=rank)
