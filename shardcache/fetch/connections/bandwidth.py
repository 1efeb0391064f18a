"""Bandwidth limit shared by all origins: the most urgent parts go first."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from aiolimiter import AsyncLimiter

from shardcache.fetch.connections.round_robin import RoundRobin
from shardcache.fetch.connections.scheduler import Claim

_GRANTS_PER_S = 50
_BURST_GRANTS = 5


@dataclass(slots=True, eq=False)
class _Order:
    claim: Claim
    size_bytes: float
    granted: bool = False


class Bandwidth:
    """Grants byte credit before each read, at most a fiftieth of a second's worth at a time.

    The recipient is chosen only when the limiter lets the bytes through, so that waiting readers get the whole rate for
    as long as they use it. Parties of equal urgency take turns, and parts of one shard arrive one after the other. A
    read that cannot be cut to size may exceed its credit; later grants make up for it.

    Args:
        limit_bytes_per_s: None for no limit.
    """

    def __init__(self, limit_bytes_per_s: int | None) -> None:
        self._limited = limit_bytes_per_s is not None
        self._most_bytes = max(1, (limit_bytes_per_s or 0) // _GRANTS_PER_S)
        self._limiter = AsyncLimiter(_BURST_GRANTS * self._most_bytes, _BURST_GRANTS / _GRANTS_PER_S)
        self._paid_bytes: float = 0  # let through but not granted yet; negative after reads without credit
        self._payment: asyncio.Event | None = None  # in progress: one order waits for the limiter on behalf of all
        self._orders: list[_Order] = []
        self._round_robin = RoundRobin()

    def __repr__(self) -> str:
        return f"<Bandwidth {f'{self._most_bytes * _GRANTS_PER_S} bytes/s' if self._limited else 'unlimited'}>"

    async def grant(self, claim: Claim, wanted_bytes: float) -> float:
        """Wait for byte credit and return it: at most `wanted_bytes`; infinite without a limit."""
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
            self._round_robin.serve(order.claim.priority().party)
            order.granted = True

    def _next(self) -> _Order:
        def rank(order: _Order) -> tuple[int, int, float, int]:
            priority = order.claim.priority()
            return priority.klass, self._round_robin.last(priority.party), priority.deadline_s, order.claim.arrival

        return min(self._orders, key=rank)
