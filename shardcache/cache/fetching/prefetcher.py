"""Prefetching: transfers of the shards that plans need soonest.

One task of the cache runs `Prefetcher.run`. The schedule, which is merged from the plans of all
readers, says which missing shard is needed next. If a reader waits for a shard, `Leasing` starts
its transfer at once.
"""

from dataclasses import dataclass

import structlog

from shardcache.cache.disk_health import DiskHealth
from shardcache.cache.fetching.transfers import Transfers
from shardcache.cache.planner import Planner
from shardcache.cache.space.residency import LOOK_AGAIN_S, Residency
from shardcache.cache.waiting.signals import Signal
from shardcache.cache.waiting.waits import PriorityClass
from shardcache.shared.exceptions import ShardcacheError
from shardcache.shared.protocol import ShardRef
from shardcache.store.space import footprint_bytes
from shardcache.store.store import Store

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class Prefetcher:
    """Starts transfers of the planned shards that are needed soonest, as space and limits allow.

    `_max_transfers` is the number of transfers that may run ahead of need at a time. `_changed` is
    notified when plans, transfers or space change.
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
            except ShardcacheError as exn:
                # The cache disk has failed. Readers get an error from their own requests.
                log.error("cannot prefetch", cause=exn.message)
                pause_s = None  # no attempt before something changes
            await self._changed.wait(pause_s)

    def _start_all(self) -> float | None:
        """Start the transfers that can be started now.

        Returns the seconds after which to try again, as some changes are not notified; None if no
        planned shard is missing.
        """
        while self._transfers_ahead() < self._max_transfers:
            schedule = self._planner.schedule
            missing = schedule.next_missing(self.needs_no_fetch)
            if missing is None:
                return None
            session = missing.session
            ref = session.ref(missing.position)
            if self._must_wait(missing.name, ref, missing.needed_at_s):
                # All other missing shards are needed later than this one, and may evict even less.
                # Once its need is as close as the lead time, this shard may evict planned shards:
                # try again then.
                until_lead_s = missing.needed_at_s - schedule.now_s - self._planner.lead_s
                if until_lead_s <= 0:
                    return LOOK_AGAIN_S
                return min(until_lead_s, LOOK_AGAIN_S)

            # In the session's context, the transfer reads with the session's credentials, and its
            # log lines name the session's job.
            session.context.run(
                self._transfers.start,
                missing.name,
                ref,
                PriorityClass.PLANNED,
                session.client,
            )
        return LOOK_AGAIN_S

    def _must_wait(self, name: str, ref: ShardRef, needed_at_s: float) -> bool:
        """Return whether a transfer has to wait for space, or for the disk.

        The transfer of a shard of unknown size is started, as it finds out the size. So is the
        transfer of a shard that can never fit: its error is known early then.

        Args:
            name: the shard's name in plans.
            ref: the shard.
            needed_at_s: time of need by the monotonic clock.
        """
        size_bytes = self._planner.size_bytes(name) or ref.size_bytes
        if size_bytes is None:
            return False
        wanted_bytes = footprint_bytes(size_bytes)
        if not self._residency.may_fit(wanted_bytes):
            return False
        if self._health.error is not None:
            return True
        return not self._residency.fits_now(wanted_bytes, needed_at_s)

    def _transfers_ahead(self) -> int:
        """Return the number of transfers that were started for plans and that nobody waits for."""
        transfers = self._transfers.all()
        planned = [each for each in transfers if each.requested_class is PriorityClass.PLANNED]
        ahead = [each for each in planned if not each.waits]
        return len(ahead)

    def needs_no_fetch(self, name: str) -> bool:
        """Return whether a shard needs no prefetch: it is cached, is being fetched, or has failed.

        A failed shard is left to readers' own requests, until it is worth another attempt.

        Args:
            name: the shard's name in plans.
        """
        if self._planner.key(name) in self._store.shards:
            return True
        return name in self._transfers or name in self._transfers.failures
