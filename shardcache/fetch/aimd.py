"""How many requests at a time a store takes: found by asking for one more until it says that this is too many."""

from __future__ import annotations


class Aimd:
    """A limit of concurrency that adds one after a round of successes and halves when the store is busy. Pure.

    After D.-M. Chiu and R. Jain, "Analysis of the Increase and Decrease Algorithms for Congestion Avoidance in
    Computer Networks", 1989: of the linear rules only this one leads many clients of one store to equal shares.

    Requests that were sent under one limit fail together when it was too high, which is one piece of news and not
    many: a request belongs to the `generation` in which it began, and only the first failure of a generation counts.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._successes = 0
        self.limit = most
        self.generation = 0

    def __repr__(self) -> str:
        return f"<Aimd {self.limit} of {self._most}, generation {self.generation}>"

    def succeeded(self, generation: int) -> None:
        """Take note of a request that got its answer; what was sent under another limit says nothing of this one."""
        if generation != self.generation or self.limit == self._most:
            return
        self._successes += 1
        if self._successes >= self.limit:
            self._successes = 0
            self.limit += 1

    def refused(self, generation: int) -> None:
        """Take note of a request that the store was too busy for."""
        if generation != self.generation:
            return
        self.generation += 1
        self._successes = 0
        self.limit = max(1, self.limit // 2)
