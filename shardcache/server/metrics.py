"""`/metrics`: the status page in Prometheus' format."""

import asyncio
import math
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import NamedTuple

from aiohttp import web
from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

from shardcache import __version__
from shardcache.cache.waiting.stages import Stage
from shardcache.cache.waiting.waits import Class
from shardcache.errors import CacheError, OriginError, ShardcacheError, ShardError, codes
from shardcache.metrics import Histogram, Measures
from shardcache.protocol import Json
from shardcache.server.service import SERVICE, peer_of, process_stats

Labels = Sequence[str]

GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily

_PREFIX = "shardcache_"
_MAX_ORIGINS = 64
_MAX_JOBS = 256


class Row(NamedTuple):
    """One number of the status page and its metric. Counters get their `_total` suffix on output."""

    kind: type[GaugeMetricFamily | CounterMetricFamily]
    key: str
    name: str
    text: str


_DAEMON = (
    Row(GAUGE, "draining", "draining", "1 while the daemon is shutting down."),
    Row(GAUGE, "tasks", "asyncio_tasks", "Tasks on the daemon's event loop."),
    Row(GAUGE, "threads", "threads", "Threads of the daemon."),
)
_CACHE = (
    Row(GAUGE, "capacity_bytes", "cache_capacity_bytes", "Maximum size of the cache."),
    Row(GAUGE, "used_bytes", "cache_used_bytes", "Space used by the cache, including space reserved for transfers."),
    Row(GAUGE, "reserved_bytes", "cache_reserved_bytes", "Space reserved for transfers, part of the used space."),
    Row(GAUGE, "leased_bytes", "cache_leased_bytes", "Size of the leased shards, which cannot be evicted."),
    Row(GAUGE, "free_bytes", "cache_disk_free_bytes", "Free space of the cache's filesystem."),
    Row(GAUGE, "shards", "cache_shards", "Published shards."),
    Row(GAUGE, "leases", "cache_leases", "Leases held by readers; a shard leased by two readers counts twice."),
)
_COUNTERS = (
    Row(COUNTER, "hits", "hits", "Leases granted from published shards."),
    Row(COUNTER, "misses", "misses", "Leases that had to wait for a transfer."),
    Row(COUNTER, "evictions", "evictions", "Published shards evicted, to free space or by command."),
    Row(COUNTER, "refetches", "refetches", "Shards re-fetched after having been evicted to free space."),
    Row(
        COUNTER,
        "corrupt",
        "corrupt_shards",
        "Shards found corrupt: on arrival, by a reader, by verify, or by the scrubber.",
    ),
    Row(
        COUNTER,
        "refused",
        "refused_shards",
        "Shards refused on arrival: cut short, with torn samples, or no tar.",
    ),
    Row(COUNTER, "origin_bytes", "origin_received_bytes", "Bytes received from origins, failed attempts included."),
    Row(COUNTER, "origin_requests", "origin_requests", "Requests sent to origins."),
    Row(COUNTER, "hit_bytes", "hit_bytes", "Size of the shards of leases granted from published shards."),
    Row(COUNTER, "tier_bytes", "tier_received_bytes", "Bytes received from the tier, failed requests included."),
    Row(COUNTER, "tier_requests", "tier_requests", "Requests sent to the tier."),
    Row(COUNTER, "tier_failures", "tier_failures", "Requests to the tier that failed; the origin was requested."),
    Row(COUNTER, "past_tier_bytes", "tier_bypassed_bytes", "Bytes received from origins that have a tier in front."),
    Row(COUNTER, "retries", "origin_retries", "Requests retried after a transient failure."),
    Row(COUNTER, "hedges", "hedges", "Hedged requests: parts requested a second time because the first was late."),
    Row(COUNTER, "hedged_bytes", "hedged_bytes", "Bytes received by the losing request of a hedged pair."),
    Row(COUNTER, "paused", "paused_parts", "Parts paused to give their connection to a more urgent one."),
)
_BILL = (
    Row(COUNTER, "read_bytes", "read_bytes", "Size of the shards that readers have read."),
    Row(COUNTER, "read_requests", "reads", "Shards that readers have read and released."),
    Row(COUNTER, "read_cost", "read_cost", "Price of these, a request each, if prices are set."),
    Row(COUNTER, "fetched_cost", "fetched_cost", "Price of what was fetched from origins, if prices are set."),
)
_DISK = (
    Row(GAUGE, "healthy", "disk_healthy", "1 if the cache disk is healthy; while 0, nothing new is fetched."),
    Row(GAUGE, "silent_s", "disk_silent_seconds", "Time for which the disk has not responded; 0 if it responds."),
    Row(GAUGE, "short_bytes", "disk_short_bytes", "Part of the capacity that other files on the disk take."),
)
_PINS = (
    Row(GAUGE, "shards", "pinned_shards", "Pinned shards."),
    Row(GAUGE, "missing", "pinned_missing_shards", "Pinned shards that are not cached."),
    Row(GAUGE, "size_bytes", "pinned_bytes", "Total size of the pinned shards, missing ones included."),
    Row(GAUGE, "limit_bytes", "pinned_limit_bytes", "Maximum total size of the pinned shards."),
)
_SCRUB = (
    Row(COUNTER, "scrubbed_bytes", "scrubbed_bytes", "Bytes of cached shards read by the scrubber."),
    Row(COUNTER, "scrubbed_shards", "scrubbed_shards", "Cached shards that the scrubber found intact."),
    Row(COUNTER, "corrupt", "scrub_corrupt_shards", "Cached shards that the scrubber found corrupt."),
    Row(GAUGE, "round_share", "scrub_round_ratio", "Completed fraction of the current scrub round."),
    Row(GAUGE, "last_round_ended_at_s", "scrub_last_round_timestamp_seconds", "End of the last complete scrub round."),
)
_ORIGIN = (
    Row(GAUGE, "connections", "origin_connections", "Part requests in progress."),
    Row(GAUGE, "limit", "origin_connections_limit", "Current limit on concurrent requests, adapted to the origin."),
    Row(COUNTER, "throttled", "origin_throttled", "Requests that the origin throttled (503, 429)."),
)
_TIER = (
    Row(GAUGE, "failing", "tier_failing", "1 while the tier is requested only by probes, after failures."),
    Row(GAUGE, "stale", "tier_stale", "1 while this node's nginx uses an old list of nodes or old certificates."),
    Row(GAUGE, "certificate_expires_s", "tier_certificate_expiry_timestamp_seconds", "Expiry; +Inf if there is none."),
    Row(GAUGE, "owners_left_out", "tier_left_out_owners", "Nodes whose part of the tier is left out for being slow."),
    Row(COUNTER, "store_bytes", "tier_store_bytes", "Bytes that this node's nginx received from origins."),
    Row(GAUGE, "cached_bytes", "tier_cached_bytes", "Size of the parts that this node's nginx has cached."),
)
_JOB = (
    Row(GAUGE, "sessions", "job_sessions", "Connected readers."),
    Row(GAUGE, "waiting", "job_waiting_sessions", "Readers that are waiting for data now."),
    Row(GAUGE, "ahead_s", "job_ahead_seconds", "Time until a reader needs a missing shard; +Inf if none is missing."),
    Row(COUNTER, "shards_planned", "job_planned_shards", "Shards in the epochs that readers have started."),
    Row(COUNTER, "shards_done", "job_done_shards", "Shards read and released."),
    Row(COUNTER, "samples_unmatched", "job_unmatched_samples", "Samples without one of their key in joined shards."),
)


