"""The schedule at the present moment, and how far ahead of need a fetch has to begin."""

from __future__ import annotations

import time

from shardcache.cache.names import Names
from shardcache.plan.schedule import Schedule

# Before anything was measured, a shard is taken to need this long.
_GUESS_S = 5.0
_NEWEST = 0.2


class Planner:
    """A schedule with a clock."""

    def __init__(self, names: Names) -> None:
        self._schedule = Schedule(names)
        self._transfer_s = _GUESS_S
        names.watch(self._schedule.renamed)

    def __repr__(self) -> str:
        return f"Planner({self._schedule!r}, lead_s={self.lead_s:.3g})"

    @property
    def now(self) -> Schedule:
        """The schedule, told what time it is."""
        self._schedule.tick(time.monotonic())
        return self._schedule

    @property
    def lead_s(self) -> float:
        """How long before its need a shard's fetch may evict what is planned: what transfers take at present."""
        return self._transfer_s

    def learn(self, transfer_s: float) -> None:
        """Take note of how long a shard took from its first byte asked for to its publication."""
        self._transfer_s += _NEWEST * (transfer_s - self._transfer_s)
