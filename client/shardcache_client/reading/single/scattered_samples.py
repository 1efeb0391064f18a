"""Samples read by their ranges, by any number of threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from shardcache.errors import ShardcacheError
from shardcache_client.daemon.reader_sessions import ReaderSessions
from shardcache_client.daemon.session import Session
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.reading.single.sample_places import SamplePlace
from shardcache_client.reading.single.sample_ranges import SampleRanges
from shardcache_client.samples.slicing import Sample
from shardcache_client.stages.pipeline import Pipeline

MAX_ASKED = 256
"""Number of samples that are requested at a time: enough to use all of the daemon's connections."""

ASKED_TOGETHER = 64
"""Number of samples in a later request: one message, sent once as many samples were taken."""


class RangedSample(NamedTuple):
    """A sample that was read by its range.

    Attributes:
        sample: the sample itself.
        is_cached: True if its shard is cached as a whole.
    """

    sample: Sample
    is_cached: bool


class ScatteredSamples:
    """Reads samples by their places. Threads that read at the same time have a session each."""

    def __init__(self, manifest: Manifest, pipeline: Pipeline, sessions: ReaderSessions) -> None:
        self._manifest = manifest
        self._pipeline = pipeline
        self._sessions = sessions
        self._idle: list[tuple[Session, SampleRanges]] = []

    def read(self, places: Sequence[SamplePlace]) -> Iterator[RangedSample]:
        """Yield the samples at some places, in their order; many are fetched at the same time.

        Raises what `SampleRanges.take` raises, which ends the iterator.
        """
        if not places:
            return
        with self._lent() as ranges:
            # `needed`: the reader waits for these now, and for the later ones only after them.
            requests = deque(ranges.ask(places[:MAX_ASKED], needed=True))
            next_place = MAX_ASKED
            try:
                while requests:
                    request = requests.popleft()
                    sample = ranges.take(request)
                    if len(requests) <= MAX_ASKED - ASKED_TOGETHER and next_place < len(places):
                        more = places[next_place : next_place + ASKED_TOGETHER]
                        requests += ranges.ask(more, needed=False)
                        next_place += ASKED_TOGETHER
                    yield RangedSample(sample, ranges.is_whole(request))
            finally:
                for request in requests:
                    ranges.drop(request)
                ranges.flush()

    @contextmanager
    def _lent(self) -> Iterator[SampleRanges]:
        """Lend a session, which is closed after an error that is not shardcache's."""
        if self._idle:
            session, ranges = self._idle.pop()
        else:
            session = self._sessions.open()
            ranges = SampleRanges(session, self._manifest, self._pipeline.view)
        try:
            yield ranges
        except (ShardcacheError, GeneratorExit):
            self._idle.append((session, ranges))
            raise
        except BaseException:
            session.close()
            raise
        self._idle.append((session, ranges))

    def close(self) -> None:
        """Close the idle sessions."""
        while self._idle:
            session, _ = self._idle.pop()
            session.close()
