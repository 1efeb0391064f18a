"""Estimate of the number of connections that saturate the link to an origin. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial
from statistics import median

# The quickest parts among this many show the speed of an uncontended connection. Once all of them were contended, the
# estimate rises, and more connections are tried again.
_OBSERVED = 64
_QUICK = 0.1
# One slow part says nothing about the link.
_NEWEST = 5
# Connections are idle between parts, and a faster link than estimated shows only when more connections are tried.
_SPARE = 2


class Line:
    """Estimates the number of connections from the parts that arrive: n connections whose parts take k times as long as
    quick ones do the work of n / k.

    Parts are compared with parts of a similar size: within a factor of two.
    """

    def __init__(self) -> None:
        self._times_s: defaultdict[int, deque[float]] = defaultdict(partial(deque[float], maxlen=_OBSERVED))
        self._full: deque[float] = deque(maxlen=_NEWEST)
        self._newest_bytes_per_s: deque[float] = deque(maxlen=_NEWEST)

    def __repr__(self) -> str:
        return f"<Line {self.connections} connections>"

    @property
    def connections(self) -> int | None:
        """Connections to use where order matters more than the last bit of throughput; None while unknown."""
        return round(median(self._full)) + _SPARE if self._full else None

    @property
    def connection_bytes_per_s(self) -> float | None:
        """Rate of one connection while the others are in use; None while unknown."""
        return median(self._newest_bytes_per_s) if self._newest_bytes_per_s else None

    def took(self, size_bytes: int, time_s: float, connections: float) -> None:
        """Record a part's time and the mean number of connections in use while it was read."""
        times_s = self._times_s[size_bytes.bit_length()]
        times_s.append(time_s)
        quick_s = sorted(times_s)[int(_QUICK * len(times_s))]
        self._newest_bytes_per_s.append(size_bytes / max(time_s, 1e-6))
        self._full.append(connections * (quick_s / time_s if time_s > quick_s else 1.0))
