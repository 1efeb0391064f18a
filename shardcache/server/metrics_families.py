"""The status page and the daemon's measures, named and typed as Prometheus has it. Counts nothing itself.

What grows with the users is bounded: a site has a few stores, and jobs are those that have readers and some that had.
No label is a url, and none holds what `status` hides.
"""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from shardcache import __version__
from shardcache.cache.transfers import Class
from shardcache.cache.waiting import Stage
from shardcache.errors import CacheError, OriginError, ShardcacheError, ShardError, codes
from shardcache.metrics import Histogram, Measures

Json = dict[str, Any]
Labels = Sequence[str]
Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]

GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily

_PREFIX = "shardcache_"
_MOST_STORES = 64
_MOST_JOBS = 256


@dataclass(frozen=True, slots=True)
class Row:
    """One number of the status page, and the metric that it is. Counters get their `_total` when they are written."""

    kind: Kind
    key: str
    name: str
    text: str


_DAEMON = (
    Row(GAUGE, "draining", "draining", "Whether the daemon has been told to stop."),
    Row(GAUGE, "tasks", "asyncio_tasks", "Tasks of the daemon's event loop."),
    Row(GAUGE, "threads", "threads", "Threads of the daemon."),
)
_CACHE = (
    Row(GAUGE, "capacity_bytes", "cache_capacity_bytes", "Most that the cache may hold."),
    Row(GAUGE, "used_bytes", "cache_used_bytes", "What the cache takes, with what is promised to shards on their way."),
    Row(GAUGE, "arriving_bytes", "cache_arriving_bytes", "What is promised to shards on their way, within used."),
    Row(GAUGE, "pinned_bytes", "cache_in_hand_bytes", "Shards that readers have in hand and that cannot go."),
    Row(GAUGE, "free_bytes", "cache_disk_free_bytes", "Free space of the cache's filesystem."),
    Row(GAUGE, "shards", "cache_shards", "Published shards."),
    Row(GAUGE, "leases", "cache_leases", "Shards in hand, counted once for each reader."),
)
_COUNTERS = (
    Row(COUNTER, "hits", "hits", "Leases granted from what was already published."),
    Row(COUNTER, "misses", "misses", "Leases that had to wait for a transfer."),
    Row(COUNTER, "evictions", "evictions", "Published shards removed, to make room or by command."),
    Row(COUNTER, "regrets", "regrets", "Shards fetched again that had been removed to make room."),
    Row(COUNTER, "corrupt", "corrupt_shards", "Shards found damaged: at arrival, when read again, or by the scrubber."),
    Row(COUNTER, "origin_bytes", "origin_received_bytes", "Bytes from stores, those of failed tries included."),
    Row(COUNTER, "origin_requests", "origin_requests", "Requests sent to stores."),
    Row(COUNTER, "retries", "origin_retries", "Requests sent again after a failure that may pass."),
    Row(COUNTER, "hedges", "hedges", "Parts asked for a second time, because the first request was late."),
    Row(COUNTER, "hedged_bytes", "hedged_bytes", "Bytes of whichever of two such requests was not needed."),
    Row(COUNTER, "paused", "paused_parts", "Times that a part gave up its connection to a more urgent one."),
)
_DISK = (
    Row(GAUGE, "healthy", "disk_healthy", "Whether the cache's disk is well; otherwise nothing new is fetched."),
    Row(GAUGE, "silent_s", "disk_silent_seconds", "For how long a question to the disk has had no answer."),
    Row(GAUGE, "short_bytes", "disk_short_bytes", "How much less of the disk is free than --min-free demands."),
)
_PINS = (
    Row(GAUGE, "shards", "pinned_shards", "Shards that somebody has pinned."),
    Row(GAUGE, "missing", "pinned_missing_shards", "Pinned shards that are not here."),
    Row(GAUGE, "size_bytes", "pinned_bytes", "What all pinned shards take, or will when they are here."),
    Row(GAUGE, "limit_bytes", "pinned_limit_bytes", "Most that may be pinned."),
)
_SCRUB = (
    Row(COUNTER, "scrubbed_bytes", "scrubbed_bytes", "Bytes of cached shards that were read again."),
    Row(COUNTER, "scrubbed_shards", "scrubbed_shards", "Cached shards that were read again and found sound."),
    Row(COUNTER, "damaged", "scrub_damaged_shards", "Cached shards that were read again and found damaged."),
    Row(GAUGE, "round_share", "scrub_round_ratio", "How much of the present round is done."),
    Row(GAUGE, "last_round_ended_at_s", "scrub_last_round_timestamp_seconds", "When the last whole round ended."),
)
_STORE = (
    Row(GAUGE, "connections", "store_connections", "Requests for parts under way."),
    Row(GAUGE, "limit", "store_connections_limit", "Requests at a time that the store seems to take."),
    Row(COUNTER, "busy", "store_throttled", "Times that the store asked for fewer requests: 503, 429."),
)
_JOB = (
    Row(GAUGE, "sessions", "job_sessions", "Connected readers."),
    Row(GAUGE, "waiting", "job_waiting_sessions", "Readers that have nothing to read at this moment."),
    Row(GAUGE, "ahead_s", "job_ahead_seconds", "Until the first reader needs what is not here; +Inf: all is."),
    Row(COUNTER, "shards_planned", "job_planned_shards", "Shards of the epochs that readers have begun."),
    Row(COUNTER, "shards_done", "job_done_shards", "Shards read and given back."),
)


