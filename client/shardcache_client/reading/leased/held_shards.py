"""Whole shards that a reader of samples by number holds, and when it turns to them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from shardcache.errors import SampleError
from shardcache_client.daemon.reader_sessions import ReaderSessions
from shardcache_client.daemon.session import Session
from shardcache_client.order.shards.declared_plan import Plan
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.reading.leased.leased_shard import LeasedShard
from shardcache_client.reading.leased.shard_window import ShardWindow
from shardcache_client.samples.slicing import Sample
from shardcache_client.stages.pipeline import Pipeline

# Samples of a shard that are read by their ranges until it is held: opening one takes as long as
# some ranges of a cached file, and reading ahead of one that is read in order pays off later.
_CACHED_RANGES = 4
_RANGES_IN_ORDER = 16


@dataclass(frozen=True, slots=True)
class _Held:
    """A mapped shard, and the session that holds it in the cache."""

    session: Session
    window: ShardWindow
    leased_shard: LeasedShard

    def close(self) -> None:
        self.window.empty()
        self.session.close()


class HeldShards:
    """The shards that were last asked for, held and mapped. One thread at a time.

    Args:
        window: maximum number of shards.
    """

    def __init__(
        self,
        manifest: Manifest,
        pipeline: Pipeline,
        sessions: ReaderSessions,
        window: int,
    ) -> None:
        self._manifest = manifest
        self._pipeline = pipeline
        self._sessions = sessions
        self._window = window
        # By number of the shard, the last asked for at the end.
        self._held: OrderedDict[int, _Held] = OrderedDict()

    @property
    def numbers(self) -> list[int]:
        """Numbers of the shards that are held."""
        return sorted(self._held)

    def __contains__(self, shard: int) -> bool:
        return shard in self._held

    def sample(self, shard: int, number: int) -> Sample:
        """Return a sample by its number in the tar, once its shard has arrived so far.

        Raises what opening and reading the shard raises.
        """
        self.hold(shard)
        held = self._held[shard]
        try:
            return held.leased_shard.sample(number)
        except SampleError:
            raise
        except BaseException:
            # It may have been replaced, or the wait for it interrupted: open it again.
            self._held.pop(shard).close()
            raise

    def close(self) -> None:
        """Release all shards."""
        while self._held:
            _, held = self._held.popitem()
            held.close()

    def hold(self, shard: int) -> None:
        """Hold a shard, the last one asked for. Raises what opening it raises."""
        if shard not in self._held:
            while len(self._held) >= self._window:
                self._release_oldest()
            self._held[shard] = self._open(shard)
        self._held.move_to_end(shard)

    def _release_oldest(self) -> None:
        """Release the shard that was asked for longest ago, if any is held."""
        if self._held:
            _, held = self._held.popitem(last=False)
            held.close()

    def _open(self, shard: int) -> _Held:
        manifest = self._manifest
        session = self._sessions.open()
        try:
            plan = Plan.of(manifest, 0, [shard])
            session.declare(plan)
            window = ShardWindow(session, plan, partial=None, view_of=self._pipeline.view)
            # The shard may need the space of those that are held: a reader that waits for long
            # holds nothing in the end, so readers never wait for each other.
            session.on_wait = self._release_oldest
            leased_shard = window.take(shard, manifest[shard].samples)
            leased_shard.open()
            session.on_wait = None  # a cycle would keep the session of a reader that is gone
            return _Held(session, window, leased_shard)
        except BaseException:
            session.close()
            raise


@dataclass(slots=True)
class _Use:
    """Ranges that were requested of a shard.

    Attributes:
        next: number of the sample after the last one.
        in_order: number of samples that followed the one before.
        cached: number of samples that were found in a shard that is cached as a whole.
    """

    next: int = -1
    in_order: int = 0
    cached: int = 0


class RecentRanges:
    """Uses of the shards that were last read by ranges, which say when to hold one instead.

    Args:
        window: number of shards that can be held.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._uses: OrderedDict[int, _Use] = OrderedDict()  # the last one at the end
        self._too_large: set[int] = set()

    def cannot_hold(self, shard: int) -> None:
        """Note that the cache has no space for all of a shard: only its ranges are read."""
        self._too_large.add(shard)

    def is_too_large(self, shard: int) -> bool:
        """Return whether `cannot_hold` has noted a shard."""
        return shard in self._too_large

    def is_better_held(self, shard: int, number: int) -> bool:
        """Note that a sample is asked for, and return whether its shard is better held."""
        if self.is_too_large(shard):
            return False
        use = self._uses.setdefault(shard, _Use())
        self._uses.move_to_end(shard)
        if len(self._uses) > self._window:
            self._uses.popitem(last=False)
        if number == use.next:
            use.in_order += 1
        else:
            use.in_order = 0
        use.next = number + 1
        return use.cached >= _CACHED_RANGES or use.in_order >= _RANGES_IN_ORDER

    def found_cached(self, shard: int) -> None:
        """Note that a sample came from a shard that is cached as a whole."""
        use = self._uses.get(shard)
        if use is not None:
            use.cached += 1
