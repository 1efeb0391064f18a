"""Estimate of how many connections saturate the link to an origin. Pure."""

from collections import defaultdict, deque
from statistics import median

# The quickest parts among this many show the speed of an uncontended connection. Once all of them
# were contended, the estimate rises, and more connections are tried again.
_OBSERVED = 64
_QUICK = 0.1
# One slow part says nothing about the link.
_NEWEST = 5
# Connections are idle between parts, and a faster link than estimated shows only when more
# connections are tried.
_SPARE = 2


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
        quick_s = sorted(times_s)[int(_QUICK * len(times_s))]

        share = quick_s / time_s if time_s > quick_s else 1.0
        self._saturating.append(connections * share)
        self._bytes_per_s.append(size_bytes / max(time_s, 1e-6))
