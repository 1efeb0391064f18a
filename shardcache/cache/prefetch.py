"""Prefetching: starts transfers for the missing shards needed soonest, while there is space and a free slot."""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from shardcache.cache.disk import Health
from shardcache.cache.residency import LOOK_AGAIN_S, Evictor
from shardcache.cache.transfers import Transfers
from shardcache.cache.waits import Class, Transfer
from shardcache.errors import ShardcacheError
from shardcache.logs import about
from shardcache.store.space import footprint_bytes

log = structlog.get_logger()


class Prefetcher:
    """Turns the plan into transfers."""

    def __init__(self, evictor: Evictor, health: Health, transfers: Transfers, max_transfers: int) -> None:
        self._evictor = evictor
        self._health = health
        self._transfers = transfers
        self._max_transfers = max_transfers
        self._store = evictor.store
        self._planner = evictor.planner
        self._aliases = evictor.planner.aliases
        self._changed = evictor.inventory.changed

    async def run(self) -> None:
        """Start transfers whenever plans, transfers or space change, or a shard becomes due; runs until cancelled."""
        while True:
            try:
                pause_s = self._start_all()
            except ShardcacheError as exn:  # the cache disk failed: each reader gets its own error
                log.error("cannot prefetch", cause=exn.message)
                pause_s = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()

    def _start_all(self) -> float | None:
        """Start what can be started now; return in how many seconds to try again if nothing changes, or None.

        Some changes come without a notification: a lead time is reached, another process closes a file.
        """
        while sum(map(self._is_ahead, self._transfers.all())) < self._max_transfers:
            now = self._planner.now
            missing = now.next_missing(self.is_cared_for)
            if missing is None:
                return None
            name, needed_at_s, reader, position = missing
            ref = reader.ref(position)
            size_bytes = self._aliases.size_bytes(name) or ref.size_bytes
            # Shards needed later than the soonest missing one have even less claim to the space.
            if size_bytes is not None and self._must_wait(footprint_bytes(size_bytes), needed_at_s):
                early_s = needed_at_s - now.now_s - self._planner.lead_s
                return min(early_s, LOOK_AGAIN_S) if early_s > 0 else LOOK_AGAIN_S
            job, uid = reader.client
            with about(job=job, uid=uid):
                self._transfers.start(name, ref, Class.PLANNED)
        return LOOK_AGAIN_S

    def _must_wait(self, size_bytes: int, needed_at_s: float) -> bool:
        """Return whether there is no space now. A shard that can never fit is started, so that it fails early."""
        if not self._evictor.may_fit(size_bytes):
            return False
        return self._health.error is not None or not self._evictor.could_fit(size_bytes, needed_at_s)

    @staticmethod
    def _is_ahead(transfer: Transfer) -> bool:
        return transfer.wanted is Class.PLANNED and not transfer.waits

    def is_cared_for(self, name: str) -> bool:
        """Return whether a shard needs no prefetch: it is cached, being fetched, or blocked after failures."""
        return (
            self._aliases.key(name) in self._store.shards or name in self._transfers or name in self._transfers.failures
        )
