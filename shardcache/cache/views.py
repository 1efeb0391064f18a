"""Views of the cache: the status page, as `status` and `top` show it, and what open dashboard pages show beyond it.

The dashboard's part is refreshed at most once a second, however many pages are open, and not at all when none is; on a
node with many shards less often, so that it takes a small share of a core.
"""

import asyncio
import bisect
import enum
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from shardcache.access import store_of
from shardcache.cache.readers import LISTING, Job, Reader, Readers
from shardcache.cache.transfers import Prefetcher
from shardcache.cache.waits import RECENT_S, Class, Holder, JobKey, Stage, Transfer
from shardcache.errors import CacheError, ShardError
from shardcache.fetch.download import Downloader
from shardcache.fetch.scheduler import Limit
from shardcache.origin.registry import Origins
from shardcache.plan.schedule import Schedule
from shardcache.plan.timeline import NEVER
from shardcache.protocol import Json
from shardcache.redact import HIDDEN, redact
from shardcache.store.disk.mounts import free_bytes
from shardcache.store.shard import Shard
from shardcache.units import size, user_name

Visible = Callable[[str], bool]
"""Predicate: may the caller see this url?"""

# A little less than the pages' interval, so that no page gets the same state twice.
_PERIOD_S = 0.9
_SHARE = 0.04  # share of the time that refreshing lanes and map may take

# Lanes: how far ahead, in how many intervals, and how many positions are examined per reader: one shard per second.
HORIZON_S = 300.0
BINS = 60
_MAX_USES = 300
_SOONEST = 5
_MAX_GAPS = 12

# The map's bands: needed within this many seconds; after these, needed later; then in no plan.
BANDS_S = (60.0, 300.0, 900.0, 3600.0)
LEASED, UNPLANNED = -1, len(BANDS_S) + 1
# As many cells as a picture can show; a larger cache is shown in part.
_MAX_CELLS = 20_000
# After a restart only the shards' keys are known: each refresh reads sidecars for this long.
_READING_S = 0.5
_READ_AT_ONCE = 256
_MAX_HOLDERS = 3  # jobs named as holding space
_MAX_PATTERNS = 256  # of a reader, among which the one that is being asked about is searched


class Presence(enum.StrEnum):
    """State of a shard that a reader will need."""

    CACHED = "cached"
    FETCHING = "fetching"
    MISSING = "missing"
    FAILED = "failed"  # missing, and not prefetched again


class Use(NamedTuple):
    """One job's need of one shard in `in_s` seconds, at the reader's pace; 0 if it is already waiting or reading."""

    in_s: float
    url: str
    client: JobKey
    presence: Presence

    def to_json(self, visible: Visible) -> Json:
        """Return the use as JSON; the url is hidden unless it is `visible`."""
        job, uid = self.client
        place = {"url": _shown(self.url, visible), "job": job, "uid": uid}
        return {"in_s": round(self.in_s, 2), **place, "presence": self.presence.value}


@dataclass(slots=True)
class Lane:
    """The shards that one job's readers need in the next minutes, and whether they are cached."""

    client: JobKey
    # By presence, the number of shards needed in each of the horizon's equal intervals.
    counts: dict[Presence, list[int]] = field(default_factory=lambda: {each: [0] * BINS for each in Presence})
    looked_s: float = HORIZON_S  # how far ahead all of its readers' plans were examined
    soonest: list[Use] = field(default_factory=list)  # the first few
    gaps: list[Use] = field(default_factory=list)  # the first few of shards that are not cached

    def add(self, uses: Sequence[Use]) -> None:
        """Add one reader's uses, soonest first."""
        for use in uses:
            self.counts[use.presence][min(int(use.in_s * BINS / HORIZON_S), BINS - 1)] += 1
        if len(uses) == _MAX_USES:
            self.looked_s = min(self.looked_s, uses[-1].in_s)
        missing = (use for use in uses if use.presence is not Presence.CACHED)
        self.soonest = sorted([*self.soonest, *uses[:_SOONEST]])[:_SOONEST]
        self.gaps = sorted([*self.gaps, *itertools.islice(missing, _MAX_GAPS)])[:_MAX_GAPS]

    def to_json(self, visible: Visible) -> Json:
        """Return the timeline as JSON; urls that are not `visible` are hidden."""
        name, uid = self.client
        counts = {presence.value: counts for presence, counts in self.counts.items()}
        soonest = [use.to_json(visible) for use in self.soonest]
        return {"name": name, "uid": uid, "looked_s": self.looked_s, "counts": counts, "soonest": soonest}


