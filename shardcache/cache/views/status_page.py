"""The status page: contents and present activity of the cache, as `status` and `top` show them.

`Cache.status` returns it as JSON. Urls that the user may not see are hidden in it.
"""

import math
from collections import defaultdict
from dataclasses import asdict, dataclass

from shardcache.cache.fetching.prefetcher import Prefetcher
from shardcache.cache.fetching.transfers import Transfers
from shardcache.cache.planner import Planner
from shardcache.cache.readers.connected_reader import LISTING, Reader
from shardcache.cache.readers.jobs import Job
from shardcache.cache.readers.readers import Readers
from shardcache.cache.readers.recent_waits import RECENT_S
from shardcache.cache.space.residency import Residency
from shardcache.cache.views.live_view import longest_wait_s
from shardcache.cache.views.reasons import Reasons
from shardcache.cache.views.visibility import Visible, shown
from shardcache.cache.waiting.transfer import Transfer
from shardcache.cache.waiting.waits import JobKey
from shardcache.fetch.download import Downloader
from shardcache.origin.registry import Origins
from shardcache.shared.exceptions import CacheError, ShardError
from shardcache.shared.protocol import Json
from shardcache.store.disk.mounts import free_bytes
from shardcache.store.store import Store
from shardcache.telemetry.metrics import Counters


@dataclass(frozen=True, slots=True, repr=False)
class StatusPage:
    """A read-only view of the whole cache."""

    _store: Store
    _planner: Planner
    _counters: Counters
    _readers: Readers
    _transfers: Transfers
    _prefetcher: Prefetcher
    _residency: Residency
    _downloader: Downloader
    _origins: Origins
    _reasons: Reasons

    def page(self, visible: Visible) -> Json:
        """Return the page: cache, counters, limits, transfers and jobs.

        Args:
            visible: returns whether the user may see a url.
        """
        counters = self._counters
        scheduler = self._downloader.scheduler
        return {
            "cache": self._cache(),
            "counters": counters.to_json() | {"paused": scheduler.pauses},
            "bill": counters.bills.to_json(),
            "limits": [limit._asdict() for limit in self._reasons.limits(visible)],
            "origins": [asdict(load) for load in scheduler.loads()],
            "tiers": [tier.to_json() for tier in self._origins.tiers.values()],
            "transfers": [self._transfer(each, visible) for each in self._transfers.all()],
            "refused": [exn.to_json() for exn in self.refused(visible)],
            "jobs": self._jobs(visible),
        }

    def refused(self, visible: Visible) -> list[ShardError]:
        """Return the errors of shards that were refused when they last arrived, the latest last.

        Args:
            visible: returns whether the user may see a url; other shards are left out.
        """
        return [exn for url, exn in self._transfers.refusals.items() if visible(url)]

    def _cache(self) -> Json:
        """Return the cache folder and its space."""
        store = self._store
        return {
            "dir": str(store.layout.root),
            "capacity_bytes": store.space.capacity_bytes,
            "used_bytes": store.space.used_bytes,
            "free_bytes": self._free_bytes(),
            "leased_bytes": self._reasons.leased_bytes(),
            "leases": sum(shard.leases for shard in self._residency.leased),
            "reserved_bytes": store.space.reserved_bytes,
            "parts_bytes": sum(file.kept_bytes for file in store.parts.files()),
            "shards": len(store.shards),
        }

    def _free_bytes(self) -> int | None:
        """Return the free bytes of the filesystem; None if the disk fails."""
        try:
            return free_bytes(self._store.layout.root)
        except CacheError:  # the error is reported under `disk`
            return None

    def _transfer(self, transfer: Transfer, visible: Visible) -> Json:
        """Return a transfer, with its last error and the time until its shard is needed."""
        url = transfer.ref.url
        last_error = None
        failure = self._downloader.failing.get(url)
        if failure is not None and visible(url):
            last_error = str(failure)
        schedule = self._planner.schedule
        next_use_s = schedule.next_use_s(self._planner.key(transfer.name))
        return {
            "url": shown(url, visible),
            **transfer.to_json(),
            "last_error": last_error,
            "needed_in_s": _time_until_s(next_use_s, schedule.now_s),
        }

    def _jobs(self, visible: Visible) -> list[Json]:
        """Return the jobs; those without readers come last."""
        readers: defaultdict[JobKey, list[Reader]] = defaultdict(list)
        for reader in self._readers:
            reader.clock.charge()  # so that the present wait counts up to now
            readers[reader.client].append(reader)
        jobs = sorted(self._readers.jobs(), key=lambda job: job.sessions == 0)
        return [self._job(job, readers[job.key], visible) for job in jobs]

    def _job(self, job: Job, readers: list[Reader], visible: Visible) -> Json:
        """Return a job, with its pace and its waits.

        Args:
            job: the job.
            readers: the job's connected readers.
            visible: returns whether the user may see a url.
        """
        schedule = self._planner.schedule
        waiting = [reader for reader in readers if reader.waiting_for is not None]
        waiting_share = 0.0
        if readers:
            waited_s = sum(reader.clock.recently_waited_s() for reader in readers)
            waiting_share = waited_s / (RECENT_S * len(readers))
        return job.to_json() | {
            "bill": self._counters.bills.to_json(job.key),
            "shards_per_s": round(sum(map(schedule.shards_per_s, readers)), 4),
            "ahead_s": self._ahead_s(readers),
            "waiting": len(waiting),
            "waiting_for": self._waiting_for(waiting, visible),
            "waiting_s": longest_wait_s(waiting),
            "waiting_share": round(waiting_share, 4),
        }

    def _ahead_s(self, readers: list[Reader]) -> float | None:
        """Return the time until one of the readers needs a missing shard.

        Returns None if all shards that they plan to read are cached.
        """
        if any(reader.unresolved for reader in readers):
            return 0.0  # the reader waits for its listing, and has no shard yet
        schedule = self._planner.schedule
        # To the prefetcher, a shard that is being fetched needs no fetch. But it is still missing.
        needs_no_fetch = self._prefetcher.needs_no_fetch
        fetching = [transfer.name for transfer in self._transfers.all()]
        needs_s = [schedule.covered_until_s(reader, needs_no_fetch, fetching) for reader in readers]
        soonest_s = min(needs_s, default=math.inf)
        return _time_until_s(soonest_s, schedule.now_s)

    def _waiting_for(self, waiting: list[Reader], visible: Visible) -> str | None:
        """Return the stage that most of these readers wait for, with the reason.

        Returns None without readers.

        Args:
            waiting: readers that wait.
            visible: returns whether the user may see a url.
        """
        if not waiting:
            return None
        stages = [reader.waiting_for for reader in waiting if reader.waiting_for is not None]
        commonest = max(set(stages), key=stages.count)
        if commonest != LISTING:
            return self._reasons.of_stage(commonest)
        patterns = next(reader.unresolved for reader in waiting if reader.unresolved)
        if not visible(self._reasons.awaited_pattern(patterns)):
            return LISTING
        return self._reasons.of_listing(patterns)


def _time_until_s(time_s: float, now_s: float) -> float | None:
    """Return the time until another time; 0 if that has passed, None if it never comes.

    Args:
        time_s: the other time, by the monotonic clock; infinite if it never comes.
        now_s: the present time.
    """
    if time_s == math.inf:
        return None
    return round(max(0.0, time_s - now_s), 3)
