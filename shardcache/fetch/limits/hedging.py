"""Second requests for late parts: when one is worth it, and how many are allowed. Pure."""

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

MIN_STALL_SHARE = 0.04
"""Share of the stall time-out: a part from a tier that takes no longer is not late."""

LOOK_AGAIN = 1.1
"""Factor of a late part's time after which it is looked at again, while others are as slow."""

_PERCENTILE = 0.99
# A part is late if it takes this many times the usual time, even where the percentile is longer: if
# more than one answer in a hundred hangs, that is the time of a hung answer.
_LATE_FACTOR = 5
_MIN_OBSERVED = 100  # with fewer, the 99th percentile is the slowest of all
_OBSERVED = 1000  # times of a size that are kept: the latest
# A part that takes this many times its patience is late, however slow the others are.
_MAX_PATIENCE = 5
# Shorter times are not worth a second request: it would cost more than it could save.
_MIN_PATIENCE_S = 0.05
_MAX_CREDIT = 8.0  # in parts
# Requests to a tier that may be hedged without credit, so that a slow owner is found before a
# hundred parts have come.
_TRIES = 2
# Expected time of a part from a tier that nothing is known of, as a share of the stall time-out.
_UNKNOWN_SHARE = 0.2


@dataclass(slots=True)
class _Times:
    """Times of the latest parts, in order of arrival and sorted."""

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

    After J. Dean and L. A. Barroso, "The Tail at Scale", Communications of the ACM 56(2), 2013: a
    second request for the slowest one per cent of answers removes the latency tail at the cost of
    about one per cent more requests.

    Parts are compared with parts of a similar size: within a factor of two. While too few of a size
    are known, smaller ones are compared with, as if time grew with size.

    Args:
        share: maximum share of the parts whose request is hedged; 0 for none.
    """

    def __init__(self, share: float = HEDGED_SHARE) -> None:
        self._share = share
        self._times: defaultdict[int, _Times] = defaultdict(_Times)  # by size
        self._credit = 0.0
        self._max_credit = _MAX_CREDIT
        self._tries = _TRIES

    def took(self, size_bytes: int, time_s: float, parts: int = 1) -> None:
        """Record the time from the first request for some parts to their arrival.

        It counts from the first request, whichever brought them.
        """
        self._times[size_bytes.bit_length()].add(time_s)
        self._max_credit = max(self._max_credit, parts)  # or the largest were never hedged
        self._credit = min(self._max_credit, self._credit + parts * self._share)

    def patience_s(self, size_bytes: int, parts: int = MAX_PARTS) -> float | None:
        """Return the time after which a request may be late; None while too few times are known.

        Args:
            parts: number of parts that it is for. Where few requests of its size are known, it is
                compared with those for fewer parts.
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

        Args:
            patience_s: the patience when the first request was sent.
            received_bytes: received by the first request so far.
            others_bytes_per_s: rates of the origin's other parts in flight. On a saturated link all
                of them are slow, and a second request would be just as slow.
        """
        again_s = self._again_s(size_bytes, patience_s, others_bytes_per_s)
        # At this time the first request, if it has come no further, is so slow that it needs as
        # long for the rest as the second for all bytes.
        left_bytes = max(1, size_bytes - received_bytes)
        even_s = again_s * received_bytes / left_bytes
        return min(max(patience_s, even_s), _MAX_PATIENCE * patience_s)

    def _again_s(
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
        """Return the time in which the origin usually sends a part, itself or by the tier."""
        times = self._times.get(size_bytes.bit_length())
        usual_s = _UNKNOWN_SHARE * stall_timeout_s
        if times is not None:
            usual_s = times.median_s
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
        """Return the time that a part from a tier will still take.

        None if it does not take much longer than usual. Before the first byte, its owner may be
        waiting for the object store itself, as long as the others' parts take.

        Args:
            others_bytes_per_s: rates of the other parts in flight. While these are slow as well, a
                part has to be so slow that it would take longer than the stall time-out.
        """
        if not self._share or elapsed_s < usual_s:
            return None
        if not received_bytes:
            is_late = elapsed_s >= _LATE_FACTOR * max(usual_s, stall_timeout_s)
            return elapsed_s if is_late else None  # as long again: nothing else is known

        if others_bytes_per_s:
            others_s = _median_time_s(size_bytes, others_bytes_per_s)
            usual_s = max(usual_s, min(others_s, _UNKNOWN_SHARE * stall_timeout_s))
        expected_s = elapsed_s * size_bytes / received_bytes
        is_late = expected_s >= _LATE_FACTOR * usual_s
        return expected_s - elapsed_s if is_late else None

    def spend(self, parts: int = 1) -> bool:
        """Return whether one more hedged request of `parts` parts is allowed, and count it."""
        if self._credit < parts:
            return False
        self._credit -= parts
        return True

    def tries(self) -> bool:
        """Return whether a request to a tier whose owner seems slow may be hedged, and count it.

        One that has `won` is given back.
        """
        if not self._share or not self._tries:
            return self.spend()
        self._tries -= 1
        return True

    def won(self) -> None:
        """Record that a request was hedged with good reason."""
        self._tries = min(_TRIES, self._tries + 1)

    def _similar(self, size_bytes: int, parts: int = MAX_PARTS) -> tuple[_Times, int] | None:
        """Return the times to compare a request with, and the factor for its size.

        None if too few are known.
        """
        max_parts = max(parts, MAX_PARTS)  # ranges have smaller parts than shards, and more of them
        for doublings in range(max_parts.bit_length()):
            similar = self._times.get(size_bytes.bit_length() - doublings)
            if similar is not None and len(similar.last_s) >= _MIN_OBSERVED:
                return similar, 2**doublings
        return None


def _median_time_s(size_bytes: int, rates_bytes_per_s: Sequence[float]) -> float:
    """Return the time of a part at the median rate; a rate below one byte per second counts as one.

    Args:
        rates_bytes_per_s: one or more.
    """
    return size_bytes / max(median(rates_bytes_per_s), 1.0)
