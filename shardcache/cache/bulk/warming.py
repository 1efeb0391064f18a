"""Warming: lists of shards are fetched before anybody reads them.

`Cache` does this for `shardcache warm`, and for `shardcache pin`, which also keeps the shards in
the cache. A round is the work for one request: each of its shards is visited, which means fetched
if it is not cached. A shard is published once it is complete, checked and in its place in the
cache.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from shardcache.cache.bulk.round import FAILED, FETCHED, Event, Round, Send, ShardOutcome
from shardcache.cache.fetching.leasing import Leasing, Published
from shardcache.cache.fetching.transfers import Transfers
from shardcache.cache.listings.shard_listing import name_of
from shardcache.fetch.download import Downloader
from shardcache.origin.objects import RemoteObject
from shardcache.origin.registry import Origins
from shardcache.shared.exceptions import CapacityError
from shardcache.shared.protocol import ShardRef
from shardcache.shared.units import size
from shardcache.store.space import Space
from shardcache.store.store import Store

CACHED = "cached"
"""State of a shard that was cached, so that it was not fetched."""


class Warming:
    """Fetches lists of shards, `max_transfers` shards at a time."""

    def __init__(
        self,
        store: Store,
        transfers: Transfers,
        leasing: Leasing,
        origins: Origins,
        downloader: Downloader,
        max_transfers: int,
    ) -> None:
        self._store = store
        self._transfers = transfers
        self._leasing = leasing
        self._origins = origins
        self._downloader = downloader
        self._max_transfers = max_transfers

    async def warm(self, refs: Sequence[ShardRef], send: Send) -> None:
        """Fetch the shards, and send events to `send`.

        While shards are being fetched, origins are asked for the sizes that no listing gave.

        Raises CapacityError as soon as the shards together are known to exceed the cache's
        capacity.
        """
        unique = list(dict.fromkeys(refs))
        # A url without a version stands for the version that was cached last, even before a
        # restart, if that is still the latest.
        await self._leasing.recall((name_of(ref), ref.url) for ref in unique if ref.version is None)
        # The order is random, so that nodes which warm the same shards do not all request the same
        # shard at the same time.
        wanted = random.sample(unique, len(unique))
        # The space is measured now, before transfers of these very shards take some of it.
        limit = _SizeLimit.of(self._store.measured_space())
        limit.check(wanted)
        work = Round(wanted, self._transfers, send, unfetched_state=CACHED)
        visited: list[Published] = []

        async def remember(published: Published) -> None:
            """Remember a shard that was cached or fetched."""
            visited.append(published)

        fetching = asyncio.create_task(self.fetch(work, remember))
        sizing = asyncio.create_task(self.with_sizes(wanted))
        try:
            await asyncio.wait((fetching, sizing), return_when=asyncio.FIRST_COMPLETED)
            # Once all sizes are known, the total is checked again, and shown with the progress.
            if not fetching.done():
                work.total_bytes = limit.check(sizing.result())
            totals = await fetching
        finally:
            fetching.cancel()
            sizing.cancel()
            await asyncio.gather(fetching, sizing, return_exceptions=True)

        await self._report_evicted(visited, totals, send)
        await send({"event": "done", **totals})

    async def _report_evicted(
        self,
        visited: Sequence[Published],
        totals: Event,
        send: Send,
    ) -> None:
        """Count as failed the shards that were evicted again before the end of the round.

        Args:
            visited: the shards that were cached or fetched.
            totals: the counts of the round, which are changed.
            send: gets an event for each evicted shard.
        """
        space = self._store.measured_space()
        for published in visited:
            is_cached = self._store.shards.get(published.shard.key) is published.shard
            if is_cached:
                continue
            totals[_state_of(published)] -= 1
            totals[FAILED] += 1
            evicted = CapacityError(
                f"the shard was evicted again to make room for other shards; {space.explanation}",
                url=published.facts.url,
                remedy=f"{space.remedy}, or warm fewer shards",
            )
            await send({"event": "error", "error": evicted.to_json()})

    async def fetch(self, work: Round, use: Callable[[Published], Awaitable[None]]) -> Event:
        """Fetch the shards of a round; return the totals (`Round.run`) for the last event.

        Args:
            work: the round.
            use: called with each shard, which is not evicted during the call.
        """

        async def visit(ref: ShardRef) -> ShardOutcome:
            """Fetch a shard if it is not cached, and call `use`."""
            async with self._leasing.retained(ref) as published:
                await use(published)
            facts = published.facts
            details = {"size_bytes": facts.size_bytes}
            return ShardOutcome(_state_of(published), facts.origin_bytes, details)

        return await work.run(visit, self._max_transfers)

    async def with_sizes(
        self,
        refs: Iterable[ShardRef],
        *,
        versions: bool = False,
    ) -> list[ShardRef]:
        """Return each shard once, with its size; origins are asked for sizes that are not known.

        A size stays unknown if the request for it fails.

        Args:
            refs: the shards.
            versions: True to ask for missing versions, too.
        """
        unique = list(dict.fromkeys(refs))
        incomplete = [ref.url for ref in unique if _is_incomplete(ref, versions=versions)]
        objects = await self._downloader.stat_all(self._stat, incomplete)
        return [_completed(ref, objects.get(ref.url), versions=versions) for ref in unique]

    async def _stat(self, url: str) -> RemoteObject:
        """Return an object as its origin has it now."""
        return await self._downloader.stat_ahead(self._origins.origin(url), url)


class _SizeLimit(NamedTuple):
    """The space that the cache had for all shards of a request when the request began.

    Attributes:
        limit_bytes: maximum size of all shards together.
        explanation: why there is no more space, in words for the user.
        remedy: how the user can get more space.
    """

    limit_bytes: int
    explanation: str
    remedy: str

    @classmethod
    def of(cls, space: Space) -> "_SizeLimit":
        """Return the limit that the cache's present space sets."""
        return cls(space.possible_bytes, space.explanation, space.remedy)

    def check(self, refs: Iterable[ShardRef]) -> int | None:
        """Return the sum of the known sizes; None if none is known.

        Raises CapacityError if the sum is larger than the limit.
        """
        known_bytes = sum(ref.size_bytes or 0 for ref in refs)
        if known_bytes > self.limit_bytes:
            raise CapacityError(
                f"the shards total {size(known_bytes)}; {self.explanation}",
                remedy=f"{self.remedy}, or warm fewer shards",
            )
        return known_bytes or None


def _state_of(published: Published) -> str:
    """Return the state by which a round counts a shard."""
    return CACHED if published.is_hit else FETCHED


def _is_incomplete(ref: ShardRef, *, versions: bool) -> bool:
    """Return whether a shard's size is missing or, with `versions`, its size or its version."""
    return ref.size_bytes is None or (versions and ref.version is None)


def _completed(ref: ShardRef, obj: RemoteObject | None, *, versions: bool) -> ShardRef:
    """Return a shard with the size that its origin has reported; with `versions`, also the version.

    Args:
        ref: the shard.
        obj: the origin's answer; None if there is none, and the shard is returned unchanged.
        versions: True to add a missing version.
    """
    if obj is None:
        return ref
    version = ref.version
    if versions and version is None:
        version = obj.version
    return ref._replace(size_bytes=obj.size_bytes, version=version)