def gaps(lanes: Iterable[Lane]) -> list[Use]:
    """Return the soonest uses of shards that are not cached, one per shard, over all jobs.

    A shard that is being fetched is always among them: its transfer is shown, with the job that it is for.
    """
    soonest: dict[str, Use] = {}
    for use in sorted(use for lane in lanes for use in lane.gaps):
        soonest.setdefault(use.url, use)
    uses = enumerate(soonest.values())
    return [use for number, use in uses if number < _MAX_GAPS or use.presence is Presence.FETCHING]


class Cell(NamedTuple):
    """One cached shard of the map; `band` is LEASED, UNPLANNED, or the index in `BANDS_S` of its next use."""

    url: str
    band: int
    size_bytes: int
    pinned: bool


class Overview:
    """A read-only view of the whole cache. Urls that are not `visible` are hidden."""

    def __init__(self, readers: Readers, prefetcher: Prefetcher, downloader: Downloader, origins: Origins) -> None:
        self.looks = self.maps = 0  # refreshes of the live part, and those that included lanes and map
        self._readers = readers
        self._transfers = readers.leasing.transfers
        self._residency = readers.leasing.residency
        self._planner = self._residency.planner
        self._store = self._residency.store
        self._prefetcher = prefetcher
        self._downloader = downloader
        self._origins = origins
        self._lanes: list[Lane] = []
        self._cells: list[Cell] = []
        self._urls: dict[str, str] = {}  # of cached shards, by key; empty if the sidecar cannot be read
        self._looking = asyncio.Lock()
        self._looked_s = self._due_s = -math.inf

    # The status page

    def page(self, visible: Visible) -> Json:
        """Return cache, counters, transfers and jobs."""
        space, scheduler = self._store.space, self._downloader.scheduler
        return {
            "cache": {
                "dir": str(self._store.layout.root),
                "capacity_bytes": space.capacity_bytes,
                "used_bytes": space.used_bytes,
                "free_bytes": self._free_bytes(),
                "leased_bytes": self._leased_bytes(),
                "leases": sum(shard.leases for shard in self._residency.leased),
                "reserved_bytes": space.reserved_bytes,
                "shards": len(self._store.shards),
            },
            "counters": self._residency.counters.to_json() | {"paused": scheduler.pauses},
            "bill": self._residency.counters.bills.to_json(),
            "limits": [limit._asdict() for limit in self._limits(visible)],
            "origins": [asdict(load) for load in scheduler.loads()],
            "tiers": [tier.to_json() for tier in self._origins.tiers.values()],
            "transfers": [self._transfer(transfer, visible) for transfer in self._transfers.all()],
            "refused": [exn.to_json() for exn in self.refused(visible)],
            "jobs": self._jobs(visible),
        }

    def refused(self, visible: Visible) -> list[ShardError]:
        """Return the errors of the `visible` shards that were refused when they last arrived, latest last."""
        return [exn for url, exn in self._transfers.refusals.items() if visible(url)]

    def reason(self, transfer: Transfer) -> str:
        """Return a human-readable reason why a transfer has not finished yet."""
        stage, remedy = transfer.stages.present, self._store.space.remedy
        if stage is Stage.SPACE:
            needs = "each rank needs space for shuffle_window + 1 shards, two without shuffling"
            return f"{stage.value}: {self._space()}; {needs} ({remedy})"
        failed = self._downloader.failing.get(transfer.ref.url)
        return f"{stage.value}; {failed}" if failed else self._limited(stage, transfer.ref.url)

    def _limited(self, stage: str, url: str | None = None) -> str:
        """Return a stage with the limit that holds its transfers back, if one does."""
        holding = [limit.text for limit in self._downloader.limits(url) if limit.holds]
        if holding and stage == Stage.NETWORK:
            return f"{stage}, limited by {holding[0]}"
        return str(stage)

    def _space(self) -> str:
        """Return the capacity in words, and who holds what of it."""
        space, held = self._store.space, defaultdict[JobKey, set[Shard]](set)
        for reader in self._readers:
            held[reader.client].update(reader.retained())
        sizes = {f"{name} of {user_name(uid)}": sum(s.kept_bytes for s in held[name, uid]) for name, uid in held}
        largest = sorted(filter(sizes.get, sizes), key=sizes.__getitem__, reverse=True)[:_MAX_HOLDERS]
        by = f" ({', '.join(f'{who} {size(sizes[who])}' for who in largest)})" if largest else ""
        pins = f", {size(space.pinned_bytes)} pinned" if space.pinned_bytes else ""
        leased, arriving = size(self._leased_bytes()), size(space.reserved_bytes)
        return f"{space.explanation}, {leased} of it leased{by}{pins}, {arriving} reserved by transfers"

    def _limits(self, visible: Visible) -> Iterator[Limit]:
        """Yield what may hold readers back: configured limits, and whatever does now."""
        yield from self._downloader.limits()
        transfers = self._transfers.all()
        yield Limit("space", self._space(), any(each.stages.present is Stage.SPACE for each in transfers))
        if checked := [each for each in transfers if each.stages.present is Stage.DISK]:
            waiting = any(each.klass is Class.WAITING for each in checked)
            yield Limit("disk", f"arrived shards being checked and indexed: {len(checked)}", waiting)
        failing = [str(failed) for url, failed in self._downloader.failing.items() if visible(url)]
        if failing:
            yield Limit("errors", f"requests repeated after errors: {len(failing)}; {failing[-1]}", holds=True)

    def listing_reason(self, patterns: Sequence[str]) -> str:
        """Return why patterns are not resolved yet, for people: the store, and its latest error."""
        pattern = self._asked(patterns)
        failed = self._downloader.failing.get(pattern)
        reason = f"{LISTING} of {store_of(pattern)}"
        return f"{reason}; {failed}" if failed else reason

    def _asked(self, patterns: Sequence[str]) -> str:
        """Return the pattern that its origin is being asked about; the first if that is unknown."""
        asking = self._downloader.asking
        return next((each for each in patterns[:_MAX_PATTERNS] if each in asking), patterns[0])

    def _free_bytes(self) -> int | None:
        try:
            return free_bytes(self._store.layout.root)
        except CacheError:  # reported under `disk`
            return None

    def _leased_bytes(self) -> int:
        return sum(shard.kept_bytes for shard in self._residency.leased)

    def _transfer(self, transfer: Transfer, visible: Visible) -> Json:
        now, url = self._planner.now, transfer.ref.url
        failed = self._downloader.failing.get(url) if visible(url) else None
        return {
            "url": _shown(url, visible),
            **transfer.to_json(),
            "last_error": None if failed is None else str(failed),
            "needed_in_s": _ahead(now.next_use_s(self._planner.key(transfer.name)), now.now_s),
        }

    def _jobs(self, visible: Visible) -> list[Json]:
        readers: defaultdict[JobKey, list[Reader]] = defaultdict(list)
        for reader in self._readers:
            reader.charge()
            readers[reader.client].append(reader)
        jobs = sorted(self._readers.jobs(), key=lambda job: not job.sessions)
        return [self._job(job, readers[job.key], visible) for job in jobs]

    def _job(self, job: Job, readers: list[Reader], visible: Visible) -> Json:
        now = self._planner.now
        waiting = [reader for reader in readers if reader.waiting_for is not None]
        recently_s = sum(reader.recently_waited_s() for reader in readers)
        return job.to_json() | {
            "bill": self._residency.counters.bills.to_json(job.key),
            "shards_per_s": round(sum(map(now.shards_per_s, readers)), 4),
            "ahead_s": self._ahead_s(readers),
            "waiting": len(waiting),
            "waiting_for": self._waiting_for(waiting, visible),
            "waiting_s": _longest_s(waiting),
            "waiting_share": round(recently_s / (RECENT_S * len(readers)), 4) if readers else 0.0,
        }

    def _ahead_s(self, readers: list[Reader]) -> float | None:
        """Return the time until a reader needs a missing shard; None if all planned ones are cached."""
        if any(reader.resolving for reader in readers):
            return 0.0
        now = self._planner.now
        coming = [transfer.name for transfer in self._transfers.all()]
        is_cared_for = self._prefetcher.is_cared_for
        needs_s = (now.covered_until_s(reader, is_cared_for, coming) for reader in readers)
        return _ahead(min(needs_s, default=math.inf), now.now_s)

    def _waiting_for(self, waiting: list[Reader], visible: Visible) -> str | None:
        """Return what most of the waiting readers wait for; None if there are none."""
        if not waiting:
            return None
        stages = [reader.waiting_for or "" for reader in waiting]
        stage = max(set(stages), key=stages.count)
        if stage != LISTING:
            return self._limited(stage)
        resolving = next(reader.resolving for reader in waiting if reader.resolving)
        return self.listing_reason(resolving) if visible(self._asked(resolving)) else LISTING

    # The live part: waiting readers, needs of the next minutes, and the map of cached shards

    async def look(self) -> None:
        """Refresh the live part, lanes and map included if they are due, unless that was done just now."""
        async with self._looking:
            begun_s = time.monotonic()
            if begun_s - self._looked_s < _PERIOD_S:
                return
            self._looked_s = begun_s
            if begun_s >= self._due_s:
                self._lanes = await self._look_ahead()
                is_complete = await self._look_at_shards()
                self._due_s = begun_s + (time.monotonic() - begun_s) / _SHARE if is_complete else begun_s
                self.maps += 1
            self.looks += 1

    def outlook(self, visible: Visible) -> Json:
        """Return the present waits, and each job's next minutes with the missing shards as of the last refresh."""
        return {
            "waits": list(self._waits(visible)),
            "lanes": [lane.to_json(visible) for lane in self._lanes],
            "gaps": [use.to_json(visible) for use in gaps(self._lanes)],
        }

    async def map(self, visible: Visible) -> Json:
        """Return the number of cached shards, and the visible ones by folder: rows of name, band, size, 1 if pinned."""
        folders: defaultdict[str, list[Any]] = defaultdict(list)

        def add(cells: Iterable[Cell]) -> None:
            for cell in cells:
                if visible(cell.url):
                    folder, slash, name = redact(cell.url).rpartition("/")
                    folders[folder + slash].append([name, cell.band, cell.size_bytes, int(cell.pinned)])

        await self._readers.turns.take(self._cells, add)
        return {"shards": len(self._store.shards), "folders": folders}

    def _waits(self, visible: Visible) -> Iterator[Json]:
        """Yield, for each shard or listing and job, how many readers wait for it, how long and why."""
        yield from self._waits_for_listings(visible)
        for transfer in self._transfers.all():
            since_s: defaultdict[JobKey | None, list[float]] = defaultdict(list)
            for wait in transfer.waits:
                if wait.since_s is not None:
                    since_s[wait.client].append(wait.since_s)
            url = transfer.ref.url
            for client, begun_s in since_s.items():
                job, uid = client or (None, None)
                yield {
                    "job": job,
                    "uid": uid,
                    "readers": len(begun_s),
                    "for_s": round(time.monotonic() - min(begun_s), 1),
                    "url": _shown(url, visible),
                    "reason": self.reason(transfer) if visible(url) else transfer.stages.present.value,
                }

    def _waits_for_listings(self, visible: Visible) -> Iterator[Json]:
        waiting: defaultdict[tuple[JobKey, str], list[Reader]] = defaultdict(list)
        for reader in self._readers:
            if reader.resolving:
                waiting[reader.client, self._asked(reader.resolving)].append(reader)
        for ((job, uid), pattern), readers in waiting.items():
            yield {
                "job": job,
                "uid": uid,
                "readers": len(readers),
                "for_s": _longest_s(readers),
                "url": _shown(pattern, visible),
                "reason": self.listing_reason([pattern]) if visible(pattern) else LISTING,
            }

    async def _look_ahead(self) -> list[Lane]:
        """Return a lane for each job with readers, sharing the event loop between readers."""
        lanes: dict[JobKey, Lane] = {}
        for reader in self._readers:
            await self._readers.turns.wait()
            now, client = self._planner.now, reader.client
            lanes.setdefault(client, Lane(client)).add(
                [
                    Use(max(0.0, use_s - now.now_s), reader.ref(position).url, client, self._presence(name))
                    for use_s, position, name in now.ahead(reader, now.now_s + HORIZON_S, _MAX_USES)
                ]
            )
        return list(lanes.values())

    def _presence(self, name: str) -> Presence:
        if self._planner.key(name) in self._store.shards:
            return Presence.CACHED
        if name in self._transfers:
            return Presence.FETCHING
        return Presence.FAILED if name in self._transfers.failures else Presence.MISSING

    async def _look_at_shards(self) -> bool:
        """Refresh the map; return False while it lacks shards whose sidecars have not been read yet."""
        shards = list(itertools.islice(self._store.shards.values(), _MAX_CELLS))
        is_complete = await self._learn_urls(shards)
        cells: list[Cell] = []

        def add(some: Iterable[Shard]) -> None:
            now = self._planner.now
            cells.extend(
                Cell(url, _band(shard, now), shard.size_bytes, shard.pinned)
                for shard in some
                if (url := self._urls.get(shard.key))
            )

        await self._readers.turns.take(shards, add)
        self._cells = cells
        return is_complete

    async def _learn_urls(self, shards: Sequence[Shard]) -> bool:
        """Learn the urls of shards, if need be from their sidecars; return False if some are left for the next time."""
        known, until_s = self._urls, time.monotonic() + _READING_S
        self._urls = {shard.key: known[shard.key] for shard in shards if shard.key in known}
        self._urls |= {shard.key: shard.facts.url for shard in shards if shard.facts is not None}
        unread = [shard for shard in shards if shard.key not in self._urls]
        for first in range(0, len(unread), _READ_AT_ONCE):
            if time.monotonic() > until_s:
                return False
            some = unread[first : first + _READ_AT_ONCE]
            for shard, facts in zip(some, await self._store.peek(some), strict=True):
                self._urls[shard.key] = facts.url if facts else ""  # damaged: its next use or check quarantines it
        return True


def _longest_s(readers: Iterable[Reader]) -> float | None:
    """Return the length of the longest present wait of these readers; None if none waits."""
    since_s = [reader.waits_since_s for reader in readers if reader.waits_since_s is not None]
    return round(time.monotonic() - min(since_s), 1) if since_s else None


def _shown(url: str, visible: Visible) -> str:
    return redact(url) if visible(url) else HIDDEN


def _ahead(moment_s: float, now_s: float) -> float | None:
    return None if moment_s == math.inf else round(max(0.0, moment_s - now_s), 3)


def _band(shard: Shard, now: Schedule[Holder]) -> int:
    if shard.leases:
        return LEASED
    use_s = now.next_use_s(shard.key)
    return UNPLANNED if use_s == NEVER else bisect.bisect_left(BANDS_S, use_s - now.now_s)
