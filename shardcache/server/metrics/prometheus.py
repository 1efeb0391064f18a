"""`/metrics`: the status page in Prometheus' format.

The status page is the JSON of `/v1/status`. Most metrics come from it, by the tables of
`metric_rows`; the histograms come from the measures of `telemetry.metrics`.
"""

import asyncio
import math
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace

from aiohttp import web
from prometheus_client import ProcessCollector
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

from shardcache import __version__
from shardcache.cache.waiting.stages import Stage
from shardcache.cache.waiting.waits import PriorityClass
from shardcache.errors import CacheError, OriginError, ShardcacheError, ShardError, codes
from shardcache.server.metrics import metric_rows as rows
from shardcache.server.metrics.metric_rows import COUNTER, GAUGE, MetricKind, Row
from shardcache.server.peer import peer_of
from shardcache.server.process.process_load import process_stats
from shardcache.server.service import SERVICE
from shardcache.shared.protocol import Json
from shardcache.telemetry.metrics import Histogram, Histograms, Measures

Labels = Sequence[str]

_PREFIX = "shardcache_"
# Only this number of origins and of jobs is shown: Prometheus keeps several time series for each.
_MAX_ORIGINS = 64
_MAX_JOBS = 256


def page_metrics(page: Json) -> Iterator[Metric]:
    """Yield the metrics made from the status page."""
    yield _build_info()
    yield from _table(rows.DAEMON, [((), page["process"] | {"draining": page["draining"]})])
    yield from _table(rows.CACHE, [((), page["cache"])])
    yield from _table(rows.COUNTERS, [((), page["counters"])])
    yield from _table(rows.BILL, [((), page["bill"])])
    yield from _table(rows.DISK, [((), page["disk"] | {"healthy": page["disk"]["state"] == "ok"})])
    yield from _table(rows.PINS, [((), page["pins"])])
    yield from _table(rows.SCRUB, [((), page["scrub"])])

    origins = page["origins"][:_MAX_ORIGINS]
    yield from _table(rows.ORIGIN, [((each["name"],), each) for each in origins], ("origin",))
    yield _limits(page["limits"])
    tiers = [((tier["address"],), _with_expiry(tier)) for tier in page["tiers"]]
    yield from _table(rows.TIER, tiers, ("tier",))
    yield from _jobs(page["jobs"][:_MAX_JOBS])
    yield _transfers(page["transfers"])


def _build_info() -> Metric:
    """Return the metric whose labels state the release and the Python version."""
    build = {"version": __version__, "python": platform.python_version()}
    sample = (list(build.values()), 1)
    return _family(GAUGE, "build_info", "Release and Python version.", [sample], list(build))


def _limits(limits: list[Json]) -> Metric:
    """Return the metric that shows which limits hold transfers back."""
    # Several limits may have the same name: each throttling origin has one. The metric is 1 if any
    # of them holds transfers back.
    by_name: dict[str, bool] = {}
    for limit in limits:
        by_name[limit["name"]] = limit["holds"] or by_name.get(limit["name"], False)
    return _family(
        GAUGE,
        "limit_holding",
        "1 while a limit holds transfers back: bandwidth, connections, throttling, space, disk, "
        "or errors.",
        [((name,), holds) for name, holds in sorted(by_name.items())],
        ("limit",),
    )


def _with_expiry(tier: Json) -> Json:
    """Return a tier with an expiry of its certificates: infinity if it has no certificates."""
    return tier | {"certificate_expires_s": tier["certificate_expires_s"] or math.inf}


def _jobs(jobs: list[Json]) -> Iterator[Metric]:
    """Yield the metrics of the jobs, and the times that their readers waited by cause."""
    # The label is not `job`: that is Prometheus' own label for its scrape targets.
    labelled = [((job["name"], str(job["uid"])), _with_ahead(job)) for job in jobs]
    yield from _table(rows.JOB, labelled, ("job_name", "uid"))

    waits = []
    for labels, job in labelled:
        for cause, waited_s in job["waited"].items():
            waits.append(((*labels, cause.removesuffix("_s")), waited_s))
    yield _family(
        COUNTER,
        "job_wait_seconds",
        "Time that readers spent waiting for data, summed over readers, by cause.",
        waits,
        ("job_name", "uid", "cause"),
    )


def _with_ahead(job: Json) -> Json:
    """Return a job whose `ahead_s` is infinite if its readers will miss no shard.

    A job without readers has no `ahead_s`, so its metric gets no sample.
    """
    if job["ahead_s"] is not None:
        return job
    return job | {"ahead_s": math.inf if job["sessions"] else None}


