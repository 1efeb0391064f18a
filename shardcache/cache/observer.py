"""Observer of finished transfers and waits: records them in histograms and, where enabled, as traces."""

from __future__ import annotations

import time

from shardcache.cache.readers.jobs import Job
from shardcache.cache.transfers.transfers import Transfer
from shardcache.cache.transfers.waiting import Stage, Wait
from shardcache.errors import ShardcacheError
from shardcache.observability.metrics import Counters
from shardcache.observability.traces import Span, Traces


class Observer:
    """Recorder to which transfers and readers report when a transfer or wait ends."""

    def __init__(self, counters: Counters, traces: Traces | None = None) -> None:
        self._measures = counters.measures
        self._traces = traces

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
        if self._traces is not None:
            self._traces.record(_of_transfer(transfer, error))

    def waited(self, wait: Wait, job: Job) -> None:
        """Record the wait of a reader that had nothing else to read."""
        assert wait.since_s is not None  # set while a reader waits
        self._measures.wait.observe(time.monotonic() - wait.since_s)
        if self._traces is not None:
            self._traces.record(_of_wait(wait, job, wait.since_s))


def _of_transfer(transfer: Transfer, error: ShardcacheError | None) -> Span:
    attributes: dict[str, str | int] = {"shardcache.class": transfer.klass.name.lower()}
    if transfer.total_bytes is not None:
        attributes["shardcache.size_bytes"] = transfer.total_bytes
    stages, now_s = transfer.stages, time.monotonic()
    spans = tuple(
        (stage.name.lower(), begun_s, ended_s) for stage, begun_s, ended_s in stages.between(stages.begun_s, now_s)
    )
    return Span("transfer", transfer.ref.url, stages.begun_s, now_s, attributes, spans, error)


def _of_wait(wait: Wait, job: Job, since_s: float) -> Span:
    now_s = time.monotonic()
    spans = wait.stages.between(since_s, now_s) if wait.stages else ()
    return Span(
        "lease wait",
        wait.url,
        since_s,
        now_s,
        {"shardcache.job": job.name, "shardcache.uid": job.uid},
        tuple((stage.name.lower(), begun_s, ended_s) for stage, begun_s, ended_s in spans),
    )
