"""Counters and histograms of the daemon since its start.

They are plain numbers, written only from the event loop, so they need no locks. The status page and
`/metrics` show them. The tier is a cache that the nodes of a cluster share, in front of the
origins; transfers get bytes from either.
"""

import itertools
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field, fields

from shardcache.telemetry.bills import Bills

# Maximum number of labels of `Histograms`. A site has a few origins, but the metrics page must not
# grow without bound if a client requests urls from more and more hosts.
_MAX_LABELS = 64
OTHERS = "others"  # label of all further origins

# Upper bounds in histograms of times. Requests fetch some parts of a shard, so they take less time
# than transfers of whole shards, and readers' waits for these.
_REQUEST_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
_SHARD_BOUNDS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0)


class Histogram:
    """Counts of observed values by upper bound.

    Args:
        bounds: the upper bounds, in ascending order. A value is counted under the smallest bound
            that it does not exceed. Values that exceed all bounds are counted together.

    Attributes:
        bounds: the upper bounds.
        sum: sum of all observed values.
    """

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)  # by bound; last, the values above all bounds

    def observe(self, value: float) -> None:
        """Add one value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[int]:
        """Return the number of values at or below each bound, and last the number of all values."""
        return list(itertools.accumulate(self._counts))


class Histograms:
    """One histogram per label.

    After the first `_MAX_LABELS` labels, all further ones share the histogram of `OTHERS`.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._by_label: dict[str, Histogram] = {}

    def of(self, label: str) -> Histogram:
        """Return the histogram for a label, creating it if necessary."""
        histogram = self._by_label.get(label)
        if histogram is not None:
            return histogram
        if len(self._by_label) >= _MAX_LABELS:
            label = OTHERS
        return self._by_label.setdefault(label, Histogram(self._bounds))

    def by_label(self) -> dict[str, Histogram]:
        """Return the histogram of each label."""
        return dict(self._by_label)


@dataclass(slots=True)
class Measures:
    """Histograms, in seconds, and labelled counters: see server/metrics/prometheus.py.

    A transfer is everything that is done to get a shard into the cache: its requests, its checks
    and its publication. At each time it is in one stage, such as waiting for space or downloading.
    A request is paused while more urgent requests use all of the node's connections or bandwidth.

    Attributes:
        first_byte: times from a request for parts to the first byte of its answer, without pauses;
            labelled by origin or tier.
        part: times from a request for parts to the last byte of its answer, without pauses;
            labelled by origin or tier.
        stage: times that transfers spent in a stage; labelled by stage.
        transfer: times from a transfer's first request to the shard's publication.
        wait: times for which readers waited for data.
        given_up: number of requests to origins that failed permanently, by code of the error.
        failed: number of shards that could not be fetched, by code of the error.
    """

    first_byte: Histograms = field(default_factory=lambda: Histograms(_REQUEST_BOUNDS_S))
    part: Histograms = field(default_factory=lambda: Histograms(_REQUEST_BOUNDS_S))
    stage: Histograms = field(default_factory=lambda: Histograms(_SHARD_BOUNDS_S))
    transfer: Histogram = field(default_factory=lambda: Histogram(_SHARD_BOUNDS_S))
    wait: Histogram = field(default_factory=lambda: Histogram(_SHARD_BOUNDS_S))
    given_up: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Counters:
    """Everything that is counted: plain counters, and with them `Measures` and `Bills`.

    server/metrics/metric_rows.py explains each plain counter. To hedge a request means to send it a
    second time if its answer is late.
    """

    origin_bytes: int = 0
    origin_requests: int = 0
    tier_bytes: int = 0
    tier_requests: int = 0
    tier_failures: int = 0
    # Bytes fetched directly from origins, past the tier in front of them. They also count in
    # `origin_bytes`.
    past_tier_bytes: int = 0
    hits: int = 0  # requests for shards that were cached
    hit_bytes: int = 0
    misses: int = 0
    evictions: int = 0
    refetches: int = 0  # shards fetched again after their eviction
    retries: int = 0
    hedges: int = 0
    # Bytes that the slower of two requests for the same parts received for nothing. They also count
    # in `origin_bytes`, or in `tier_bytes` if the slower request was sent to the tier.
    hedged_bytes: int = 0
    corrupt: int = 0  # shards found damaged, in the cache or on arrival
    refused: int = 0  # shards that were cut short, had torn samples, or were not tars
    s3_requests: int = 0
    s3_bytes: int = 0
    measures: Measures = field(default_factory=Measures, repr=False, compare=False)
    # What the node and each client have fetched and read, with its cost.
    bills: Bills = field(default_factory=Bills, repr=False, compare=False)

    def to_json(self) -> dict[str, int]:
        """Return the plain counters by name."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, int)}

    def count_fetched_past_tier(self, url: str, size_bytes: int) -> None:
        """Count bytes that were fetched directly from an origin that has a tier."""
        self.past_tier_bytes += size_bytes
        self.count_fetched(url, size_bytes)

    def count_fetched(self, url: str, size_bytes: int, requests: int = 0) -> None:
        """Count bytes received from an origin, or requests sent to it.

        Args:
            url: url of the shard.
            size_bytes: number of bytes received; 0 when a request is sent.
            requests: number of requests sent; 0 when bytes are received.
        """
        self.origin_bytes += size_bytes
        self.origin_requests += requests
        self.bills.add_fetched(url, size_bytes, requests)
