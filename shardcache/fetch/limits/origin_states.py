"""The scheduler's state of each origin: its limit, its link, its part times and its load.

The limit is the number of requests that the origin accepts at a time; it falls when the origin
throttles, that is, answers that it is busy. The link is the network path to the origin, which is
saturated if more connections would not make it faster.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from shardcache.fetch.limits.hedging import Hedging

# Number of the latest parts of a size that are compared. If all were contended, the estimate of
# useful connections rises, so that more connections are tried again.
_OBSERVED = 64
# This share of them, the quickest, shows the speed of an uncontended connection.
_QUICK_SHARE = 0.1
# Estimates are medians of this many latest parts, as a single slow part says nothing about the
# link.
_NEWEST = 5
# Number of connections that are used in addition to the estimate. Connections are idle between
# parts, and a link that is faster than estimated shows only when more connections are tried.
_SPARE = 2
_MIN_TIME_S = 1e-6  # shortest time that is assumed for a part, so that its rate is finite


class Aimd:
    """Concurrency limit that grows by one after a round of successes and halves on a throttle.

    Additive increase with multiplicative decrease (AIMD) is from D.-M. Chiu and R. Jain, "Analysis
    of the Increase and Decrease Algorithms for Congestion Avoidance in Computer Networks", 1989. It
    is the only linear rule that leads many clients of one origin to equal shares.

    Requests that were sent under a limit that was too high fail together, and must halve the limit
    only once. So each request belongs to the generation of the limit in which it began, and only
    the first failure of a generation counts.

    Args:
        maximum: the initial limit, which is also the highest.

    Attributes:
        limit: the present limit.
        generation: number of times that the limit was halved.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._successes = 0
        self.limit = maximum
        self.generation = 0

    @property
    def is_lowered(self) -> bool:
        """True while the origin throttles, so that the limit is below the maximum."""
        return self.limit < self._maximum

    def succeeded(self, generation: int) -> None:
        """Record an answered request.

        Args:
            generation: generation in which the request began. A request of an earlier generation
                does not count, as it says nothing about the present limit.
        """
        if generation != self.generation or not self.is_lowered:
            return
        self._successes += 1
        if self._successes >= self.limit:
            self._successes = 0
            self.limit += 1

    def refused(self, generation: int) -> None:
        """Record a throttled request.

        Args:
            generation: generation in which the request began.
        """
        if generation == self.generation:
            self.generation += 1
            self._successes = 0
            self.limit = max(1, self.limit // 2)


def _latest_times() -> deque[float]:
    return deque(maxlen=_OBSERVED)


class Link:
    """Estimate of the number of connections that saturate the link to an origin.

    If parts take k times as long over n connections as quick parts do, the n connections transfer
    no more than n / k uncontended ones would. A part is compared with parts of a similar size,
    within a factor of two.
    """

    def __init__(self) -> None:
        # Times of the latest parts, by the number of binary digits of their size.
        self._times_s: defaultdict[int, deque[float]] = defaultdict(_latest_times)
        # Estimates from the latest parts.
        self._saturating: deque[float] = deque(maxlen=_NEWEST)
        self._bytes_per_s: deque[float] = deque(maxlen=_NEWEST)

    @property
    def connections(self) -> int | None:
        """Number of connections to use if the order of parts matters more than full throughput.

        None while the link is not measured.
        """
        if not self._saturating:
            return None
        return round(median(self._saturating)) + _SPARE

    @property
    def connection_bytes_per_s(self) -> float | None:
        """Rate of one connection while others are in use; None while the link is not measured."""
        if not self._bytes_per_s:
            return None
        return median(self._bytes_per_s)

    def record_time(self, size_bytes: int, time_s: float, connections: float) -> None:
        """Record the read of a part.

        Args:
            size_bytes: size of the part.
            time_s: time that the read took.
            connections: mean number of connections in use during the read.
        """
        time_s = max(time_s, _MIN_TIME_S)
        times_s = self._times_s[size_bytes.bit_length()]
        times_s.append(time_s)
        quick_s = sorted(times_s)[int(_QUICK_SHARE * len(times_s))]

        slowdown = max(1.0, time_s / quick_s)  # the k of the class's docstring
        self._saturating.append(connections / slowdown)
        self._bytes_per_s.append(size_bytes / time_s)


@dataclass(frozen=True, slots=True)
class OriginLoad:
    """Load on one origin, for the status page.

    Attributes:
        name: name of the origin.
        connections: number of requests in flight, without the paused ones.
        limit: maximum number of requests in flight that the origin accepts at present.
        throttled: number of times that this limit was lowered.
    """

    name: str
    connections: int
    limit: int
    throttled: int


class Limit(NamedTuple):
    """A limit on downloads.

    Attributes:
        name: the kind of limit, as it is called in metrics.
        text: description for people.
        holds: True while a download waits because of the limit.
    """

    name: str
    text: str
    holds: bool


@dataclass(slots=True, eq=False)
class OriginState:
    """State of one origin.

    Attributes:
        name: name of the origin.
        aimd: the limit on concurrent requests.
        hedging: the times of parts, and the second requests that they allow.
        link: the estimate of useful connections.
        held: number of slots that requests to the origin hold.
        cleared: True while claims that no reader waits for are paused on the link, because a reader
            reads a shard as it arrives (its download is streamed).
    """

    name: str
    aimd: Aimd
    hedging: Hedging
    link: Link = field(default_factory=Link)
    held: int = 0
    cleared: bool = False

    @property
    def usable(self) -> int:
        """Number of connections that the origin accepts and its link can use."""
        return min(self.aimd.limit, self.link.connections or self.aimd.limit)

    @property
    def is_full(self) -> bool:
        """True if no further request may be sent.

        Either the origin accepts no more, or the link is cleared and more would saturate it.
        """
        if self.cleared:
            return self.held >= self.usable
        return self.held >= self.aimd.limit

    @property
    def load(self) -> OriginLoad:
        """The present load on the origin."""
        return OriginLoad(self.name, self.held, self.aimd.limit, self.aimd.generation)
