"""AIMD limit on concurrent requests to one origin: probes upward until the origin throttles."""

from __future__ import annotations


class Aimd:
    """Concurrency limit that grows by one after a round of successes and halves when the origin throttles. Pure.

    After D.-M. Chiu and R. Jain, "Analysis of the Increase and Decrease Algorithms for Congestion Avoidance in Computer
    Networks", 1989: the only linear rule that leads many clients of one origin to equal shares.

    Requests sent under a limit that was too high fail together, which is one signal, not many: each request belongs to
    the `generation` in which it began, and only the first failure of a generation counts.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._successes = 0
        self.limit = most
        self.generation = 0

    def __repr__(self) -> str:
        return f"<Aimd {self.limit} of {self._most}, generation {self.generation}>"

    def succeeded(self, generation: int) -> None:
        """Record an answered request; one sent under another limit says nothing about this one."""
        if generation != self.generation or self.limit == self._most:
            return
        self._successes += 1
        if self._successes >= self.limit:
            self._successes = 0
            self.limit += 1

    def refused(self, generation: int) -> None:
        """Record a throttled request."""
        if generation != self.generation:
            return
        self.generation += 1
        self._successes = 0
        self.limit = max(1, self.limit // 2)