def page_metrics(page: Json) -> Iterator[Metric]:
    """Yield the metrics made from the status page."""
    build = {"version": __version__, "python": platform.python_version()}
    yield _family(GAUGE, "build_info", "Release and Python version.", [([*build.values()], 1)], [*build])
    for rows, figures in (
        (_DAEMON, page["process"] | {"draining": page["draining"]}),
        (_CACHE, page["cache"]),
        (_COUNTERS, page["counters"]),
        (_BILL, page["bill"]),
        (_DISK, page["disk"] | {"healthy": page["disk"]["state"] == "ok"}),
        (_PINS, page["pins"]),
        (_SCRUB, page["scrub"]),
    ):
        yield from _table(rows, [((), figures)])
    origins = [((origin["name"],), origin) for origin in page["origins"][:_MAX_ORIGINS]]
    yield from _table(_ORIGIN, origins, ("origin",))
    limits = sorted((limit["name"], limit["holds"]) for limit in page["limits"])  # of equal names, the last one counts
    text = "1 while a limit holds transfers back: bandwidth, connections, throttling, space, disk, or errors."
    yield _family(GAUGE, "limit_holding", text, [((name,), holds) for name, holds in dict(limits).items()], ("limit",))
    # Without an end of its certificates, a tier's is infinitely far away.
    tiers = [tier | {"certificate_expires_s": tier["certificate_expires_s"] or math.inf} for tier in page["tiers"]]
    yield from _table(_TIER, [((tier["address"],), tier) for tier in tiers], ("tier",))
    # Not `job`: that is Prometheus' own label for its scrape targets.
    jobs = [((job["name"], str(job["uid"])), _with_ahead(job)) for job in page["jobs"][:_MAX_JOBS]]
    yield from _table(_JOB, jobs, ("job_name", "uid"))
    waits = [((*job, cause.removesuffix("_s")), s) for job, row in jobs for cause, s in row["waited"].items()]
    text = "Time that readers spent waiting for data, summed over readers, by cause."
    yield _family(COUNTER, "job_wait_seconds", text, waits, ("job_name", "uid", "cause"))
    found = Counter((transfer["class"], transfer["stage"]) for transfer in page["transfers"])
    kinds = [(klass.name.lower(), stage) for klass in Class for stage in Stage]
    counts = [((klass, stage.name.lower()), found[klass, stage.value]) for klass, stage in kinds]
    yield _family(GAUGE, "transfers", "Shards being fetched.", counts, ("class", "stage"))


