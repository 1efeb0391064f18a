"""One reader's epoch: from shard to shard of its plan, one lease ahead, and from sample to sample."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from shardcache.errors import CapacityError, DiskFullError, OriginError, SampleError, ShardError, ShardTimeoutError
from shardcache_client.connection import Reader
from shardcache_client.cutting import Sample
from shardcache_client.handlers import Handler
from shardcache_client.order import Plan
from shardcache_client.passage import Passage
from shardcache_client.session import Lease, Session
from shardcache_client.sessions import Sessions

log = logging.getLogger("shardcache")

# Errors that say something about one shard. Any other would meet the next shard as well, so no handler is asked.
_SHARD_ERRORS = (OriginError, ShardError, CapacityError, DiskFullError, ShardTimeoutError)


class _StoppedError(Exception):
    """A handler said that the epoch ends here."""


class EpochStream:
    """Iterable once: the samples of a plan's epoch.

    Errors of a shard or a sample go to `on_error`. Raises NoDaemonError when the daemon stays away for longer than
    the session's patience.
    """

    def __init__(self, sessions: Sessions, reader: Reader, plan: Plan, on_error: Handler) -> None:
        self._sessions = sessions
        self._reader = reader
        self._plan = plan
        self._on_error = on_error
        self._ahead: Lease | None = None
        self._skipped_shards = 0
        self._skipped_samples = 0

    def __repr__(self) -> str:
        return f"EpochStream(epoch={self._plan.epoch}, shards={self._plan.reads})"

    def __iter__(self) -> Iterator[Sample]:
        with self._sessions.borrow(self._reader) as session:
            session.declare(self._plan)
            try:
                for position in range(self._plan.reads):
                    shard, self._ahead = Passage(session, self._ahead or session.lease(position)), None
                    session.extend()  # behind the request for a shard, which so begins to come
                    try:
                        with self._opened(session, shard, position):
                            yield from self._samples(shard)
                    except _SHARD_ERRORS as exn:
                        self._consult(exn)
                        self._skipped_shards += 1
            except _StoppedError:
                session.close()
        self._say_what_was_skipped()

    @contextmanager
    def _opened(self, session: Session, shard: Passage, position: int) -> Iterator[None]:
        """Open a shard, and have the next one made ready while it is read."""
        try:
            shard.open()
            if position + 1 < self._plan.reads:
                self._ahead = session.lease(position + 1)
            yield
        finally:
            shard.close()

    def _samples(self, shard: Passage) -> Iterator[Sample]:
        while True:
            try:
                yield from shard.samples()
                return
            except SampleError as exn:
                self._consult(exn)
                self._skipped_samples += 1

    def _consult(self, exn: Exception) -> None:
        if not self._on_error(exn):
            raise _StoppedError

    def _say_what_was_skipped(self) -> None:
        if self._skipped_shards or self._skipped_samples:
            log.warning(
                "epoch %d: skipped %d of %d shards and %d samples of the others, as on_error decided",
                self._plan.epoch,
                self._skipped_shards,
                self._plan.reads,
                self._skipped_samples,
            )
