"""Whole shards held for reading samples by number, and the choice between shards and ranges.

A dataset that is indexed by number (`IndexedShards`) has two ways to read a sample. It can fetch
the sample's range, the bytes of that sample alone; or it can hold the whole shard, which is then
cached, leased and mapped, so that its other samples cost little. Users who read near the same place
again get whole shards.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from shardcache.shared.exceptions import SampleError
from shardcache_client.daemon.reader_sessions import ReaderSessions
from shardcache_client.daemon.session import Session
from shardcache_client.order.shards.declared_plan import Plan
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.reading.leased.leased_shard import LeasedShard
from shardcache_client.reading.leased.shard_window import ShardWindow
from shardcache_client.samples.slicing import Sample
from shardcache_client.stages.pipeline import Pipeline

# Number of samples of a cached shard that are read by their ranges before the shard is held.
# Opening a shard takes as long as reading several ranges.
_CACHED_RANGES = 4
# Number of samples that are read by their ranges in order, one after another, before their shard is
# held, cached or not. Reading ahead in a held shard pays off only after so many.
_RANGES_IN_ORDER = 16


@dataclass(frozen=True, slots=True)
class _HeldShard:
    """A mapped shard, and the session that holds it in the cache.

    Attributes:
        session: the session with the lease on the shard.
        window: the window that requested the shard and releases it.
        leased_shard: the shard.
    """

    session: Session
    window: ShardWindow
    leased_shard: LeasedShard

    def close(self) -> None:
        """Release the shard, and close its session."""
        self.window.empty()
        self.session.close()


class HeldShards:
    """The shards that were last asked for, held and mapped. One thread at a time.

    Args:
        manifest: the dataset's shards.
        pipeline: its `view` is the form in which samples of a shard are read.
        sessions: opens a session for each held shard.
        max_held: maximum number of shards that are held.
    """

    def __init__(
        self,
        manifest: Manifest,
        pipeline: Pipeline,
        sessions: ReaderSessions,
        max_held: int,
    ) -> None:
        self._manifest = manifest
        self._pipeline = pipeline
        self._sessions = sessions
        self._max_held = max_held
        # By number of the shard, the last asked for at the end.
        self._held: OrderedDict[int, _HeldShard] = OrderedDict()

    @property
    def numbers(self) -> list[int]:
        """Numbers of the shards that are held."""
        return sorted(self._held)

    def __contains__(self, shard: int) -> bool:
        return shard in self._held

    def sample(self, shard: int, number: int) -> Sample:
        """Return a sample by its number in the tar, once its shard has arrived up to there.

        Raises any error of opening and reading the shard.
        """
        self.hold(shard)
        leased_shard = self._held[shard].leased_shard
        try:
            return leased_shard.sample(number)
        except SampleError:
            raise  # the shard is sound, and stays held
        except BaseException:
            # The shard may have been replaced, or the wait for it interrupted. It is released, so
            # that the next call opens it again.
            self._held.pop(shard).close()
            raise

    def close(self) -> None:
        """Release all shards."""
        while self._held:
            _, held_shard = self._held.popitem()
            held_shard.close()

    def hold(self, shard: int) -> None:
        """Hold a shard, and count it as the shard that was asked for last.

        Raises any error of opening the shard.
        """
        if shard not in self._held:
            while len(self._held) >= self._max_held:
                self._release_oldest()
            self._held[shard] = self._open(shard)
        self._held.move_to_end(shard)

    def _release_oldest(self) -> None:
        """Release the shard that was asked for longest ago, if any is held."""
        if self._held:
            _, held_shard = self._held.popitem(last=False)
            held_shard.close()

    def _open(self, shard: int) -> _HeldShard:
        """Wait for a shard, and map it."""
        manifest = self._manifest
        session = self._sessions.open()
        try:
            # The daemon shows epochs by number; 0 stands for reading outside of an epoch.
            plan = Plan.of(manifest, 0, [shard])
            session.declare(plan)
            # `partial=None`: the session's default decides whether the shard may be granted before
            # all of it has arrived.
            window = ShardWindow(session, plan, partial=None, view_of=self._pipeline.view)
            # The shard may need space in the cache that the held shards take. So one held shard is
            # released in each second of the wait, as the session calls `on_wait` each second. After
            # a long wait, this reader holds no shard, so two readers can never wait for each other.
            session.on_wait = self._release_oldest
            leased_shard = window.take(shard, manifest[shard].samples)
            leased_shard.open()
            # `on_wait` refers to this object, which refers to the session once the shard is held.
            # Such a cycle would keep the session open after both are out of use.
            session.on_wait = None
            return _HeldShard(session, window, leased_shard)
        except BaseException:
            session.close()
            raise


@dataclass(slots=True)
class _RangeReads:
    """Counts of the samples of a shard that were read by their ranges.

    Attributes:
        next_number: number of the sample that continues the order: the one after the last sample.
        in_order: number of latest requests in a row that continued the order.
        while_cached: number of samples that were read while the whole shard was cached.
    """

    next_number: int = -1
    in_order: int = 0
    while_cached: int = 0


class RecentRanges:
    """The shards that were last read by ranges, and when to hold a shard instead.

    Args:
        max_shards: maximum number of shards whose reads are counted.
    """

    def __init__(self, max_shards: int) -> None:
        self._max_shards = max_shards
        # By number of the shard, the one that was read last at the end.
        self._reads: OrderedDict[int, _RangeReads] = OrderedDict()
        self._too_large: set[int] = set()

    def note_too_large(self, shard: int) -> None:
        """Note that the cache has no space for all of a shard: only its ranges are read."""
        self._too_large.add(shard)

    def is_too_large(self, shard: int) -> bool:
        """Return whether the cache had no space for all of a shard."""
        return shard in self._too_large

    def note_request(self, shard: int, number: int) -> bool:
        """Note a request for a sample; return True if its shard should be held from now on."""
        if self.is_too_large(shard):
            return False
        reads = self._reads.setdefault(shard, _RangeReads())
        self._reads.move_to_end(shard)
        if len(self._reads) > self._max_shards:
            self._reads.popitem(last=False)
        if number == reads.next_number:
            reads.in_order += 1
        else:
            reads.in_order = 0
        reads.next_number = number + 1
        return reads.while_cached >= _CACHED_RANGES or reads.in_order >= _RANGES_IN_ORDER

    def note_cached(self, shard: int) -> None:
        """Note that a sample was read from a shard that is cached as a whole."""
        reads = self._reads.get(shard)
        if reads is not None:
            reads.while_cached += 1
