"""Early access to a shard while it is still being downloaded, for readers with nothing else to read.

Offered only for origins that check the version on every read: a version checked once, at the end, could be a mixture.
Readers see the contiguous finished parts from the first byte on, and the beginning of the part after them. Each part is
fetched with If-Match, and nothing of it is written before the answer's header proves to be the expected one. Whether
the whole shard is sound is known only at the end, so a reader may learn then that the beginning it read belongs to a
corrupt shard.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from shardcache.cache.signal import Signal
from shardcache.cache.transfers.waiting import Wait
from shardcache.errors import ShardcacheError
from shardcache.fetch.parts.pausable_read import Coming
from shardcache.store.partial import Partial
from shardcache.store.shard import Shard


class Arrival:
    """A shard that readers can open before its download ends.

    Attributes:
        partial: the file and its finished parts.
        readers: one entry per reader that has the file open: its party.
        shard: the published shard; None until then.

    Args:
        coming: the bytes of unfinished parts.
        moved: notified when more bytes are in the file, and at the end.
        waits: the transfer's waits, which set its priority.
    """

    def __init__(self, partial: Partial, coming: Coming, moved: Signal, waits: set[Wait]) -> None:
        self.partial = partial
        self.readers: list[Hashable] = []
        self.shard: Shard | None = None
        self._moved = moved
        self._waits = waits
        self._failure: ShardcacheError | None = None
        self._coming = coming
        self._parts = 0
        self._ready_bytes = 0
        self._when_left: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"Arrival({self.partial.obj.url!r}, ready_bytes={self.ready_bytes}, readers={len(self.readers)})"

    @property
    def ready_bytes(self) -> int:
        """Number of bytes, from the first on, that may be read."""
        while self._parts in self.partial.done:
            self._parts += 1
        finished_bytes = min(self._parts * self.partial.part_bytes, self.partial.obj.size_bytes)
        # A part that has to be fetched again writes the same bytes to the same place.
        self._ready_bytes = max(self._ready_bytes, finished_bytes + self._coming.written_bytes(self._parts))
        return self._ready_bytes

    @property
    def is_worth_reading(self) -> bool:
        """True if some bytes can be read already and some are still to come."""
        return self._failure is None and 0 < self.ready_bytes < self.partial.obj.size_bytes

    async def beyond(self, count_bytes: int, wait: Wait) -> None:
        """Wait until more than `count_bytes` are ready, or the whole shard. Raises the transfer's error."""
        self._waits.add(wait)
        try:
            while self.shard is None and self.ready_bytes <= count_bytes:
                if self._failure is not None:
                    raise self._failure
                await self._moved.wait()
        finally:
            self._waits.discard(wait)

    def publish(self, shard: Shard) -> None:
        """Announce that the shard is complete. The caller has retained it for each reader."""
        self.shard = shard
        self._moved.notify()

    def fail(self, exn: ShardcacheError) -> None:
        """Announce that the rest will not arrive; the first reason given is the one reported."""
        self._failure = self._failure or exn
        self._moved.notify()

    def leave(self, party: Hashable) -> None:
        """Note that a reader closed the file before it was published."""
        self.readers.remove(party)
        if not self.readers and self._when_left is not None:
            self._when_left()

    def when_left(self, act: Callable[[], None]) -> None:
        """Call `act` once no reader has the file open."""
        if self.readers:
            self._when_left = act
        else:
            act()
