"""Counters and histograms of the daemon since its start: plain numbers, written only from the event loop."""

import itertools
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from shardcache.units import size

# A site has a few origins; a client that asks for ever new ones must not make the metrics page grow without bound.
_MAX_LABELS = 64
OTHERS = "others"

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
        """Return the number of values at or below each bound and, last, the number of all values."""
        return list(itertools.accumulate(self._counts))


class Histograms:
    """One histogram per label value; after the first 64 labels, all further ones share the label `others`."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._by_label: dict[str, Histogram] = {}

    def of(self, label: str) -> Histogram:
        """Return the histogram for a label, creating it if necessary."""
        found = self._by_label.get(label)
        if found is None:
            shared = len(self._by_label) >= _MAX_LABELS
            found = self._by_label.setdefault(OTHERS if shared else label, Histogram(self._bounds))
        return found

    def by_label(self) -> list[tuple[tuple[str], Histogram]]:
        """Return each label value, as a tuple of one, with its histogram."""
        return [((label,), histogram) for label, histogram in self._by_label.items()]


@dataclass(slots=True)
class Measures:
    """Histograms, in seconds, and labelled counters; server/metrics.py says what each is."""

    # By origin or tier; pauses excluded.
    first_byte: Histograms = field(default_factory=lambda: Histograms(_REQUEST_S))
    part: Histograms = field(default_factory=lambda: Histograms(_REQUEST_S))
    stage: Histograms = field(default_factory=lambda: Histograms(_SHARD_S))
    transfer: Histogram = field(default_factory=lambda: Histogram(_SHARD_S))
    wait: Histogram = field(default_factory=lambda: Histogram(_SHARD_S))
    given_up: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Bills:
    """Bytes, requests and cost of what was fetched from origins, and read: a request a shard, as each process would."""

    cost: Callable[[str, int, int], float | None] = lambda _url, _bytes, _requests: None
    clients: dict[str, Hashable] = field(default_factory=dict)  # by url, the jobs that shards are being fetched for
    amounts: defaultdict[Hashable, Any] = field(default_factory=lambda: defaultdict(Counter))  # None: node

    def add(self, kind: str, url: str, size_bytes: int, requests: int, client: Hashable) -> None:
        """Add to the bills of the node and of a client."""
        cost = self.cost(url, size_bytes, requests)
        for bill in map(self.amounts.__getitem__, {None, client}):
            bill[f"{kind}_bytes"] += size_bytes
            bill[f"{kind}_requests"] += requests
            if cost is not None:
                bill[f"{kind}_cost"] += cost

    def to_json(self, client: Hashable = None) -> dict[str, Any]:
        """Return a bill, what the cache saved, and both in words; costs are None without a price.

        What is fetched ahead is saved once it is read: until then `saved_bytes` is negative, and
        the words leave it out.
        """
        bill = Counter(self.amounts[client])
        priced = "fetched_cost" in bill or "read_cost" in bill
        units = ("bytes", "requests", "cost") if priced else ("bytes", "requests")
        for unit in units:
            bill[f"saved_{unit}"] = bill[f"read_{unit}"] - bill[f"fetched_{unit}"]
        kinds = ("fetched", "read", "saved")
        amounts = {f"{kind}_{unit}": bill[f"{kind}_{unit}"] for kind in kinds for unit in units}
        shown = kinds if bill["saved_bytes"] > 0 else kinds[:2]
        texts = [_in_words(kind, bill, priced=priced) for kind in shown]
        return {f"{kind}_cost": None for kind in kinds} | amounts | {"text": ", ".join(texts)}


def _in_words(kind: str, bill: Mapping[str, float], *, priced: bool) -> str:
    """Return one line of a bill: bytes, requests, and the cost if there are prices."""
    requests = max(0, bill[f"{kind}_requests"])  # a shard may take several to fetch, and one to read
    text = f"{kind} {size(bill[f'{kind}_bytes'])} in {requests:,} requests"
    if priced:
        text += f" ({bill[f'{kind}_cost']:,.2f})"
    return text


@dataclass(slots=True)
class Counters:
    """Plain counters; server/metrics.py says what each counts. And the histograms in `measures`."""

    origin_bytes: int = 0
    origin_requests: int = 0
    tier_bytes: int = 0
    tier_requests: int = 0
    tier_failures: int = 0
    past_tier_bytes: int = 0  # included in `origin_bytes`: of origins behind a tier
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
    measures: Measures = field(default_factory=Measures, repr=False, compare=False)
    bills: Bills = field(default_factory=Bills, repr=False, compare=False)

    def to_json(self) -> dict[str, int]:
        """Return the plain counters by name."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.compare}

    def fetched_past_tier(self, url: str, size_bytes: int) -> None:
        """Count bytes from an origin that has a tier in front of it."""
        self.past_tier_bytes += size_bytes
        self.fetched(url, size_bytes)

    def fetched(self, url: str, size_bytes: int, requests: int = 0) -> None:
        """Count bytes from an origin, or requests."""
        self.origin_bytes += size_bytes
        self.origin_requests += requests
        self.bills.add("fetched", url, size_bytes, requests, self.bills.clients.get(url))
