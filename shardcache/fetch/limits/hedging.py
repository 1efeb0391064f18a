"""Second requests for late parts: when one is worth it, and how many are allowed.

The scheduler's state of each origin has a `Hedging`. A request is hedged if a second request is
sent for the same parts because the first is late. Patience is the time after which a request may be
late. Each part that arrives earns a little credit, and a hedged request spends the credit of its
parts. The origin may have a tier in front of it, which is a cache that the nodes of a cluster
share; a part's owner is the node that fetches the part for all of them. All times are passed in, so
that nothing here depends on a clock.
"""

import math
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

MAX_PARTS = 4
"""Maximum number of parts of one request for a shard that is fetched whole."""

HEDGED_SHARE = 0.03
"""Maximum share of parts whose request is hedged."""

PROMPT_STALL_SHARE = 0.04
"""Share of the stall time-out.

A tier that answers within this time is prompt, and no part is late before it has passed.
"""

LOOK_AGAIN_FACTOR = 1.1
"""Factor by which a late part's time has to grow before the part is looked at again.

That applies while a second request is not worth it, as other parts are just as slow.
"""

_PERCENTILE = 0.99
# A part is late if it takes this many times the usual time, even if the percentile is longer. If
# more than one answer in a hundred hangs, the percentile is the time of a hung answer.
_LATE_FACTOR = 5
# Number of times from which lateness is judged. With fewer, the 99th percentile would be the
# slowest of all.
_MIN_OBSERVED = 100
_OBSERVED = 1000  # number of the latest times that are kept for each size
# A part that takes this many times its patience is late, however slow the other parts are.
_MAX_PATIENCE_FACTOR = 5
# A second request for a part that takes less time would cost more than it could save.
_MIN_PATIENCE_S = 0.05
_MAX_CREDIT = 8.0  # number of parts
# Number of requests to a tier that may be hedged free of credit. So a slow owner is found before
# enough parts have arrived to earn credit.
_FREE_HEDGES = 2
# Expected time of a part from a tier whose times are unknown, as a share of the stall time-out.
_UNKNOWN_SHARE = 0.2


@dataclass(slots=True)
class _Times:
    """Times of the latest parts of one size.

    Attributes:
        last_s: the times in order of arrival.
        sorted_s: the same times, sorted.
    """

    last_s: deque[float] = field(default_factory=deque)
    sorted_s: list[float] = field(default_factory=list)

    def add(self, time_s: float) -> None:
        self.last_s.append(time_s)
        insort(self.sorted_s, time_s)
        if len(self.last_s) > _OBSERVED:
            oldest_s = self.last_s.popleft()
            del self.sorted_s[bisect_left(self.sorted_s, oldest_s)]

    def percentile_s(self, share: float) -> float:
        """Return the nearest-rank percentile."""
        return self.sorted_s[math.ceil(share * len(self.sorted_s)) - 1]

    @property
    def median_s(self) -> float:
        """The lower median."""
        return self.percentile_s(0.5)


