"""Samples read by their ranges, by any number of threads.

A range is the part of a tar that holds one sample. The daemon fetches the range alone, unless the
whole shard is cached. Datasets that are indexed by number read single samples in this way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from shardcache.shared.exceptions import ShardcacheError
from shardcache_client.daemon.reader_sessions import ReaderSessions
from shardcache_client.daemon.session import Session
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.reading.single.range_reader import RangeReader
from shardcache_client.reading.single.sample_ranges import SampleRange
from shardcache_client.samples.slicing import Sample
from shardcache_client.stages.pipeline import Pipeline

MAX_ASKED = 256
"""Maximum number of open requests for samples: enough to use all of the daemon's connections.

The first message has as many requests.
"""

ASKED_TOGETHER = 64
"""Number of samples in each later message, which is sent once as many have been taken."""

MAX_PLANNED = 65_536
"""Maximum number of samples that a plan of ranges announces beyond those that are requested."""


class RangedSample(NamedTuple):
    """A sample that was read by its range.

    Attributes:
        sample: the sample.
        is_cached: True if the sample came from a shard that is cached as a whole.
    """

    sample: Sample
    is_cached: bool


class ScatteredSamples:
    """Reads samples by their ranges. Threads that read at the same time have a session each.

    Args:
        manifest: the shards; a range names its shard by the number in the manifest.
        pipeline: its `view` is the form in which samples are read.
        sessions: opens the sessions.
    """

    def __init__(self, manifest: Manifest, pipeline: Pipeline, sessions: ReaderSessions) -> None:
        self._manifest = manifest
        self._pipeline = pipeline
        self._sessions = sessions
        self._idle: list[tuple[Session, RangeReader]] = []

    def read(self, byte_ranges: Sequence[SampleRange]) -> Iterator[RangedSample]:
        """Yield the samples of some ranges, in the order given, fetching many at the same time.

        Raises any error of `RangeReader.take`, which ends the iterator.
        """
        if not byte_ranges:
            return
        with self._borrowed() as reader:
            # `needed`: the caller waits for the first of these samples now. The others are fetched
            # ahead.
            requests = deque(reader.ask(byte_ranges[:MAX_ASKED], needed=True))
            next_number = MAX_ASKED
            try:
                while requests:
                    request = requests.popleft()
                    sample = reader.take(request)
                    has_more = next_number < len(byte_ranges)
                    has_room = len(requests) <= MAX_ASKED - ASKED_TOGETHER
                    if has_more and has_room:
                        more = byte_ranges[next_number : next_number + ASKED_TOGETHER]
                        requests += reader.ask(more, needed=False)
                        next_number += ASKED_TOGETHER
                    yield RangedSample(sample, is_cached=reader.came_from_whole_shard(request))
            finally:
                for request in requests:
                    reader.drop(request)
                reader.flush()

    @contextmanager
    def _borrowed(self) -> Iterator[RangeReader]:
        """Provide the reader of an idle session, or of a new one.

        Afterwards the session is idle, even after an error of shardcache or an early end of the
        iteration. After any other error, such as an interrupt in the middle of a message, it is
        closed.
        """
        session, reader = self._take_idle() or self._open()
        try:
            yield reader
        except (ShardcacheError, GeneratorExit):  # GeneratorExit: the caller reads no further
            self._idle.append((session, reader))
            raise
        except BaseException:
            session.close()
            raise
        self._idle.append((session, reader))

    def _take_idle(self) -> tuple[Session, RangeReader] | None:
        """Return an idle session and its reader; None if there is none."""
        try:
            # No lock is needed, as this is one operation: other threads may do the same meanwhile.
            return self._idle.pop()
        except IndexError:
            return None

    def _open(self) -> tuple[Session, RangeReader]:
        """Open a session, and return it with a reader."""
        session = self._sessions.open()
        return session, RangeReader(session, self._manifest, self._pipeline.view)

    def close(self) -> None:
        """Close the idle sessions."""
        while self._idle:
            session, _ = self._idle.pop()
            session.close()
