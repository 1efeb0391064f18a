"""Estimates of what an origin takes and how it answers: concurrent requests, connections of its link, times of parts.

Pure. Parts are compared with parts of a similar size: within a factor of two.
"""

import math
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

# The quickest parts among this many show the speed of an uncontended connection. Once all of them were contended, the
# estimate rises, and more connections are tried again.
_LINK_OBSERVED = 64
_QUICK = 0.1
# One slow part says nothing about the link.
_NEWEST = 5
# Connections are idle between parts, and a faster link than estimated shows only when more connections are tried.
_SPARE = 2

MAX_PARTS = 4
"""Maximum number of parts of one request."""

HEDGED_SHARE = 0.03
"""Maximum share of parts whose request is hedged."""

_PERCENTILE = 0.99
# If more than one answer in a hundred hangs, the percentile is the time of a hung answer and useless as a limit.
_MEDIANS = 5
_MIN_OBSERVED = 100  # with fewer, the 99th percentile is the slowest of all
_OBSERVED = 1000
# A part that takes this many times its patience is late, however slow the others are.
_MAX_PATIENCE = 5
# Shorter times are not worth a second request: it would cost more than it could save.
_MIN_PATIENCE_S = 0.05
_MAX_CREDIT = 8.0
# So that a slow owner in a cluster's tier is found before a hundred parts have come.
_TRIES = 2
_UNKNOWN = 0.2  # expected time of a part from a tier that nothing is known of, as a share of the stall time-out

MIN_STALL_SHARE = 0.04
"""Share of the stall time-out: a part from a tier that takes no longer is not late."""
LOOK_AGAIN = 1.1
"""While the other parts are as slow as a late one, it is looked at again after a tenth more of its time."""


class Aimd:
    """Concurrency limit that grows by one after a round of successes and halves when the origin throttles.

    After D.-M. Chiu and R. Jain, "Analysis of the Increase and Decrease Algorithms for Congestion Avoidance in Computer
    Networks", 1989: the only linear rule that leads many clients of one origin to equal shares.

    Requests sent under a limit that was too high fail together, which is one signal, not many: each request belongs to
    the `generation` in which it began, and only the first failure of a generation counts.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = self.limit = maximum
        self._successes = 0
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


class Link:
    """Number of connections that saturate the link to an origin: n whose parts take k times as long as quick ones do
    the work of n / k.
    """

    def __init__(self) -> None:
        self._times_s: defaultdict[int, deque[float]] = defaultdict(partial(deque[float], maxlen=_LINK_OBSERVED))
        self._saturating: deque[float] = deque(maxlen=_NEWEST)
        self._bytes_per_s: deque[float] = deque(maxlen=_NEWEST)

    @property
    def connections(self) -> int | None:
        """Connections to use where order matters more than the last bit of throughput; None while unknown."""
        return round(median(self._saturating)) + _SPARE if self._saturating else None

    @property
    def connection_bytes_per_s(self) -> float | None:
        """Rate of one connection while the others are in use; None while unknown."""
        return median(self._bytes_per_s) if self._bytes_per_s else None

    def took(self, size_bytes: int, time_s: float, connections: float) -> None:
        """Record a part's time and the mean number of connections in use while it was read."""
        times_s = self._times_s[size_bytes.bit_length()]
        times_s.append(time_s)
        quick_s = sorted(times_s)[int(_QUICK * len(times_s))]
        self._bytes_per_s.append(size_bytes / max(time_s, 1e-6))
        self._saturating.append(connections * (quick_s / time_s if time_s > quick_s else 1.0))


@dataclass(slots=True)
class _Times:
    """Times of the latest parts, in order of arrival and sorted."""

    last_s: deque[float] = field(default_factory=deque)
    sorted_s: list[float] = field(default_factory=list)

    def add(self, time_s: float) -> None:
        self.last_s.append(time_s)
        insort(self.sorted_s, time_s)
        if len(self.last_s) > _OBSERVED:
            del self.sorted_s[bisect_left(self.sorted_s, self.last_s.popleft())]

    def percentile_s(self, share: float) -> float:
        """Return the nearest-rank percentile."""
        return self.sorted_s[math.ceil(share * len(self.sorted_s)) - 1]


