"""Counters and histograms of the daemon since its start.

Plain numbers, written only from the event loop.
"""

import itertools
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from shardcache.shared.units import size

# A site has a few origins. The metrics page must not grow without bound if a client requests ever
# new ones.
_MAX_LABELS = 64
OTHERS = "others"

# Bounds of histograms: times of requests, and of transfers of whole shards or waits for them.
_REQUEST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
_SHARD_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0)


class Histogram:
    """Counts of observed values by upper bound, inclusive, and their `total`."""

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
        """Return the number of values at or below each bound and, last, that of all values."""
        return list(itertools.accumulate(self._counts))


class Histograms:
    """One histogram per label value.

    After the first 64 labels, all further ones share the label `others`.
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

    def by_label(self) -> list[tuple[tuple[str], Histogram]]:
        """Return each label value, as a tuple of one, with its histogram."""
        return [((label,), histogram) for label, histogram in self._by_label.items()]


@dataclass(slots=True)
class Measures:
    """Histograms, in seconds, and labelled counters: see server/metrics/prometheus.py.

    Attributes:
        first_byte: from a request for parts to its first byte, without pauses; by origin or tier.
        part: from a request for parts to its last byte, without pauses; by origin or tier.
        stage: time of a transfer in each stage; by stage.
        transfer: from a transfer's first request to publication.
        wait: each wait of a reader for data.
        given_up: requests to origins that failed permanently; by code of the error.
        failed: shards that could not be fetched; by code of the error.
    """

    first_byte: Histograms = field(default_factory=lambda: Histograms(_REQUEST_S))
    part: Histograms = field(default_factory=lambda: Histograms(_REQUEST_S))
    stage: Histograms = field(default_factory=lambda: Histograms(_SHARD_S))
    transfer: Histogram = field(default_factory=lambda: Histogram(_SHARD_S))
    wait: Histogram = field(default_factory=lambda: Histogram(_SHARD_S))
    given_up: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)


ChargeKind = Literal["fetched", "read"]


@dataclass(slots=True)
class Charge:
    """Bytes, requests and their cost: a part of a bill.

    Attributes:
        size_bytes: as stored at the origin.
        requests: number of requests to the origin.
        cost: in the currency of the prices; None without a price.
    """

    size_bytes: int = 0
    requests: int = 0
    cost: float | None = None

    def add(self, size_bytes: int, requests: int, cost: float | None) -> None:
        """Add to the amount."""
        self.size_bytes += size_bytes
        self.requests += requests
        if cost is not None:
            self.cost = (self.cost or 0) + cost

    def priced(self) -> "Charge":
        """Return the same amount with a cost: 0 if it has none yet."""
        return replace(self, cost=self.cost or 0)

    def less(self, other: "Charge") -> "Charge":
        """Return the difference to another amount; its cost is None unless both have one."""
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
        """Return bytes, requests, and the cost if there is one, in one line."""
        # Of an amount saved, this may be negative: reading a shard counts as one request, fetching
        # it may take several.
        requests = max(0, self.requests)
        text = f"{kind} {size(self.size_bytes)} in {requests:,} requests"
        if self.cost is not None:
            text += f" ({self.cost:,.2f})"
        return text


@dataclass(slots=True)
class Bill:
    """Bytes and requests fetched from origins, and bytes read.

    Attributes:
        fetched: by the daemon.
        read: by readers; each shard is one request, as a process without a cache would send.
    """

    fetched: Charge = field(default_factory=Charge)
    read: Charge = field(default_factory=Charge)

    def add(self, kind: ChargeKind, size_bytes: int, requests: int, cost: float | None) -> None:
        """Add to what was fetched or read."""
        amount = self.fetched if kind == "fetched" else self.read
        amount.add(size_bytes, requests, cost)

    def to_json(self) -> dict[str, Any]:
        """Return the amounts, what the cache saved, and all of them in words.

        Costs are None without a price. While shards are fetched that were not read yet,
        `saved_bytes` may be negative; the words leave it out then.
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

    Attributes:
        cost: returns the price of bytes and requests from a url; None without a price.
    """

    cost: Callable[[str, int, int], float | None] = lambda _url, _bytes, _requests: None
    _payers: dict[str, Hashable] = field(default_factory=dict, init=False)  # by url
    # By client; that of the node by None.
    _by_client: defaultdict[Hashable, Bill] = field(
        default_factory=lambda: defaultdict(Bill),
        init=False,
    )

    @contextmanager
    def charged(self, url: str, client: Hashable) -> Iterator[None]:
        """Charge to a client what is fetched from a url during the block."""
        self._payers[url] = client
        try:
            yield
        finally:
            self._payers.pop(url, None)

    def add_fetched(self, url: str, size_bytes: int, requests: int) -> None:
        """Add to the bills of the node and of the client that pays for the url."""
        self._add("fetched", url, size_bytes, requests, self._payers.get(url))

    def add_read(self, url: str, size_bytes: int, client: Hashable) -> None:
        """Add one shard to the bills of the node and of its reader's client."""
        self._add("read", url, size_bytes, 1, client)

    def forget(self, client: Hashable) -> None:
        """Forget the bill of a client."""
        self._by_client.pop(client, None)

    def to_json(self, client: Hashable = None) -> dict[str, Any]:
        """Return the bill of a client, by default the node's; see `Bill.to_json`."""
        return self._by_client[client].to_json()

    def _add(
        self,
        kind: ChargeKind,
        url: str,
        size_bytes: int,
        requests: int,
        client: Hashable,
    ) -> None:
        """Add to the bills of the node and, unless it is None, of a client."""
        cost = self.cost(url, size_bytes, requests)
        for payer in {None, client}:  # None stands for the node
            self._by_client[payer].add(kind, size_bytes, requests, cost)


@dataclass(slots=True)
class Counters:
    """Plain counters, and the histograms in `measures`: see server/metrics/metric_rows.py."""

    origin_bytes: int = 0
    origin_requests: int = 0
    tier_bytes: int = 0
    tier_requests: int = 0
    tier_failures: int = 0
    past_tier_bytes: int = 0  # of origins behind a tier; included in `origin_bytes`
    hits: int = 0
    hit_bytes: int = 0
    misses: int = 0
    evictions: int = 0
    refetches: int = 0
    retries: int = 0
    hedges: int = 0
    hedged_bytes: int = 0  # included in `origin_bytes`
    corrupt: int = 0
    refused: int = 0
    s3_requests: int = 0
    s3_bytes: int = 0
    measures: Measures = field(default_factory=Measures, repr=False, compare=False)
    bills: Bills = field(default_factory=Bills, repr=False, compare=False)

    def to_json(self) -> dict[str, int]:
        """Return the plain counters by name: the fields that are compared."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.compare}

    def fetched_past_tier(self, url: str, size_bytes: int) -> None:
        """Count bytes from an origin that has a tier in front of it."""
        self.past_tier_bytes += size_bytes
        self.fetched(url, size_bytes)

    def fetched(self, url: str, size_bytes: int, requests: int = 0) -> None:
        """Count bytes from an origin, or requests."""
        self.origin_bytes += size_bytes
        self.origin_requests += requests
        self.bills.add_fetched(url, size_bytes, requests)
