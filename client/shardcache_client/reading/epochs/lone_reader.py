"""Readers of single samples outside of the epoch's order, such as replacements for bad samples.

`LoneShardReader` reads a sample from its whole shard. `LoneRangeReader` fetches the sample's range
alone, if a table of samples has the place of the sample in its tar.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from shardcache.shared.exceptions import SampleError
from shardcache_client.daemon.reader_sessions import ReaderSessions
from shardcache_client.daemon.session import Session
from shardcache_client.order.shards.declared_plan import Plan
from shardcache_client.order.share_places import SampleId
from shardcache_client.reading.epochs.epoch_plans import SHARD_ERRORS, ReadResult, SampleForm
from shardcache_client.reading.leased.leased_shard import LeasedShard
from shardcache_client.reading.leased.shard_window import ShardWindow
from shardcache_client.reading.single.scattered_samples import ScatteredSamples
from shardcache_client.stages.pipeline import Pipeline


class SampleReader(Protocol):
    """Reads single samples. Any thread."""

    def read(self, sample_id: SampleId) -> ReadResult:
        """Return a sample, or the error of reading the sample."""

    def close(self) -> None:
        """Release the shards that are held, and close the sessions."""


class LoneShardReader:
    """Reads single samples from their shards.

    The session is opened when it is first needed. The shard of the last sample stays open, as the
    next sample is often in the same shard.

    Args:
        open_session: returns a new session, which this reader closes.
        form: the form in which samples are read.
    """

    def __init__(self, open_session: Callable[[], Session], form: SampleForm) -> None:
        self._open_session = open_session
        self._form = form
        self._session: Session | None = None
        self._window: ShardWindow | None = None
        self._shard: int | None = None  # number of the shard that is open
        self._leased_shard: LeasedShard | None = None
        self._lock = threading.Lock()

    def read(self, sample_id: SampleId) -> ReadResult:
        """Return a sample, or the error of reading it. Any thread."""
        shard, number = sample_id
        with self._lock:
            try:
                sample = self._open(shard).sample(number)
            except SampleError as exn:
                return exn.with_traceback(None)
            except SHARD_ERRORS as exn:
                # The shard cannot be read any further. The next sample of it opens it again.
                self._release()
                return exn.with_traceback(None)
        self._form.name_source(sample, shard)
        return sample

    def _open(self, shard: int) -> LeasedShard:
        """Open a shard in place of the previous one, unless it is open already; return it."""
        if self._leased_shard is not None and self._shard == shard:
            return self._leased_shard
        self._release()
        if self._session is None:
            self._session = self._open_session()
        form = self._form
        # The daemon shows epochs by number; 0 stands for reading outside of an epoch.
        plan = Plan.of(form.manifest, 0, [shard])
        self._window = form.declare(self._session, plan, partial=None)
        leased_shard = self._window.take(shard, form.manifest[shard].samples)
        leased_shard.open()
        self._shard = shard
        self._leased_shard = leased_shard
        return leased_shard

    def _release(self) -> None:
        """Release the shard that is open, if any."""
        if self._window is not None:
            self._window.empty()
        self._leased_shard = None

    def close(self) -> None:
        """Close the session, if there is one."""
        with self._lock:
            self._release()
            if self._session is not None:
                self._session.close()


class LoneRangeReader:
    """Reads single samples: by their ranges, or from their shards if the ranges are unknown.

    Args:
        form: the form in which samples are read, with the ranges of scattered samples.
        pipeline: has the members that are read of samples.
        sessions: opens the sessions.
    """

    def __init__(self, form: SampleForm, pipeline: Pipeline, sessions: ReaderSessions) -> None:
        self._form = form
        self._in_shards = LoneShardReader(sessions.open, form)
        self._by_range = ScatteredSamples(form.manifest, pipeline, sessions)

    def read(self, sample_id: SampleId) -> ReadResult:
        """Return a sample, or the error of reading it. Any thread."""
        scattered = self._form.scattered
        byte_range = None if scattered is None else scattered.range_of(*sample_id)
        if byte_range is None:
            return self._in_shards.read(sample_id)
        try:
            (ranged,) = self._by_range.read([byte_range])
        except (SampleError, *SHARD_ERRORS) as exn:
            return exn.with_traceback(None)
        shard, _ = sample_id
        self._form.name_source(ranged.sample, shard)
        return ranged.sample

    def close(self) -> None:
        """Close the sessions, if there are any."""
        self._in_shards.close()
        self._by_range.close()
