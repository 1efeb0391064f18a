"""Counters and histograms of the daemon since its start.

They are plain numbers, written only from the event loop, so they need no locks. The status page and
`/metrics` show them. A bill is the bytes and requests that were fetched and read, with their cost
if the config sets prices. The tier is a cache that the nodes of a cluster share.
"""

import itertools
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from shardcache.shared.units import size

# Maximum number of labels of a histogram. A site has a few origins, but the metrics page must not
# grow without bound if a client requests urls from more and more hosts.
_MAX_LABELS = 64
OTHERS = "others"  # label of all further origins

# Bounds of histograms, in seconds. The first are for requests, the second for transfers of whole
# shards and for waits for shards.
_REQUEST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
_SHARD_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0)


class Histogram:
    """Counts of observed values by upper bound.

    Args:
        bounds: the upper bounds, in ascending order. A value is counted under the first bound that
            it does not exceed.

    Attributes:
        bounds: the upper bounds.
        total: sum of all observed values.
    """

    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.total = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        """Add one value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[int]:
        """Return the number of values at or below each bound, and last the number of all values."""
        return list(itertools.accumulate(self._counts))


class Histograms:
    """One histogram per label value.

    After the first `_MAX_LABELS` labels, all further labels share the label `others`.
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
        """Return the histogram of each label value."""
        return dict(self._by_label)


@dataclass(slots=True)
class Measures:
    """Histograms, in seconds, and labelled counters: see server/metrics/prometheus.py.

    A transfer is everything that is done to get a shard into the cache: its requests, its checks
    and its publication. A request is paused while it has no connection slot or no byte credit, so
    that more urgent requests go first. Times "without pauses" leave such pauses out.

    Attributes:
        first_byte: times from a request for parts to its first byte, without pauses; labelled by
            origin or tier.
        part: times from a request for parts to its last byte, without pauses; labelled by origin or
            tier.
        stage: times of transfers in each stage; labelled by stage.
        transfer: times from a transfer's first request to the shard's publication.
        wait: times for which readers waited for data.
        given_up: number of requests to origins that failed permanently, by code of the error.
        failed: number of shards that could not be fetched, by code of the error.
    """

    first_byte: Histograms = field(default_factory=lambda: Histograms(_REQUEST_S))
    part: Histograms = field(default_factory=lambda: Histograms(_REQUEST_S))
    stage: Histograms = field(default_factory=lambda: Histograms(_SHARD_S))
    transfer: Histogram = field(default_factory=lambda: Histogram(_SHARD_S))
    wait: Histogram = field(default_factory=lambda: Histogram(_SHARD_S))
    given_up: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)


ChargeKind = Literal["fetched", "read"]
"""The attribute of `Bill` to which bytes and requests are added: `fetched` or `read`."""


@dataclass(slots=True)
class Charge:
    """Bytes, requests and their cost: one amount of a bill.

    Attributes:
        size_bytes: number of bytes, as stored at the origin.
        requests: number of requests to the origin.
        cost: cost in the currency of the prices; None if the origin has no price.
    """

    size_bytes: int = 0
    requests: int = 0
    cost: float | None = None

    def add(self, size_bytes: int, requests: int, cost: float | None) -> None:
        """Add bytes, requests and their cost; a cost of None adds none."""
        self.size_bytes += size_bytes
        self.requests += requests
        if cost is not None:
            self.cost = (self.cost or 0) + cost

    def priced(self) -> "Charge":
        """Return the same amount with a cost: 0 if it has none yet."""
        return replace(self, cost=self.cost or 0)

    def less(self, other: "Charge") -> "Charge":
        """Return this amount less another; the cost is None unless both amounts have a cost."""
        cost = None
        if self.cost is not None and other.cost is not None:
            cost = self.cost - other.cost
        return Charge(self.size_bytes - other.size_bytes, self.requests - other.requests, cost)

    def to_json(self, kind: str) -> dict[str, float | None]:
        """Return the numbers under names that begin with `kind`."""
        return {
            f"{kind}_bytes": self.size_bytes,
            f"{kind}_requests": self.requests,
            f"{kind}_cost": self.cost,
        }

    def in_words(self, kind: str) -> str:
        """Return bytes, requests and, if there is a price, the cost, in one line.

        Args:
            kind: first word of the line, such as "fetched".
        """
        # The number of requests that the cache saved may be negative: to read a shard counts as one
        # request, but to fetch it may take several.
        requests = max(0, self.requests)
        text = f"{kind} {size(self.size_bytes)} in {requests:,} requests"
        if self.cost is not None:
            text += f" ({self.cost:,.2f})"
        return text


