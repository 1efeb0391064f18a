"""Requests for bodies: each with a slot, memory and limits of time; two for a part whose first is late."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

from shardcache.errors import OriginError
from shardcache.fetch.bandwidth import Bandwidth
from shardcache.fetch.buffers import Buffers
from shardcache.fetch.hedging import Hedging, race
from shardcache.fetch.slots import Claim, Slots
from shardcache.fetch.stall import LEAST_BYTES_PER_S, Watch
from shardcache.fetch.tap import Tap
from shardcache.metrics import Counters
from shardcache.origin.base import Origin, RemoteObject


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes `start` to `start + size_bytes` of an object, and what becomes of them.

    Attributes:
        buffer_bytes: memory to be lent for it, `size_bytes` or more.
        write: puts the part into its place.
        begun: told of each tap through which it comes, but for a second request's.
    """

    origin: Origin
    obj: RemoteObject
    start: int
    size_bytes: int
    buffer_bytes: int
    claim: Claim
    write: Callable[[memoryview], Awaitable[None]]
    begun: Callable[[Tap], None]


class Requests:
    """Sends requests as slots, bandwidth and hedging allow, and counts what comes."""

    def __init__(
        self, slots: Slots, bandwidth: Bandwidth, hedging: Hedging, counters: Counters, stall_timeout_s: float
    ) -> None:
        self._slots = slots
        self._bandwidth = bandwidth
        self._hedging = hedging
        self._buffers = Buffers()
        self._counters = counters
        self._stall_timeout_s = stall_timeout_s

    @asynccontextmanager
    async def lend(self, claim: Claim, size_bytes: int) -> AsyncIterator[memoryview]:
        """Lend a slot and memory, until what came is written."""
        async with self._slots.hold(claim):
            with self._buffers.lend(size_bytes) as buffer:
                yield buffer

    @contextmanager
    def tap(self, claim: Claim, url: str, size_bytes: int) -> Iterator[Tap]:
        """Lend what one request for so many bytes reads through; during the block its claim can be paused."""
        self._counters.origin_requests += 1
        watch = Watch(self._stall_timeout_s, url, self._count, LEAST_BYTES_PER_S)
        tap = claim.work = Tap(watch, size_bytes, partial(self._bandwidth.grant, claim))
        try:
            yield tap
        finally:
            claim.work = None
            self._bandwidth.settle(tap.leave_bytes)

    async def fetch(self, part: Part) -> None:
        """Ask for a part, for a second time where it is late, and write whichever answer is whole first.

        Raises what the origin raises for the first request, and what writing raises.
        """
        async with self.lend(part.claim, part.buffer_bytes) as buffer:
            with self.tap(part.claim, part.obj.url, part.size_bytes) as tap:
                part.begun(tap)
                is_first = await self._first_of_two(part, buffer, tap)
            self._hedging.took(part.claim.store, part.size_bytes, tap.worked.elapsed_s)
            if is_first:
                await part.write(buffer[: part.size_bytes])
            else:
                self._counters.hedged_bytes += tap.received_bytes

    async def _first_of_two(self, part: Part, buffer: memoryview, tap: Tap) -> bool:
        """Return whether the buffer is filled; otherwise a second request's answer is written already."""
        patience_s = self._hedging.patience_s(part.claim.store, part.size_bytes)
        reading = self._read(part, buffer, tap)
        if patience_s is not None:
            return await race(reading, partial(self._second, part, tap, patience_s))
        await reading
        return True

    async def _second(self, part: Part, first: Tap, patience_s: float, end_first: Callable[[], bool]) -> None:
        await first.worked.reaches(patience_s)
        if self._slots.is_throttled(part.claim.store) or not self._hedging.spend(part.claim.store):
            return
        claim = part.claim.again()
        with contextlib.suppress(OriginError):  # the first may still come; what the store says of it counts
            async with self.lend(claim, part.buffer_bytes) as buffer:
                if await self._read_in_time(part, claim, buffer, end_first):
                    await part.write(buffer[: part.size_bytes])

    async def _read_in_time(self, part: Part, claim: Claim, buffer: memoryview, end_first: Callable[[], bool]) -> bool:
        self._counters.hedges += 1
        won = False
        with self.tap(claim, part.obj.url, part.size_bytes) as tap:
            try:
                await self._read(part, buffer, tap)
                won = end_first()
            finally:
                self._counters.hedged_bytes += 0 if won else tap.received_bytes
        return won

    async def _read(self, part: Part, buffer: memoryview, tap: Tap) -> None:
        async with tap.limit():
            await part.origin.read_into(part.obj, part.start, buffer[: part.size_bytes], tap)
        measures, store, took_s = self._counters.measures, part.claim.store, tap.worked.elapsed_s
        measures.part.of(store).observe(took_s)
        measures.first_byte.of(store).observe(took_s if tap.first_byte_s is None else tap.first_byte_s)

    def _count(self, received_bytes: int) -> None:
        self._counters.origin_bytes += received_bytes
