"""What the daemon counts and measures since start: plain numbers, written only from the event loop."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field, fields

# A site has a few stores; who asks for ever more of them shall not make the page of metrics grow.
_MOST_LABELS = 64
OTHERS = "others"

_REQUEST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
_SHARD_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0)


class Histogram:
    """How many of the measured values lie at or below each of some bounds.

    Attributes:
        bounds: in ascending order.
        total: sum of the values.
    """

    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.total = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def __repr__(self) -> str:
        return f"<Histogram of {sum(self._counts)} values, {self.total:.4g} in all>"

    def observe(self, value: float) -> None:
        """Take one more value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[int]:
        """Return how many values do not exceed each bound, and, last, how many there are."""
        return list(itertools.accumulate(self._counts))


class Histograms:
    """A histogram for each value of a label; when there are many of these, one for all that come later."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._by_label: dict[str, Histogram] = {}

    def __repr__(self) -> str:
        return f"Histograms({self._by_label})"

    def of(self, label: str) -> Histogram:
        """Return the histogram of a label."""
        found = self._by_label.get(label)
        if found is None:
            shared = len(self._by_label) >= _MOST_LABELS
            found = self._by_label.setdefault(OTHERS if shared else label, Histogram(self._bounds))
        return found

    def by_label(self) -> list[tuple[tuple[str], Histogram]]:
        """Return every value of the label with its histogram."""
        return [((label,), histogram) for label, histogram in self._by_label.items()]


@dataclass(slots=True)
class Measures:
    """What takes more than one number to tell. Times are in seconds.

    Attributes:
        first_byte: from asking for a part to its first byte, by store; times of rest apart, as in the next.
        part: from asking for a part to its last byte, by store.
        stage: what a transfer that ended well spent in each stage, by stage.
        transfer: what it took in all.
        wait: how long a reader had nothing to read, each time.
        given_up: requests to stores that failed for good, by the error's code.
        failed: transfers that failed, by the error's code.
    """

    first_byte: Histograms = field(default_factory=lambda: Histograms(_REQUEST_S))
    part: Histograms = field(default_factory=lambda: Histograms(_REQUEST_S))
    stage: Histograms = field(default_factory=lambda: Histograms(_SHARD_S))
    transfer: Histogram = field(default_factory=lambda: Histogram(_SHARD_S))
    wait: Histogram = field(default_factory=lambda: Histogram(_SHARD_S))
    given_up: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Counters:
    """Plain numbers, and the measures beside them.

    Attributes:
        origin_bytes: bytes received from stores, those of failed tries included.
        origin_requests: requests sent to stores.
        hits: leases granted from what was already published.
        misses: leases that had to wait for a transfer.
        evictions: published shards removed, to make room or by `evict`.
        regrets: shards fetched again that had been removed to make room.
        retries: parts asked for again.
        hedges: parts asked for a second time because the first request for them was late.
        hedged_bytes: bytes received by whichever of such two requests was not needed; within `origin_bytes`.
        corrupt: shards found damaged, at arrival or by `verify`.
        measures: what one number cannot tell.
    """

    origin_bytes: int = 0
    origin_requests: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    regrets: int = 0
    retries: int = 0
    hedges: int = 0
    hedged_bytes: int = 0
    corrupt: int = 0
    measures: Measures = field(default_factory=Measures, repr=False, compare=False)

    def to_json(self) -> dict[str, int]:
        """Return the numbers by name."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "measures"}