@dataclass(slots=True)
class Bill:
    """Bytes and requests fetched from origins, and bytes read.

    Attributes:
        fetched: what the daemon has fetched from origins.
        read: what readers have read. Each shard counts as one request, as a process without a cache
            would send it.
    """

    fetched: Charge = field(default_factory=Charge)
    read: Charge = field(default_factory=Charge)

    def add(self, kind: ChargeKind, size_bytes: int, requests: int, cost: float | None) -> None:
        """Add to the amount that was fetched, or to the one that was read."""
        amount = self.fetched if kind == "fetched" else self.read
        amount.add(size_bytes, requests, cost)

    def to_json(self) -> dict[str, Any]:
        """Return the amounts fetched and read, the amount saved, and a text that states them.

        Costs are None without a price. `saved_bytes` may be negative while shards are fetched that
        no reader has read yet; the text then leaves out what was saved.
        """
        fetched = self.fetched
        read = self.read
        if fetched.cost is not None or read.cost is not None:
            fetched = fetched.priced()
            read = read.priced()
        saved = read.less(fetched)

        texts = [fetched.in_words("fetched"), read.in_words("read")]
        if saved.size_bytes > 0:
            texts.append(saved.in_words("saved"))
        return {
            **fetched.to_json("fetched"),
            **read.to_json("read"),
            **saved.to_json("saved"),
            "text": ", ".join(texts),
        }


@dataclass(slots=True)
class Bills:
    """The bill of the node, and one for each client.

    A client is whoever the daemon reads for: a job, or a user of the S3 endpoint.

    Attributes:
        cost: returns the cost of a number of bytes and of requests from a url; None if the url's
            origin has no price.
    """

    cost: Callable[[str, int, int], float | None] = lambda _url, _bytes, _requests: None
    # By url: the client to whom fetches from the url are charged at present.
    _payers: dict[str, Hashable] = field(default_factory=dict, init=False)
    # The bills by client; the node's bill is at None.
    _by_client: defaultdict[Hashable, Bill] = field(
        default_factory=lambda: defaultdict(Bill),
        init=False,
    )

    @contextmanager
    def charged(self, url: str, client: Hashable) -> Iterator[None]:
        """Charge all fetches from a url during the block to a client."""
        self._payers[url] = client
        try:
            yield
        finally:
            self._payers.pop(url, None)

    def add_fetched(self, url: str, size_bytes: int, requests: int) -> None:
        """Add a fetch to the bills of the node and of the client that is charged for the url."""
        self._add("fetched", url, size_bytes, requests, self._payers.get(url))

    def add_read(self, url: str, size_bytes: int, client: Hashable) -> None:
        """Add a shard that was read to the bills of the node and of its reader's client."""
        # Each shard counts as one request: see `Bill.read`.
        self._add("read", url, size_bytes, 1, client)

    def forget(self, client: Hashable) -> None:
        """Forget the bill of a client."""
        self._by_client.pop(client, None)

    def to_json(self, client: Hashable = None) -> dict[str, Any]:
        """Return the bill of a client, or of the node for None; see `Bill.to_json`."""
        return self._by_client[client].to_json()

    def _add(
        self,
        kind: ChargeKind,
        url: str,
        size_bytes: int,
        requests: int,
        client: Hashable,
    ) -> None:
        """Add to the bills of the node and of a client; a client of None means the node alone."""
        cost = self.cost(url, size_bytes, requests)
        for payer in {None, client}:  # None stands for the node
            self._by_client[payer].add(kind, size_bytes, requests, cost)


@dataclass(slots=True)
class Counters:
    """Plain counters, histograms and bills; server/metrics/metric_rows.py explains the counters."""

    origin_bytes: int = 0
    origin_requests: int = 0
    tier_bytes: int = 0
    tier_requests: int = 0
    tier_failures: int = 0
    # Bytes from origins that have a tier, fetched without it; included in `origin_bytes`.
    past_tier_bytes: int = 0
    hits: int = 0
    hit_bytes: int = 0
    misses: int = 0
    evictions: int = 0
    refetches: int = 0
    retries: int = 0
    hedges: int = 0
    hedged_bytes: int = 0  # included in `origin_bytes`
    corrupt: int = 0
    refused: int = 0  # shards that were cut short, had torn samples, or were not tars
    s3_requests: int = 0
    s3_bytes: int = 0
    measures: Measures = field(default_factory=Measures, repr=False, compare=False)
    bills: Bills = field(default_factory=Bills, repr=False, compare=False)

    def to_json(self) -> dict[str, int]:
        """Return the plain counters by name: those fields that the dataclass compares."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.compare}

    def fetched_past_tier(self, url: str, size_bytes: int) -> None:
        """Count bytes that were fetched directly from an origin with a tier in front."""
        self.past_tier_bytes += size_bytes
        self.fetched(url, size_bytes)

    def fetched(self, url: str, size_bytes: int, requests: int = 0) -> None:
        """Count bytes received from an origin, or requests sent to it."""
        self.origin_bytes += size_bytes
        self.origin_requests += requests
        self.bills.add_fetched(url, size_bytes, requests)
