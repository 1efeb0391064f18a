"""Limit on the concurrent requests to an origin, as it answers or throttles them. Pure."""


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