def _transfers(transfers: list[Json]) -> Metric:
    """Return the number of transfers by class, which is their urgency, and by stage."""
    counts = Counter((transfer["class"], transfer["stage"]) for transfer in transfers)
    samples = []
    for priority_class in PriorityClass:
        for stage in Stage:
            name = priority_class.name.lower()
            # The page has the stage in words; the label is the stage's short name.
            samples.append(((name, stage.name.lower()), counts[name, stage.value]))
    return _family(GAUGE, "transfers", "Shards being fetched.", samples, ("class", "stage"))


def _table(
    table: Iterable[Row],
    objects: Sequence[tuple[Labels, Json]],
    names: Labels = (),
) -> Iterator[Metric]:
    """Yield a metric for each row of a table.

    Args:
        table: rows, each with the key of its value in an object.
        objects: JSON objects with their labels; each is a sample of each metric.
        names: names of the labels.
    """
    for row in table:
        samples = [(labels, values[row.key]) for labels, values in objects]
        yield _family(row.kind, row.name, row.text, samples, names)


def measured(measures: Measures, loop_lag: Histogram) -> Iterator[Metric]:
    """Yield the metrics that are not on the status page.

    Call it on the event loop, where the measures are updated.
    """
    yield _histogram(
        "transfer_seconds",
        "Duration of a transfer, from its first request to publication.",
        [((), measures.transfer)],
    )
    yield _histogram(
        "lease_wait_seconds",
        "Duration of each wait of a reader for data.",
        [((), measures.wait)],
    )
    yield _histogram(
        "event_loop_lag_seconds",
        "Lag of the event loop's timers.",
        [((), loop_lag)],
    )
    yield _histogram(
        "transfer_stage_seconds",
        "Time that a transfer spent in each stage.",
        _labelled(measures.stage),
        ("stage",),
    )
    yield _histogram(
        "first_byte_seconds",
        "Time from a request for parts to its first byte.",
        _labelled(measures.first_byte),
        ("origin",),
    )
    yield _histogram(
        "part_seconds",
        "Time from a request for parts to its last byte.",
        _labelled(measures.part),
        ("origin",),
    )
    yield from _failures(measures)


def _labelled(histograms: Histograms) -> list[tuple[Labels, Histogram]]:
    """Return each histogram with its label value, as samples for `_histogram`."""
    return [((label,), histogram) for label, histogram in histograms.by_label().items()]


def _failures(measures: Measures) -> Iterator[Metric]:
    """Yield the numbers of failed requests and of failed transfers, by code of the error."""
    yield _family(
        COUNTER,
        "origin_errors",
        "Requests to origins that failed permanently.",
        _by_code(measures.given_up, OriginError),
        ("code",),
    )
    yield _family(
        COUNTER,
        "failed_transfers",
        "Shards that could not be fetched.",
        _by_code(measures.failed, OriginError, ShardError, CacheError),
        ("code",),
    )


def _by_code(counts: Counter[str], *kinds: type[ShardcacheError]) -> list[tuple[Labels, float]]:
    """Return the number of errors by code, for all codes of these kinds of errors."""
    # Codes that never occurred are included: Prometheus misses a counter's first increment if its
    # time series begins with it.
    known = set(counts)
    for kind in kinds:
        known |= codes(kind)
    return [((code,), counts[code]) for code in sorted(known)]


def _family(
    kind: MetricKind,
    name: str,
    text: str,
    samples: Iterable[tuple[Labels, float | None]],
    names: Labels = (),
) -> Metric:
    """Return a metric family, which is a metric with a sample for each set of labels.

    Args:
        text: the metric's HELP line.
        samples: values with the values of their labels; None as a value gives no sample.
        names: names of the labels.
    """
    family = kind(_PREFIX + name, text, labels=names)
    for labels, value in samples:
        if value is not None:
            family.add_metric(labels, value)
    return family


def _histogram(
    name: str,
    text: str,
    samples: Iterable[tuple[Labels, Histogram]],
    names: Labels = (),
) -> Metric:
    """Return a metric family of histograms; the arguments are as for `_family`."""
    family = HistogramMetricFamily(_PREFIX + name, text, labels=names)
    for labels, histogram in samples:
        # Prometheus expects bounds as Go writes numbers.
        bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, histogram.cumulative(), strict=True))
        family.add_metric(labels, buckets, histogram.total)
    return family


async def metrics(request: web.Request) -> web.Response:
    """Return every metric as text, or as OpenMetrics if the request asks for it."""
    service = request.app[SERVICE]
    page = service.status(peer_of(request)) | {"process": process_stats()}
    measures = list(measured(service.cache.measures, service.loop_lag.since_start))
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))

    def encoded() -> bytes:
        families = [*page_metrics(page), *measures, *ProcessCollector(registry=None).collect()]
        # An encoder takes a registry, but calls only its method `collect`.
        return encode(SimpleNamespace(collect=lambda: families))

    # The text is written in a thread: a thousand lines take too long for the event loop.
    body = await asyncio.get_running_loop().run_in_executor(service.metrics_writer, encoded)
    return web.Response(body=body, headers={"Content-Type": content_type})
