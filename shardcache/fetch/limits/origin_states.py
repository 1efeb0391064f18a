"""The scheduler's state of each origin: its limit, its link, its part times and its load."""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from shardcache.fetch.limits.hedging import Hedging

# The quickest tenth of this many parts shows the speed of an uncontended connection. Once all of
# them were contended, the estimate rises, and more connections are tried again.
_OBSERVED = 64
_QUICK_SHARE = 0.1
# Estimates are medians of the latest parts: a single slow part says nothing about the link.
_NEWEST = 5
# Connections are idle between parts, and a faster link than estimated shows only when more
# connections are tried.
_SPARE = 2
_MIN_TIME_S = 1e-6  # of a part, so that its rate is finite


class Aimd:
    """Concurrency limit that grows by one after a round of successes and halves on a throttle.

    After D.-M. Chiu and R. Jain, "Analysis of the Increase and Decrease Algorithms for Congestion
    Avoidance in Computer Networks", 1989: the only linear rule that leads many clients of one
    origin to equal shares.

    Requests sent under a limit that was too high fail together, which is one signal, not many: each
    request belongs to the `generation` in which it began, and only the first failure of a
    generation counts.

    Args:
        maximum: the limit at first, and the highest.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._successes = 0
        self.limit = maximum
        self.generation = 0

    @property
    def is_lowered(self) -> bool:
        """True while the origin accepts fewer requests than it may get."""
        return self.limit < self._maximum

    def succeeded(self, generation: int) -> None:
        """Record an answered request; one sent under another limit says nothing about this one."""
        if generation != self.generation or not self.is_lowered:
            return
        self._successes += 1
        if self._successes >= self.limit:
            self._successes = 0
            self.limit += 1

    def refused(self, generation: int) -> None:
        """Record a throttled request."""
        if generation == self.generation:
            self.generation += 1
            self._successes = 0
            self.limit = max(1, self.limit // 2)


def _latest_times() -> deque[float]:
    return deque(maxlen=_OBSERVED)


class Link:
    """Number of connections that saturate the link to an origin.

    If parts take k times as long over n connections as quick ones do, n connections do the work
    of n / k. Parts are compared with parts of a similar size: within a factor of two.
    """

    def __init__(self) -> None:
        self._times_s: defaultdict[int, deque[float]] = defaultdict(_latest_times)  # by size
        self._saturating: deque[float] = deque(maxlen=_NEWEST)
        self._bytes_per_s: deque[float] = deque(maxlen=_NEWEST)

    @property
    def connections(self) -> int | None:
        """Connections to use where order matters more than the last bit of throughput.

        None while unknown.
        """
        if not self._saturating:
            return None
        return round(median(self._saturating)) + _SPARE

    @property
    def connection_bytes_per_s(self) -> float | None:
        """Rate of one connection while the others are in use; None while unknown."""
        if not self._bytes_per_s:
            return None
        return median(self._bytes_per_s)

    def took(self, size_bytes: int, time_s: float, connections: float) -> None:
        """Record a part's time and the mean number of connections in use while it was read."""
        times_s = self._times_s[size_bytes.bit_length()]
        times_s.append(time_s)
        quick_s = sorted(times_s)[int(_QUICK_SHARE * len(times_s))]

        share = quick_s / time_s if time_s > quick_s else 1.0
        self._saturating.append(connections * share)
        self._bytes_per_s.append(size_bytes / max(time_s, _MIN_TIME_S))


@dataclass(frozen=True, slots=True)
class OriginLoad:
    """Load on one origin, for the status page.

    Attributes:
        connections: requests in flight, paused ones excluded.
        limit: the most of them that the origin accepts at present.
        throttled: how often that limit was lowered.
    """

    name: str
    connections: int
    limit: int
    throttled: int


class Limit(NamedTuple):
    """A limit on downloads.

    Attributes:
        name: of the kind of limit, as metrics have it.
        text: for people.
        holds: True while a download waits because of it.
    """

    name: str
    text: str
    holds: bool


@dataclass(slots=True, eq=False)
class OriginState:
    """State of one origin, and what is known of it.

    Attributes:
        held: number of slots that its requests hold.
        cleared: True while claims that no reader waits for are paused for one that is `alone`.
    """

    name: str
    aimd: Aimd
    hedging: Hedging
    link: Link = field(default_factory=Link)
    held: int = 0
    cleared: bool = False

    @property
    def usable(self) -> int:
        """Connections that it accepts and its link can use."""
        return min(self.aimd.limit, self.link.connections or self.aimd.limit)

    @property
    def is_full(self) -> bool:
        """True if it accepts no further request, or its link is cleared and has no room."""
        if self.cleared:
            return self.held >= self.usable
        return self.held >= self.aimd.limit

    @property
    def load(self) -> OriginLoad:
        """Its present load."""
        return OriginLoad(self.name, self.held, self.aimd.limit, self.aimd.generation)
