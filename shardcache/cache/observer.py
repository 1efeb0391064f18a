"""Observer of finished transfers and waits: records them in histograms."""

from __future__ import annotations

import time

from shardcache.cache.transfers.transfers import Transfer
from shardcache.cache.transfers.waiting import Stage, Wait
from shardcache.errors import ShardcacheError
from shardcache.metrics import Counters


class Observer:
    """Recorder to which transfers and readers report when a transfer or wait ends."""

    def __init__(self, counters: Counters) -> None:
        self._measures = counters.measures

    def transferred(self, transfer: Transfer, error: ShardcacheError | None) -> None:
        """Record a finished transfer. Postponed transfers, and those cancelled at shutdown, are not reported here."""
        stages = transfer.stages
        took_s = stages.spent_s(stages.begun_s, time.monotonic())
        if error is not None:
            self._measures.failed[error.code] += 1
        elif Stage.DISK in took_s:  # an already cached shard says nothing about how long a transfer takes
            self._measures.transfer.observe(sum(took_s.values()))
            for stage, spent_s in took_s.items():
                self._measures.stage.of(stage.name.lower()).observe(spent_s)

    def waited(self, wait: Wait) -> None:
        """Record the wait of a reader that had nothing else to read."""
        assert wait.since_s is not None  # set while a reader waits
        self._measures.wait.observe(time.monotonic() - wait.since_s)
