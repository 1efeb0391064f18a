"""Status page of the cache, as shown by `status` and `top`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from shardcache.cache.catalog.aliases import AliasTable
from shardcache.cache.planner import Planner
from shardcache.cache.readers.jobs import Job
from shardcache.cache.readers.readers import Reader, Readers
from shardcache.cache.transfers.prefetch import Prefetcher
from shardcache.cache.transfers.transfers import Transfer, Transfers
from shardcache.cache.transfers.waiting import Stage
from shardcache.errors import CacheError
from shardcache.fetch.download import Downloader
from shardcache.metrics import Counters
from shardcache.origin.tier_client import TierState
from shardcache.plan.schedule import Schedule
from shardcache.redact import HIDDEN, redact
from shardcache.store.disk import free_bytes
from shardcache.store.store import Store
from shardcache.units import size

Json = dict[str, Any]


class Overview:
    """Read-only view of the whole cache."""

    def __init__(
        self,
        store: Store,
        planner: Planner,
        aliases: AliasTable,
        transfers: Transfers,
        readers: Readers,
        prefetcher: Prefetcher,
        downloader: Downloader,
        tiers: Iterable[TierState],
        counters: Counters,
    ) -> None:
        self._store = store
        self._planner = planner
        self._aliases = aliases
        self._transfers = transfers
        self._readers = readers
        self._prefetcher = prefetcher
        self._downloader = downloader
        self._tiers = tiers
        self._counters = counters

    def page(self, sight: Callable[[str], bool] = lambda _: True) -> Json:
        """Return cache, counters, transfers and jobs; urls that `sight` rejects are hidden."""
        space = self._store.space
        return {
            "cache": {
                "dir": str(self._store.layout.root),
                "capacity_bytes": space.capacity_bytes,
                "used_bytes": space.used_bytes,
                "free_bytes": self._free_bytes(),
                "leased_bytes": self._leased_bytes(),
                "leases": sum(shard.leases for shard in self._readers.inventory.leased),
                "reserved_bytes": space.reserved_bytes,
                "shards": len(self._store.shards),
            },
            "counters": self._counters.to_json() | {"paused": self._downloader.pauses},
            "origins": [asdict(load) for load in self._downloader.loads()],
            "tiers": [tier.to_json() for tier in self._tiers],
            "transfers": [self._transfer(transfer, sight) for transfer in self._transfers.all()],
            "jobs": self._jobs(),
        }

    def reason(self, transfer: Transfer) -> str:
        """Return a human-readable reason why a transfer has not finished yet."""
        stage, space = transfer.stages.present, self._store.space
        if stage is not Stage.SPACE:
            failed = self._downloader.failing.get(transfer.ref.url)
            return f"{stage.value}; {failed}" if failed else stage.value
        leased, pinned, arriving = map(size, (self._leased_bytes(), space.pinned_bytes, space.reserved_bytes))
        pins = f", {pinned} pinned" if space.pinned_bytes else ""
        return (
            f"{stage.value}: {space.explanation}, {leased} of it leased{pins}, {arriving} reserved by transfers; "
            f"each reader needs space for shuffle_window + 1 shards, two without shuffling ({space.remedy})"
        )

    def _free_bytes(self) -> int | None:
        try:
            return free_bytes(self._store.layout.root)
        except CacheError:  # reported under `disk`
            return None

    def _leased_bytes(self) -> int:
        return sum(shard.kept_bytes for shard in self._readers.inventory.leased)

    def _transfer(self, transfer: Transfer, sight: Callable[[str], bool]) -> Json:
        now, url = self._planner.now, transfer.ref.url
        failed = self._downloader.failing.get(url) if sight(url) else None
        shown = {"url": redact(url) if sight(url) else HIDDEN, "last_error": None if failed is None else str(failed)}
        return (
            transfer.to_json()
            | shown
            | {"needed_in_s": _ahead(now.next_use_s(self._aliases.key(transfer.name)), now.now_s)}
        )

    def _jobs(self) -> list[Json]:
        now, coming = self._planner.now, [transfer.name for transfer in self._transfers.all()]
        readers: defaultdict[tuple[str, int], list[Reader]] = defaultdict(list)
        for reader in self._readers:
            readers[reader.job.key].append(reader)
        jobs = sorted(self._readers.jobs(), key=lambda job: not job.sessions)
        return [self._job(job, readers[job.key], now, coming) for job in jobs]

    def _job(self, job: Job, readers: list[Reader], now: Schedule, coming: list[str]) -> Json:
        for reader in readers:
            reader.charge()
        stages = [stage for reader in readers if (stage := reader.waiting_for) is not None]
        needs_s = (now.covered_until_s(reader, self._prefetcher.is_cared_for, coming) for reader in readers)
        return job.to_json() | {
            "shards_per_s": round(sum(map(now.shards_per_s, readers)), 4),
            "ahead_s": _ahead(min(needs_s, default=math.inf), now.now_s),  # None if everything planned is cached
            "waiting": len(stages),
            "waiting_for": max(set(stages), key=stages.count).value if stages else None,
        }


def _ahead(moment_s: float, now_s: float) -> float | None:
    return None if moment_s == math.inf else round(max(0.0, moment_s - now_s), 3)
