"""Time that a reader has waited in the last half minute.

`WaitClock` adds each wait; the live view names the readers that waited long.
"""

RECENT_S = 30.0
"""Period in seconds whose waits are added up: many short waits are as bad as one long wait."""


class RecentWaits:
    """Time waited in the last `RECENT_S` seconds, kept for each second of the monotonic clock."""

    def __init__(self) -> None:
        # By second of the monotonic clock, the time waited in that second.
        self._waited_s: dict[int, float] = {}

    def add(self, since_s: float, until_s: float) -> None:
        """Add an interval of waiting.

        Args:
            since_s: start of the interval, by the monotonic clock.
            until_s: end of the interval, which is the present time.
        """
        oldest = int(until_s - RECENT_S)
        expired = [second for second in self._waited_s if second < oldest]
        for second in expired:
            del self._waited_s[second]
        for second in range(max(int(since_s), oldest), int(until_s) + 1):
            spent_s = min(until_s, second + 1) - max(since_s, second)
            self._waited_s[second] = self._waited_s.get(second, 0.0) + spent_s

    def total_s(self, now_s: float) -> float:
        """Return the time waited in the period that ends now: from 0 to `RECENT_S`."""
        start_s = now_s - RECENT_S
        total_s = 0.0
        for second, spent_s in self._waited_s.items():
            # The period begins in the middle of a second. Only the share of this second that lies
            # in the period counts.
            share = max(0.0, min(1.0, second + 1 - start_s))
            total_s += spent_s * share
        return min(RECENT_S, total_s)