class Hedging:
    """Part times of an origin, and the second requests for late parts that they allow.

    After J. Dean and L. A. Barroso, "The Tail at Scale", Communications of the ACM 56(2), 2013: a second request for
    the slowest one per cent of answers removes the latency tail at the cost of about one per cent more requests. While
    too few parts of a size are known, smaller ones are compared with, as if time grew with size.
    """

    def __init__(self, share: float = HEDGED_SHARE) -> None:
        self._share = share  # maximum share of the parts whose request is hedged; 0 for none
        self._times: defaultdict[int, _Times] = defaultdict(_Times)  # by size
        self._credit = 0.0
        self._tries = _TRIES

    def took(self, size_bytes: int, time_s: float, parts: int = 1) -> None:
        """Record the time from the first request for some parts to their arrival, whichever request brought them."""
        self._times[size_bytes.bit_length()].add(time_s)
        self._credit = min(_MAX_CREDIT, self._credit + parts * self._share)

    def patience_s(self, size_bytes: int) -> float | None:
        """Return the time after which a part may be late; None while too few times are known."""
        if not self._share or (similar := self._similar(size_bytes)) is None:
            return None
        times, ratio = similar
        late_s = ratio * min(times.percentile_s(_PERCENTILE), _MEDIANS * times.percentile_s(0.5))
        return max(_MIN_PATIENCE_S, late_s)

    def due_s(
        self, size_bytes: int, patience_s: float, received_bytes: int, others_bytes_per_s: Sequence[float]
    ) -> float:
        """Return the time after which a second request is likely to bring a part sooner than the first.

        Args:
            patience_s: the patience when the first request was sent.
            received_bytes: received by the first request so far.
            others_bytes_per_s: rates of the origin's other parts in flight. On a saturated link all of them are slow,
                and a second request would be just as slow.
        """
        if others_bytes_per_s:
            again_s = size_bytes / max(median(others_bytes_per_s), 1.0)
        elif (similar := self._similar(size_bytes)) is not None:
            times, ratio = similar
            again_s = ratio * times.percentile_s(0.5)
        else:
            again_s = patience_s
        left_bytes = max(1, size_bytes - received_bytes)
        return min(max(patience_s, again_s * received_bytes / left_bytes), _MAX_PATIENCE * patience_s)

    def usual_s(self, size_bytes: int, stall_timeout_s: float) -> float:
        """Return the time in which the origin usually sends a part, itself or by way of the tier."""
        times = self._times.get(size_bytes.bit_length())
        usual_s = _UNKNOWN * stall_timeout_s if times is None else times.percentile_s(0.5)
        return max(MIN_STALL_SHARE * stall_timeout_s, usual_s)

    def left_s(
        self,
        size_bytes: int,
        received_bytes: int,
        elapsed_s: float,
        usual_s: float,
        others_bytes_per_s: Sequence[float],
        stall_timeout_s: float,
    ) -> float | None:
        """Return the time that a part from a tier will still take, if it takes much longer than usual; else None.

        Before the first byte, its owner may be waiting for the object store itself, as long as the others' parts take.

        Args:
            others_bytes_per_s: rates of the other parts in flight. While these are slow as well, a part has to be so
                slow that it would take longer than the stall time-out.
        """
        if not self._share or elapsed_s < usual_s:
            return None
        if not received_bytes:
            return elapsed_s if elapsed_s >= _MEDIANS * max(usual_s, stall_timeout_s) else None
        if others_bytes_per_s:
            others_s = size_bytes / max(median(others_bytes_per_s), 1.0)
            usual_s = max(usual_s, min(others_s, _UNKNOWN * stall_timeout_s))
        expected_s = elapsed_s * size_bytes / received_bytes
        return expected_s - elapsed_s if expected_s >= _MEDIANS * usual_s else None

    def spend(self, parts: int = 1) -> bool:
        """Return whether one more hedged request of `parts` parts is allowed, and count it."""
        is_allowed = self._credit >= parts
        self._credit -= parts * is_allowed
        return is_allowed

    def tries(self) -> bool:
        """Return whether a request to a tier whose owner seems slow may be hedged, and count it until it has `won`."""
        if not self._share or not self._tries:
            return self.spend()
        self._tries -= 1
        return True

    def won(self) -> None:
        """Record that a request was hedged with good reason."""
        self._tries = min(_TRIES, self._tries + 1)

    def _similar(self, size_bytes: int) -> tuple[_Times, int] | None:
        """Return the times to compare a request with, and the factor for its size; None if too few are known."""
        for doublings in range(MAX_PARTS.bit_length()):  # from a single part to the largest request
            similar = self._times.get(size_bytes.bit_length() - doublings)
            if similar is not None and len(similar.last_s) >= _MIN_OBSERVED:
                return similar, 2**doublings
        return None
