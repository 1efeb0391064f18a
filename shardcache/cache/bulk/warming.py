"""Warming: lists of shards are fetched before anybody reads them.

`Cache` does this for `shardcache warm`, and for `shardcache pin`, which also fetches its shards.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence

from shardcache.cache.bulk.round import FAILED, FETCHED, Event, Round, Send, ShardOutcome
from shardcache.cache.fetching.leasing import Leasing, Published
from shardcache.cache.fetching.transfers import Transfers
from shardcache.cache.listings.shard_listing import name_of
from shardcache.errors import CapacityError
from shardcache.fetch.download import Downloader
from shardcache.origin.objects import RemoteObject
from shardcache.origin.registry import Origins
from shardcache.shared.protocol import ShardRef
from shardcache.shared.units import size
from shardcache.store.space import Space
from shardcache.store.store import Store

CACHED = "cached"
"""Counter of the shards that need not be fetched, as they are cached."""


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

        While shards are being fetched, origins are asked for the sizes that no listing gave. Raises
        CapacityError as soon as the shards together are known to exceed the cache's capacity.
        """
        unique = list(dict.fromkeys(refs))
        # A url without a version stands for the version that was cached last, even before a
        # restart, if that is still the latest.
        await self._leasing.recall((name_of(ref), ref.url) for ref in unique if ref.version is None)
        # The order is random, so that nodes which warm the same shards do not all request the same
        # shard at the same time.
        wanted = random.sample(unique, len(unique))
        # The space is measured now, before transfers of these very shards take some of it.
        check_size = _size_check(self._store.measured_space())
        check_size(wanted)
        work = Round(wanted, self._transfers, send, unfetched_state=CACHED)
        delivered: list[Published] = []

        async def note(published: Published) -> None:
            """Remember a shard that was cached or fetched."""
            delivered.append(published)

        fetching = asyncio.create_task(self.fetch(work, note))
        completing = asyncio.create_task(self.complete(wanted))
        try:
            await asyncio.wait((fetching, completing), return_when=asyncio.FIRST_COMPLETED)
            # Once all sizes are known, the total is checked again, and shown with the progress.
            if not fetching.done():
                work.total_bytes = check_size(completing.result())
            totals = await fetching
        finally:
            fetching.cancel()
            completing.cancel()
            await asyncio.gather(fetching, completing, return_exceptions=True)

        await self._report_evicted(delivered, totals, send)
        await send({"event": "done", **totals})

    async def _report_evicted(
        self,
        delivered: Sequence[Published],
        totals: Event,
        send: Send,
    ) -> None:
        """Count those shards as failed that have been evicted again by the end of the round.

        Args:
            delivered: the shards that were cached or fetched.
            totals: the counts of the round, which are changed.
            send: gets an event for each evicted shard.
        """
        space = self._store.measured_space()
        for published in delivered:
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
        """Fetch the shards of a round; return the totals, which the caller sends as last event.

        Args:
            work: the round.
            use: called with each shard, which is retained during the call.
        """

        async def visit(ref: ShardRef) -> ShardOutcome:
            """Fetch a shard if it is not cached, and call `use`."""
            async with self._leasing.published(ref) as published:
                await use(published)
            facts = published.facts
            details = {"size_bytes": facts.size_bytes}
            return ShardOutcome(_state_of(published), facts.origin_bytes, details)

        return await work.run(visit, self._max_transfers)

    async def _stat(self, url: str) -> RemoteObject:
        """Return an object as its origin has it now."""
        return await self._downloader.stat_ahead(self._origins.origin(url), url)

    async def complete(
        self,
        refs: Iterable[ShardRef],
        *,
        versions: bool = False,
    ) -> list[ShardRef]:
        """Return each shard once, with its size; origins are asked for sizes that are not known.

        Args:
            refs: the shards.
            versions: True to ask for missing versions, too.
        """
        wanted = list(dict.fromkeys(refs))
        unknown = [ref.url for ref in wanted if _lacks_facts(ref, versions=versions)]
        objects = await self._downloader.stat_all(self._stat, unknown)
        return [_completed(ref, objects.get(ref.url), versions=versions) for ref in wanted]


def _size_check(space: Space) -> Callable[[Iterable[ShardRef]], int | None]:
    """Return a function that checks whether shards fit into the cache, as `space` is now."""
    limit_bytes = space.possible_bytes
    explanation = space.explanation

    def check(refs: Iterable[ShardRef]) -> int | None:
        """Return the sum of the known sizes; None if none is known.

        Raises CapacityError if the sum is larger than the cache.
        """
        known_bytes = sum(ref.size_bytes or 0 for ref in refs)
        if known_bytes > limit_bytes:
            raise CapacityError(
                f"the shards total {size(known_bytes)}; {explanation}",
                remedy=f"{space.remedy}, or warm fewer shards",
            )
        return known_bytes or None

    return check


def _state_of(published: Published) -> str:
    """Return the name of the counter that a shard adds to."""
    return CACHED if published.hit else FETCHED


def _lacks_facts(ref: ShardRef, *, versions: bool) -> bool:
    """Return whether the size is missing; with `versions`, also whether the version is."""
    return ref.size_bytes is None or (versions and ref.version is None)


def _completed(ref: ShardRef, obj: RemoteObject | None, *, versions: bool) -> ShardRef:
    """Return a shard with the size that its origin has reported; with `versions`, also the version.

    Args:
        ref: the shard.
        obj: the origin's answer; None if there is none, which changes nothing.
        versions: whether to add a missing version.
    """
    if obj is None:
        return ref
    version = ref.version
    if versions and version is None:
        version = obj.version
    return ref._replace(size_bytes=obj.size_bytes, version=version)