class Hedging:
    """Part times of an origin, and the second requests for late parts that they allow.

    The method is from J. Dean and L. A. Barroso, "The Tail at Scale", Communications of the ACM
    56(2), 2013: a second request for the slowest one per cent of answers removes the latency tail,
    at the cost of about one per cent more requests.

    A part is compared with parts of a similar size, within a factor of two. If too few times of
    that size are known, it is compared with smaller parts, on the assumption that time grows in
    proportion to size.

    Args:
        share: maximum share of the parts whose request is hedged; 0 for none.
    """

    def __init__(self, share: float = HEDGED_SHARE) -> None:
        self._share = share
        # Times by the number of binary digits of the size.
        self._times: defaultdict[int, _Times] = defaultdict(_Times)
        self._credit = 0.0  # number of parts whose requests may be hedged
        self._max_credit = _MAX_CREDIT
        self._free_hedges = _FREE_HEDGES

    def record_time(self, size_bytes: int, time_s: float, parts: int = 1) -> None:
        """Record the arrival of some parts.

        Args:
            size_bytes: size of all of them.
            time_s: time from the first request for the parts to their arrival, even if a second
                request has brought them.
            parts: number of the parts.
        """
        self._times[size_bytes.bit_length()].add(time_s)
        # The credit must be able to reach the largest request, which could never be hedged
        # otherwise.
        self._max_credit = max(self._max_credit, parts)
        self._credit = min(self._max_credit, self._credit + parts * self._share)

    def patience_s(self, size_bytes: int, parts: int = MAX_PARTS) -> float | None:
        """Return the time after which a request may be late.

        Return None while too few times are known, and if no requests are to be hedged.

        Args:
            size_bytes: number of bytes that the request is for.
            parts: number of parts that the request is for. If too few times of its size are known,
                it is compared with requests for fewer parts.
        """
        if not self._share:
            return None
        similar = self._similar(size_bytes, parts)
        if similar is None:
            return None
        times, ratio = similar
        late_s = min(times.percentile_s(_PERCENTILE), _LATE_FACTOR * times.median_s)
        return max(_MIN_PATIENCE_S, ratio * late_s)

    def due_s(
        self,
        size_bytes: int,
        patience_s: float,
        received_bytes: int,
        others_bytes_per_s: Sequence[float],
    ) -> float:
        """Return the time after which a second request is likely to bring a part first.

        The time counts from the first request.

        Args:
            size_bytes: size of the part.
            patience_s: the patience when the first request was sent.
            received_bytes: number of bytes that the first request has brought so far.
            others_bytes_per_s: rates of the origin's other parts in flight. On a saturated link all
                of them are slow, and a second request would be just as slow.
        """
        second_s = self._second_request_s(size_bytes, patience_s, others_bytes_per_s)
        # At its rate so far, the first request needs `elapsed * left / received` for the rest. Once
        # that is as long as a second request takes, a second one is likely to come first.
        left_bytes = max(1, size_bytes - received_bytes)
        even_s = second_s * received_bytes / left_bytes
        return min(max(patience_s, even_s), _MAX_PATIENCE_FACTOR * patience_s)

    def _second_request_s(
        self,
        size_bytes: int,
        patience_s: float,
        others_bytes_per_s: Sequence[float],
    ) -> float:
        """Return the time that a second request is expected to take."""
        if others_bytes_per_s:
            return _median_time_s(size_bytes, others_bytes_per_s)
        similar = self._similar(size_bytes)
        if similar is None:
            return patience_s
        times, ratio = similar
        return ratio * times.median_s

    def usual_s(self, size_bytes: int, stall_timeout_s: float) -> float:
        """Return the time in which a part usually comes, from the origin or through its tier."""
        # Even a few times of this size are a better guess than the share of the time-out.
        times = self._times.get(size_bytes.bit_length())
        usual_s = _UNKNOWN_SHARE * stall_timeout_s
        if times is not None:
            usual_s = times.median_s
        return max(PROMPT_STALL_SHARE * stall_timeout_s, usual_s)

    def left_s(
        self,
        size_bytes: int,
        received_bytes: int,
        elapsed_s: float,
        usual_s: float,
        others_bytes_per_s: Sequence[float],
        stall_timeout_s: float,
    ) -> float | None:
        """Return the time that a part from a tier will still take; None if it is not late.

        A part is late if it takes much longer than usual. Before the first byte, more time is
        allowed, as the part's owner may be waiting for the object store.

        Args:
            size_bytes: size of the part.
            received_bytes: number of bytes received so far.
            elapsed_s: time since the request.
            usual_s: time in which a part usually comes.
            others_bytes_per_s: rates of the other parts in flight. While these are slow as well, a
                part counts as late only if it would take much longer than they do, or longer than
                the stall time-out.
            stall_timeout_s: time after which a silent request is given up.
        """
        if not self._share or elapsed_s < usual_s:
            return None
        if not received_bytes:
            if elapsed_s < _LATE_FACTOR * max(usual_s, stall_timeout_s):
                return None
            # Nothing else is known of the time to come, so it is expected to be as long again.
            return elapsed_s

        if others_bytes_per_s:
            others_s = _median_time_s(size_bytes, others_bytes_per_s)
            # The others count up to this maximum. `_LATE_FACTOR` times it is the stall time-out, so
            # a part that would take longer than that is always late.
            max_usual_s = stall_timeout_s / _LATE_FACTOR
            usual_s = max(usual_s, min(others_s, max_usual_s))
        expected_s = elapsed_s * size_bytes / received_bytes
        if expected_s < _LATE_FACTOR * usual_s:
            return None
        return expected_s - elapsed_s

    def spend(self, parts: int = 1) -> bool:
        """Return True if a request for `parts` parts may be hedged, and take its credit then."""
        if self._credit < parts:
            return False
        self._credit -= parts
        return True

    def spend_free_first(self) -> bool:
        """Return True if a request to a tier whose owner seems slow may be hedged.

        If so, one of the free hedges is used up, or credit for one part if no free hedge is left.
        """
        if not self._share or not self._free_hedges:
            return self.spend()  # False if nothing is to be hedged: there is never any credit
        self._free_hedges -= 1
        return True

    def regain_free(self) -> None:
        """Give back a free hedge, as a second request was faster, so the hedge was justified."""
        self._free_hedges = min(_FREE_HEDGES, self._free_hedges + 1)

    def _similar(self, size_bytes: int, parts: int = MAX_PARTS) -> tuple[_Times, int] | None:
        """Return the times to compare a request with, and the factor to multiply them by.

        The factor is above 1 if the times are those of smaller requests. Return None if too few
        times are known.
        """
        # The times of smaller requests will do. The size is halved until it is that of one part of
        # the request; for a request of fewer than `MAX_PARTS` parts, until it is a quarter.
        max_ratio = max(parts, MAX_PARTS)
        for doublings in range(max_ratio.bit_length()):
            similar = self._times.get(size_bytes.bit_length() - doublings)
            if similar is not None and len(similar.last_s) >= _MIN_OBSERVED:
                return similar, 2**doublings
        return None


def _median_time_s(size_bytes: int, rates_bytes_per_s: Sequence[float]) -> float:
    """Return the time of a part at the median of some rates.

    Args:
        rates_bytes_per_s: one rate or more; a median below one byte per second counts as one.
    """
    return size_bytes / max(median(rates_bytes_per_s), 1.0)
