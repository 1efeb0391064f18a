"""Prefetching: transfers of the shards that plans need soonest."""

from dataclasses import dataclass

import structlog

from shardcache.cache.disk_health import DiskHealth
from shardcache.cache.fetching.transfers import Transfers
from shardcache.cache.planner import Planner
from shardcache.cache.space.residency import LOOK_AGAIN_S, Residency
from shardcache.cache.waiting.signals import Signal
from shardcache.cache.waiting.waits import Class
from shardcache.errors import ShardcacheError
from shardcache.shared.protocol import ShardRef
from shardcache.store.space import footprint_bytes
from shardcache.store.store import Store
from shardcache.telemetry.logs import about

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class Prefetcher:
    """Turns the plan into transfers.

    It starts those of the shards needed soonest, while there is space and a free slot. It looks
    again whenever something has `_changed`.
    """

    _store: Store
    _planner: Planner
    _residency: Residency
    _health: DiskHealth
    _transfers: Transfers
    _max_transfers: int
    _changed: Signal

    async def run(self) -> None:
        """Start transfers whenever plans, transfers or space change, or a shard becomes due.

        Runs until cancelled.
        """
        while True:
            try:
                pause_s = self._start_all()
            except ShardcacheError as exn:  # the cache disk failed: each reader gets its own error
                log.error("cannot prefetch", cause=exn.message)
                pause_s = None
            await self._changed.wait(pause_s)

    def _start_all(self) -> float | None:
        """Start what can be started now.

        Returns the time after which to try again, as some changes come without a notification;
        None if nothing is missing.
        """
        while self._transfers_ahead() < self._max_transfers:
            now = self._planner.now
            missing = now.next_missing(self.is_cared_for)
            if missing is None:
                return None
            ref = missing.session.ref(missing.position)
            # Shards needed later than the soonest missing one have even less claim to the space.
            if self._must_wait(missing.name, ref, missing.needed_at_s):
                early_s = missing.needed_at_s - now.now_s - self._planner.lead_s
                if early_s <= 0:
                    return LOOK_AGAIN_S
                return min(early_s, LOOK_AGAIN_S)

            client = missing.session.client
            job, uid = client
            with about(job=job, uid=uid):
                self._transfers.start(missing.name, ref, Class.PLANNED, client)
        return LOOK_AGAIN_S

    def _must_wait(self, name: str, ref: ShardRef, needed_at_s: float) -> bool:
        """Return whether there is no space now.

        A shard of unknown size is started, and so is one that can never fit: it fails early.
        """
        size_bytes = self._planner.size_bytes(name) or ref.size_bytes
        if size_bytes is None:
            return False
        wanted_bytes = footprint_bytes(size_bytes)
        if not self._residency.may_fit(wanted_bytes):
            return False
        if self._health.error is not None:
            return True
        return not self._residency.could_fit(wanted_bytes, needed_at_s)

    def _transfers_ahead(self) -> int:
        """Return the number of transfers for plans alone, without a reader that waits."""
        planned = [each for each in self._transfers.all() if each.wanted is Class.PLANNED]
        return sum(not transfer.waits for transfer in planned)

    def is_cared_for(self, name: str) -> bool:
        """Return whether a shard needs no prefetch.

        It is cached, being fetched, or blocked after failures.
        """
        if self._planner.key(name) in self._store.shards:
            return True
        return name in self._transfers or name in self._transfers.failures
