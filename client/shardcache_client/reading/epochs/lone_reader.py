"""Readers of single samples, such as those that replace bad ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from shardcache.errors import SampleError
from shardcache_client.daemon.reader_sessions import ReaderSessions
from shardcache_client.daemon.session import Session
from shardcache_client.order.rank_epoch import SampleId
from shardcache_client.order.shards.declared_plan import Plan
from shardcache_client.reading.epochs.epoch_plans import SHARD_ERRORS, Read, SampleForm
from shardcache_client.reading.leased.leased_shard import LeasedShard
from shardcache_client.reading.leased.shard_window import ShardWindow
from shardcache_client.reading.single.scattered_samples import ScatteredSamples
from shardcache_client.stages.pipeline import Pipeline


class ReadsSample(Protocol):
    """Reads single samples. Any thread."""

    def read(self, sample: SampleId) -> Read:
        """Return what is read of a sample."""

    def close(self) -> None:
        """Release all that is held."""


class LoneReader:
    """Reads single samples from their shards.

    Its session is opened when one is needed. The shard of the last sample is kept open: the next
    one is often beside it.
    """

    def __init__(self, open_session: Callable[[], Session], form: SampleForm) -> None:
        self._open_session = open_session
        self._form = form
        self._session: Session | None = None
        self._window: ShardWindow | None = None
        self._shard: int | None = None  # number of the shard that is open
        self._leased: LeasedShard | None = None
        self._lock = threading.Lock()

    def read(self, sample: SampleId) -> Read:
        """Return what is read of a sample. Any thread."""
        shard, number = sample
        with self._lock:
            try:
                found = self._opened(shard).sample(number)
            except (SampleError, *SHARD_ERRORS) as exn:
                return exn.with_traceback(None)
        self._form.name(found, shard)
        return found

    def _opened(self, shard: int) -> LeasedShard:
        """Return a shard that is open, in place of the one that was."""
        if self._leased is not None and self._shard == shard:
            return self._leased
        if self._window is not None:
            self._window.empty()
        self._leased = None

        if self._session is None:
            self._session = self._open_session()
        form = self._form
        plan = Plan.of(form.manifest, 0, [shard])
        self._window = form.declare(self._session, plan, partial=None)
        leased = self._window.take(shard, form.manifest[shard].samples)
        leased.open()
        self._shard = shard
        self._leased = leased
        return leased

    def close(self) -> None:
        """Close the session, if there is one."""
        with self._lock:
            if self._window is not None:
                self._window.empty()
            if self._session is not None:
                self._session.close()


class LoneSamples:
    """Reads single samples by their ranges; those whose ranges are unknown, from their shards."""

    def __init__(self, form: SampleForm, pipeline: Pipeline, sessions: ReaderSessions) -> None:
        self._form = form
        self._in_shards = LoneReader(sessions.open, form)
        self._by_range = ScatteredSamples(form.manifest, pipeline, sessions)

    def read(self, sample: SampleId) -> Read:
        """Return what is read of a sample. Any thread."""
        scattered = self._form.scattered
        place = None if scattered is None else scattered.place(*sample)
        if place is None:
            return self._in_shards.read(sample)
        shard, _ = sample
        try:
            ((made, _),) = self._by_range.read([place])
        except (SampleError, *SHARD_ERRORS) as exn:
            return exn.with_traceback(None)
        self._form.name(made, shard)
        return made

    def close(self) -> None:
        """Close the sessions, if there are any."""
        self._in_shards.close()
        self._by_range.close()