def _with_ahead(job: Json) -> Json:
    """Return a job whose `ahead_s` is infinite if nothing is missing, and None if it has no readers."""
    never = math.inf if job["sessions"] else None
    return job | {"ahead_s": never if job["ahead_s"] is None else job["ahead_s"]}


def _table(rows: Iterable[Row], things: Sequence[tuple[Labels, Json]], names: Labels = ()) -> Iterator[Metric]:
    for row in rows:
        samples = [(labels, thing[row.key]) for labels, thing in things]
        yield _family(row.kind, row.name, row.text, samples, names)


def measured(measures: Measures, loop_lag: Histogram) -> Iterator[Metric]:
    """Yield the metrics that are not on the status page. Call on the event loop, which updates the measures."""
    for name, text, histogram in (
        ("transfer_seconds", "Duration of a transfer, from its first request to publication.", measures.transfer),
        ("lease_wait_seconds", "Duration of each wait of a reader for data.", measures.wait),
        ("event_loop_lag_seconds", "Lag of the event loop's timers.", loop_lag),
    ):
        yield _histogram(name, text, [((), histogram)])
    for name, text, label, histograms in (
        ("transfer_stage_seconds", "Time that a transfer spent in each stage.", "stage", measures.stage),
        ("first_byte_seconds", "Time from a request for parts to its first byte.", "origin", measures.first_byte),
        ("part_seconds", "Time from a request for parts to its last byte.", "origin", measures.part),
    ):
        yield _histogram(name, text, histograms.by_label(), (label,))
    given_up = _by_code(measures.given_up, OriginError)
    failed = _by_code(measures.failed, OriginError, ShardError, CacheError)
    yield _family(COUNTER, "origin_errors", "Requests to origins that failed permanently.", given_up, ("code",))
    yield _family(COUNTER, "failed_transfers", "Shards that could not be fetched.", failed, ("code",))


def _by_code(counts: Counter[str], *kinds: type[ShardcacheError]) -> list[tuple[Labels, float]]:
    # Include codes that never occurred: Prometheus misses a counter's first increment if its series begins with it.
    return [((code,), counts[code]) for code in sorted(counts.keys() | set().union(*map(codes, kinds)))]


def _family(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    samples: Iterable[tuple[Labels, float | None]],
    names: Labels = (),
) -> Metric:
    """Return a metric family; values that are None get no sample."""
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


async def metrics(request: web.Request) -> web.Response:
    """Return every metric as text, or as OpenMetrics if the request asks for it."""
    service = request.app[SERVICE]
    page = service.status(peer_of(request)) | {"process": process_stats()}
    measures = list(measured(service.cache.measures, service.loop_lag.since_start))
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))

    def written() -> bytes:
        families = [*page_metrics(page), *measures, *ProcessCollector(registry=None).collect()]
        return encode(SimpleNamespace(collect=lambda: families))

    # In a thread: writing a thousand lines takes too long for the event loop.
    body = await asyncio.get_running_loop().run_in_executor(service.writer, written)
    return web.Response(body=body, headers={"Content-Type": content_type})
