"""Circuit breaker for one way to make requests, such as by presigned urls or through the tier.

While a breaker is open, requests are made in another way. Only probes still use this way: single
requests that find out whether it works again. A stall is a request that gets no answer in time. The
tier is an optional cache that the nodes of a cluster share.
"""

import math

_MAX_FAILURES = 16  # default number of consecutive failures that open a breaker
_PAUSE_S = 10.0  # default time between two probes


class Breaker:
    """Circuit breaker: opens after consecutive failures, then admits probes until one succeeds.

    Two consecutive stalls are enough to open it: with few connections, sixteen stalls would take
    minutes. See M. Nygard, "Release It!", 2007.

    Args:
        max_failures: number of consecutive failures that open the breaker.
        pause_s: time between two probes.
    """

    def __init__(self, max_failures: int = _MAX_FAILURES, pause_s: float = _PAUSE_S) -> None:
        self._max_failures = max_failures
        self._pause_s = pause_s
        self._failures = 0
        self._next_probe_s = 0.0  # time at which the next probe is admitted, if the breaker is open

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<Breaker {state} after {self._failures} failures>"

    @property
    def is_open(self) -> bool:
        """True if only probes are admitted."""
        return self._failures >= self._max_failures

    def admit(self, now_s: float) -> bool:
        """Return whether a request may be sent now. While the breaker is open, it is a probe.

        The next probe is due `pause_s` later, even if the result of this one is never reported.
        """
        if not self.is_open:
            return True
        if now_s < self._next_probe_s:
            return False
        self._next_probe_s = now_s + self._pause_s
        return True

    def succeeded(self) -> None:
        """Close the breaker."""
        self._failures = 0

    def failed(self, now_s: float, *, stalled: bool = False) -> None:
        """Count a failure.

        Args:
            stalled: True for a stall, which counts as half of `max_failures`.
        """
        if stalled:
            self._failures += math.ceil(self._max_failures / 2)
        else:
            self._failures += 1
        if self.is_open:
            self._next_probe_s = now_s + self._pause_s
