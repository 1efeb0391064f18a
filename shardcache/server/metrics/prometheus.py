"""`/metrics`: the status page in Prometheus' format.

The status page is the JSON of `/v1/status`. Most metrics come from its sections, by the tables of
`metric_rows`. One section is the bill: what was fetched and read, and its price. The histograms and
the numbers of failures come from the measures of `telemetry.metrics`.

A sample, in Prometheus' sense, is a number with a value for each label of its metric.
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
from shardcache.server.metrics import metric_rows as rows
from shardcache.server.metrics.metric_rows import COUNTER, GAUGE, MetricKind, Row
from shardcache.server.peer import peer_of
from shardcache.server.process.process_load import process_stats
from shardcache.server.service import SERVICE
from shardcache.shared.exceptions import CacheError, OriginError, ShardcacheError, ShardError
from shardcache.shared.protocol import Json
from shardcache.telemetry.metrics import Histogram, Histograms, Measures

LabelValues = Sequence[str]
"""The values of a sample's labels, in the order of the labels' names."""

_PREFIX = "shardcache_"
# Only this number of origins and of jobs is shown: Prometheus keeps several time series for each.
_MAX_ORIGINS = 64
_MAX_JOBS = 256


async def metrics(request: web.Request) -> web.Response:
    """Answer with all metrics as text, or as OpenMetrics if the request asks for it."""
    service = request.app[SERVICE]
    page = service.status(peer_of(request)) | {"process": process_stats()}
    measured = list(measured_metrics(service.cache.measures, service.loop_lag.since_start))
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))

    def write_text() -> bytes:
        of_process = ProcessCollector(registry=None).collect()
        families = [*page_metrics(page), *measured, *of_process]
        # An encoder takes a registry, but calls only its method `collect`.
        return encode(SimpleNamespace(collect=lambda: families))

    # The text is written in a thread: a thousand lines take too long for the event loop.
    body = await asyncio.get_running_loop().run_in_executor(service.metrics_writer, write_text)
    return web.Response(body=body, headers={"Content-Type": content_type})


def page_metrics(page: Json) -> Iterator[Metric]:
    """Yield the metrics made from the status page."""
    daemon = page["process"] | {"draining": page["draining"]}
    disk = page["disk"] | {"healthy": page["disk"]["state"] == "ok"}
    yield _build_info()
    yield from _section_metrics(rows.DAEMON, daemon)
    yield from _section_metrics(rows.CACHE, page["cache"])
    yield from _section_metrics(rows.COUNTERS, page["counters"])
    yield from _section_metrics(rows.BILL, page["bill"])
    yield from _section_metrics(rows.DISK, disk)
    yield from _section_metrics(rows.PINS, page["pins"])
    yield from _section_metrics(rows.SCRUB, page["scrub"])

    origins = [((each["name"],), each) for each in page["origins"][:_MAX_ORIGINS]]
    yield from _labelled_metrics(rows.ORIGIN, origins, ("origin",))
    yield _limit_metric(page["limits"])
    tiers = [((each["address"],), _with_expiry(each)) for each in page["tiers"]]
    yield from _labelled_metrics(rows.TIER, tiers, ("tier",))
    yield from _job_metrics(page["jobs"][:_MAX_JOBS])
    yield _transfer_metric(page["transfers"])


def _build_info() -> Metric:
    """Return the metric whose labels state the release and the Python version."""
    label_values = (__version__, platform.python_version())
    return _family(
        GAUGE,
        "build_info",
        "Release and Python version.",
        [(label_values, 1)],
        ("version", "python"),
    )


def _limit_metric(limits: list[Json]) -> Metric:
    """Return the metric that shows which limits hold transfers back."""
    # Several limits may have the same name: each throttling origin has one. The metric is 1 if any
    # of them holds transfers back.
    holds_by_name: dict[str, bool] = {}
    for limit in limits:
        name = limit["name"]
        holds_by_name[name] = limit["holds"] or holds_by_name.get(name, False)
    return _family(
        GAUGE,
        "limit_holding",
        "1 while a limit holds transfers back: bandwidth, connections, throttling, space, disk, "
        "or errors.",
        [((name,), holds) for name, holds in sorted(holds_by_name.items())],
        ("limit",),
    )


def _with_expiry(tier: Json) -> Json:
    """Return a tier; if it has no certificates, with an infinite time of their expiry."""
    return tier | {"certificate_expires_s": tier["certificate_expires_s"] or math.inf}


def _job_metrics(jobs: list[Json]) -> Iterator[Metric]:
    """Yield the metrics of the jobs, and the times that their readers waited, by cause."""
    # The label is not `job`: that is Prometheus' own label for its scrape targets.
    labelled = [((job["name"], str(job["uid"])), _with_ahead(job)) for job in jobs]
    yield from _labelled_metrics(rows.JOB, labelled, ("job_name", "uid"))

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
    """Return a job, with an infinite `ahead_s` if its readers have all shards that they will read.

    `ahead_s` is the time until a reader needs a shard that is not cached. On the status page, it is
    None both without such a shard and without readers. A job without readers keeps the None, and so
    gets no sample.
    """
    has_readers = bool(job["sessions"])
    if job["ahead_s"] is None and has_readers:
        return job | {"ahead_s": math.inf}
    return job


def _transfer_metric(transfers: list[Json]) -> Metric:
    """Return the number of transfers by class, which is their urgency, and by stage."""
    counts = Counter((transfer["class"], transfer["stage"]) for transfer in transfers)
    samples = []
    for priority_class in PriorityClass:
        for stage in Stage:
            name = priority_class.name.lower()
            # The page has the stage in words; the label is the stage's short name.
            samples.append(((name, stage.name.lower()), counts[name, stage.value]))
    return _family(GAUGE, "transfers", "Shards being fetched.", samples, ("class", "stage"))


def _section_metrics(table: Iterable[Row], section: Json) -> Iterator[Metric]:
    """Yield a metric without labels for each row of a table, with its value in a section."""
    yield from _labelled_metrics(table, [((), section)], ())


def _labelled_metrics(
    table: Iterable[Row],
    objects: Sequence[tuple[LabelValues, Json]],
    label_names: Sequence[str],
) -> Iterator[Metric]:
    """Yield a metric for each row of a table, with a sample for each object.

    Args:
        table: rows, each with the key of its value in an object.
        objects: JSON objects, such as jobs, each after its label values.
        label_names: names of the labels.
    """
    for row in table:
        samples = [(labels, values[row.key]) for labels, values in objects]
        yield _family(row.kind, row.name, row.help, samples, label_names)


def measured_metrics(measures: Measures, loop_lag: Histogram) -> Iterator[Metric]:
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
        _samples_of(measures.stage),
        ("stage",),
    )
    yield _histogram(
        "first_byte_seconds",
        "Time from a request for one or more parts to the first byte of its answer.",
        _samples_of(measures.first_byte),
        ("origin",),
    )
    yield _histogram(
        "part_seconds",
        "Time from a request for one or more parts to the last byte of its answer.",
        _samples_of(measures.part),
        ("origin",),
    )
    yield from _failure_metrics(measures)


def _samples_of(histograms: Histograms) -> list[tuple[LabelValues, Histogram]]:
    """Return each histogram after its only label value, as samples for `_histogram`."""
    return [((label,), histogram) for label, histogram in histograms.by_label().items()]


def _failure_metrics(measures: Measures) -> Iterator[Metric]:
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


def _by_code(
    counts: Counter[str],
    *error_classes: type[ShardcacheError],
) -> list[tuple[LabelValues, float]]:
    """Return the number of errors by code, for all codes of these classes of errors."""
    # Codes that have not occurred yet are included: Prometheus misses a counter's first increment
    # if its time series begins with it.
    known_codes = set(counts)
    for error_class in error_classes:
        known_codes |= error_class.by_code().keys()
    return [((code,), counts[code]) for code in sorted(known_codes)]


def _family(
    kind: MetricKind,
    name: str,
    help_line: str,
    samples: Iterable[tuple[LabelValues, float | None]],
    label_names: Sequence[str] = (),
) -> Metric:
    """Return a metric family, which is a metric with a sample for each set of label values.

    Args:
        kind: `GAUGE` or `COUNTER`.
        name: the metric's name, without prefix and suffix.
        help_line: the metric's HELP line.
        samples: numbers, each after its label values; a number of None gives no sample.
        label_names: names of the labels.
    """
    family = kind(_PREFIX + name, help_line, labels=label_names)
    for labels, value in samples:
        if value is not None:
            family.add_metric(labels, value)
    return family


def _histogram(
    name: str,
    help_line: str,
    samples: Iterable[tuple[LabelValues, Histogram]],
    label_names: Sequence[str] = (),
) -> Metric:
    """Return a metric family of histograms; the arguments are as for `_family`."""
    family = HistogramMetricFamily(_PREFIX + name, help_line, labels=label_names)
    for labels, histogram in samples:
        # Prometheus expects bounds as Go writes numbers.
        bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, histogram.cumulative(), strict=True))
        family.add_metric(labels, buckets, sum_value=histogram.sum)
    return family
