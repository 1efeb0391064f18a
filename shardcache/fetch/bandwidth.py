"""So many bytes a second over all stores, and the most urgent have them first."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from aiolimiter import AsyncLimiter

from shardcache.fetch.rotation import Rotation
from shardcache.fetch.slots import Claim

_GRANTS_PER_S = 50
_BURST_GRANTS = 5


@dataclass(slots=True, eq=False)
class _Order:
    claim: Claim
    size_bytes: float
    granted: bool = False


class Bandwidth:
    """Grants bytes before they are read, at most a fiftieth of a second's worth at a time.

    Whose they are is decided when the limiter has let them through and not before, so that waiting readers have all
    of the rate as long as they take it; equals of different parties take turns, and parts of one shard arrive one
    after the other. Reads that cannot be cut to measure bring more than was granted: the next grants pay for that.

    Args:
        limit_bytes_per_s: None for no limit.
    """

    def __init__(self, limit_bytes_per_s: int | None) -> None:
        self._limited = limit_bytes_per_s is not None
        self._set_pace(limit_bytes_per_s or 0)
        self._paid_bytes: float = 0  # let through and not granted; negative is what came without a grant
        self._payment: asyncio.Event | None = None  # under way: whoever orders first makes it for all
        self._orders: list[_Order] = []
        self._rotation = Rotation()

    def __repr__(self) -> str:
        return f"<Bandwidth {f'{self._most_bytes * _GRANTS_PER_S} bytes/s' if self._limited else 'unlimited'}>"

    def change(self, limit_bytes_per_s: int | None) -> None:
        """Have another limit, None for none; what waits already is let through at the former pace."""
        self._limited = limit_bytes_per_s is not None
        if limit_bytes_per_s is not None:
            self._set_pace(limit_bytes_per_s)

    def _set_pace(self, bytes_per_s: int) -> None:
        self._most_bytes = max(1, bytes_per_s // _GRANTS_PER_S)
        self._limiter = AsyncLimiter(_BURST_GRANTS * self._most_bytes, _BURST_GRANTS / _GRANTS_PER_S)

    async def grant(self, claim: Claim, wanted_bytes: float) -> float:
        """Wait for leave to read, and return how many bytes: `wanted_bytes` or fewer; any number without a limit."""
        if not self._limited:
            return math.inf
        order = _Order(claim, min(wanted_bytes, self._most_bytes))
        self._orders.append(order)
        try:
            while not order.granted:
                await self._pay()
        finally:
            if not order.granted:
                self._orders.remove(order)
        return order.size_bytes

    def settle(self, unused_bytes: float) -> None:
        """Take back what a read had leave for and did not bring; negative is what it brought without."""
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
            self._rotation.serve(order.claim.bid().party)
            order.granted = True

    def _next(self) -> _Order:
        def rank(order: _Order) -> tuple[int, int, float, int]:
            bid = order.claim.bid()
            return bid.klass, self._rotation.last(bid.party), bid.deadline_s, order.claim.arrival

        return min(self._orders, key=rank)