def told(page: Json) -> Iterator[Metric]:
    """Yield what the status page tells; of some of it, all that is new is its name."""
    stores = [((store["name"],), store) for store in page["origins"][:_MOST_STORES]]
    # Not `job`: that is Prometheus' own label for what it scrapes.
    jobs = [((job["name"], str(job["uid"])), _with_ahead(job)) for job in page["jobs"][-_MOST_JOBS:]]
    yield _family(GAUGE, "build_info", "Which release this is.", [(_build(), 1)], ("version", "python"))
    yield from _table(_DAEMON, [((), page["process"] | {"draining": page["draining"]})])
    yield from _table(_CACHE, [((), page["cache"])])
    yield from _table(_COUNTERS, [((), page["counters"])])
    yield from _table(_DISK, [((), page["disk"] | {"healthy": page["disk"]["state"] == "ok"})])
    yield from _table(_PINS, [((), page["pins"])])
    yield from _table(_SCRUB, [((), page["scrub"])])
    yield from _table(_STORE, stores, ("store",))
    yield from _table(_JOB, jobs, ("job_name", "uid"))
    yield _waits(jobs)
    yield _transfers(page["transfers"])


def _build() -> Labels:
    return __version__, platform.python_version()


def _with_ahead(job: Json) -> Json:
    """Return a job that has an answer to how far ahead it is, or no readers that would need one."""
    never = math.inf if job["sessions"] else None
    return job | {"ahead_s": never if job["ahead_s"] is None else job["ahead_s"]}


def _table(rows: Iterable[Row], things: Sequence[tuple[Labels, Json]], names: Labels = ()) -> Iterator[Metric]:
    for row in rows:
        yield _family(row.kind, row.name, row.text, ((labels, thing[row.key]) for labels, thing in things), names)


def _waits(jobs: Iterable[tuple[Labels, Json]]) -> Metric:
    return _family(
        COUNTER,
        "job_wait_seconds",
        "How long readers had nothing to read, all together, by what was waited for.",
        (
            ((*labels, cause.removesuffix("_s")), spent_s)
            for labels, job in jobs
            for cause, spent_s in job["waited"].items()
        ),
        ("job_name", "uid", "cause"),
    )


def _transfers(transfers: Iterable[Json]) -> Metric:
    found = Counter((transfer["class"], transfer["stage"]) for transfer in transfers)
    kinds = [(klass.name.lower(), stage) for klass in Class for stage in Stage]
    counts = [((klass, stage.name.lower()), found[klass, stage.value]) for klass, stage in kinds]
    return _family(GAUGE, "transfers", "Shards on their way.", counts, ("class", "stage"))


def measured(measures: Measures, loop_lag: Histogram) -> Iterator[Metric]:
    """Yield what is no part of that page; on the event loop, which goes on measuring."""
    whole, stages = [((), measures.transfer)], measures.stage.by_label()
    yield _histogram("transfer_seconds", "What shards took, from the first question to publication.", whole)
    yield _histogram("transfer_stage_seconds", "What they spent in each stage of that.", stages, ("stage",))
    first, last = measures.first_byte.by_label(), measures.part.by_label()
    yield _histogram("first_byte_seconds", "From asking for a part to its first byte.", first, ("store",))
    yield _histogram("part_seconds", "From asking for a part to its last byte.", last, ("store",))
    waits = [((), measures.wait)]
    yield _histogram("lease_wait_seconds", "How long a reader had nothing to read, each time.", waits)
    given_up = _by_code(measures.given_up, OriginError)
    failed = _by_code(measures.failed, OriginError, ShardError, CacheError)
    yield _family(COUNTER, "origin_errors", "Requests to stores that failed for good.", given_up, ("code",))
    yield _family(COUNTER, "failed_transfers", "Shards that could not be fetched.", failed, ("code",))
    yield _histogram("event_loop_lag_seconds", "How late the event loop came to what was due.", [((), loop_lag)])


def _by_code(counts: Counter[str], *kinds: type[ShardcacheError]) -> list[tuple[Labels, float]]:
    # Those that never came, too: Prometheus takes no note of a counter's first step when it begins with that.
    return [((code,), counts[code]) for code in sorted(counts.keys() | set().union(*map(codes, kinds)))]


def _family(
    kind: Kind, name: str, text: str, samples: Iterable[tuple[Labels, float | None]], names: Labels = ()
) -> Metric:
    """Return a family; what is not known at present has no sample in it."""
    family = kind(_PREFIX + name, text, labels=names)
    for labels, value in samples:
        if value is not None:
            family.add_metric(labels, value)
    return family


def _histogram(name: str, text: str, samples: Iterable[tuple[Labels, Histogram]], names: Labels = ()) -> Metric:
    family = HistogramMetricFamily(_PREFIX + name, text, labels=names)
    for labels, histogram in samples:
        bounds = (*map(floatToGoString, histogram.bounds), "+Inf")
        family.add_metric(labels, list(zip(bounds, histogram.cumulative(), strict=True)), histogram.total)
    return family
