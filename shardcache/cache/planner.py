"""The schedule at the present moment, and the lead time that a fetch needs."""

from __future__ import annotations

import time

from shardcache.cache.catalog.aliases import AliasTable
from shardcache.plan.schedule import Schedule

# Assumed duration of a transfer until one has been measured.
_GUESS_S = 5.0
_NEWEST = 0.2


class Planner:
    """A schedule with a clock."""

    def __init__(self, names: AliasTable) -> None:
        self._schedule = Schedule(names)
        self._transfer_s = _GUESS_S
        names.watch(self._schedule.renamed)

    def __repr__(self) -> str:
        return f"Planner({self._schedule!r}, lead_s={self.lead_s:.3g})"

    @property
    def now(self) -> Schedule:
        """The schedule, advanced to the present time."""
        self._schedule.tick(time.monotonic())
        return self._schedule

    @property
    def lead_s(self) -> float:
        """Time before a shard's need from which its fetch may evict planned shards: the mean duration of transfers."""
        return self._transfer_s

    def learn(self, transfer_s: float) -> None:
        """Record the duration of a transfer, from its first request for bytes to publication."""
        self._transfer_s += _NEWEST * (transfer_s - self._transfer_s)
