"""The beginning of a shard whose rest is still on its way, for readers that have nothing else to read.

Only of stores that guard each read: a version that is held against the store's at the end alone might be a mixture.
What they may see is the unbroken run of finished parts from the first byte on. Each of them came under If-Match, had
its length checked and its CRC32C recorded; that the whole is sound is only known at the end, so a reader may learn
then that what it began to read was not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from shardcache.cache.signal import Signal
from shardcache.cache.waiting import Wait
from shardcache.errors import ShardcacheError
from shardcache.store.partial import Partial
from shardcache.store.shard import Shard


class Arriving:
    """One download that readers look into.

    Attributes:
        partial: the file and its finished parts.
        readers: of each that has it open, the party.
        shard: what became of it, once it is published.

    Args:
        moved: notified of every part and of the end.
        waits: the transfer's, by which it knows how urgent it is.
    """

    def __init__(self, partial: Partial, moved: Signal, waits: set[Wait]) -> None:
        self.partial = partial
        self.readers: list[Hashable] = []
        self.shard: Shard | None = None
        self._moved = moved
        self._waits = waits
        self._failure: ShardcacheError | None = None
        self._parts = 0
        self._when_left: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"Arriving({self.partial.obj.url!r}, ready_bytes={self.ready_bytes}, readers={len(self.readers)})"

    @property
    def ready_bytes(self) -> int:
        """How many bytes from the first on may be read."""
        while self._parts in self.partial.done:
            self._parts += 1
        return min(self._parts * self.partial.part_bytes, self.partial.obj.size_bytes)

    @property
    def is_worth_reading(self) -> bool:
        """Whether there is something to read already, and something still to come."""
        return 0 < self.ready_bytes < self.partial.obj.size_bytes

    async def beyond(self, count_bytes: int, wait: Wait) -> None:
        """Return when more than `count_bytes` are ready, or all. Raises what the transfer failed with."""
        self._waits.add(wait)
        try:
            while self.shard is None and self.ready_bytes <= count_bytes:
                if self._failure is not None:
                    raise self._failure
                await self._moved.wait()
        finally:
            self._waits.discard(wait)

    def publish(self, shard: Shard) -> None:
        """Let readers know that the shard is whole; whoever calls this has taken a hold on it for each of them."""
        self.shard = shard
        self._moved.notify()

    def fail(self, exn: ShardcacheError) -> None:
        """Let readers know that the rest will not come; the first reason given stands."""
        self._failure = self._failure or exn
        self._moved.notify()

    def leave(self, party: Hashable) -> None:
        """Note that a reader has closed the file before it was published."""
        self.readers.remove(party)
        if not self.readers and self._when_left is not None:
            self._when_left()

    def when_left(self, act: Callable[[], None]) -> None:
        """Call `act` as soon as no reader has the file open."""
        if self.readers:
            self._when_left = act
        else:
            act()
