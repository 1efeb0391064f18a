"""Warming: lists of shards are fetched before anybody reads them."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence

from shardcache.cache.bulk.round import FAILED, FETCHED, Event, Round, Send, ShardOutcome
from shardcache.cache.fetching.leasing import Leasing, Published
from shardcache.cache.fetching.transfers import Transfers
from shardcache.errors import CapacityError
from shardcache.fetch.download import Downloader
from shardcache.origin.objects import RemoteObject
from shardcache.origin.registry import Origins
from shardcache.shared.protocol import ShardRef
from shardcache.shared.units import size
from shardcache.store.space import Space
from shardcache.store.store import Store

CACHED = "cached"
"""Counter of the shards that need not be fetched."""


class Warming:
    """Fetches lists of shards, `max_transfers` at a time."""

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
        """Fetch the shards, reporting to `send`.

        Meanwhile, origins are asked for sizes that no listing gave. Raises CapacityError as soon as
        the shards are known to exceed the cache's capacity together.
        """
        unique = list(dict.fromkeys(refs))
        await self._leasing.recall(ref.url for ref in unique if ref.version is None)
        # In random order: nodes that warm the same shards do not all want the same one at a time.
        wanted = random.sample(unique, len(unique))
        # Measured now: transfers of these shards are about to take the space.
        check_size = _size_check(self._store.measured())
        check_size(wanted)
        work = Round(wanted, CACHED, self._transfers, send)
        delivered: list[Published] = []

        async def note(published: Published) -> None:
            delivered.append(published)

        fetching = asyncio.create_task(self.fetch(work, note))
        completing = asyncio.create_task(self.complete(wanted))
        try:
            await asyncio.wait((fetching, completing), return_when=asyncio.FIRST_COMPLETED)
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
        """Count those shards as failed that were evicted again by the end."""
        space = self._store.measured()
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
        """Fetch a round, reporting every event but the last; return its totals.

        Args:
            use: called with each shard, which is retained during the call.
        """

        async def visit(ref: ShardRef) -> ShardOutcome:
            async with self._leasing.published(ref) as published:
                await use(published)
            facts = published.facts
            details = {"size_bytes": facts.size_bytes}
            return ShardOutcome(_state_of(published), facts.origin_bytes, details)

        return await work.run(visit, self._max_transfers)

    async def _stat(self, url: str) -> RemoteObject:
        return await self._downloader.stat_ahead(self._origins.origin(url), url)

    async def complete(
        self,
        refs: Iterable[ShardRef],
        *,
        versions: bool = False,
    ) -> list[ShardRef]:
        """Return each ref once; its origin is asked for the size, if the pattern did not give it.

        Args:
            versions: True to ask for missing versions, too.
        """
        wanted = list(dict.fromkeys(refs))
        unknown = [ref.url for ref in wanted if _lacks_facts(ref, versions=versions)]
        objects = await self._downloader.stat_all(self._stat, unknown)
        return [_completed(ref, objects.get(ref.url), versions=versions) for ref in wanted]


def _size_check(space: Space) -> Callable[[Iterable[ShardRef]], int | None]:
    """Return a function that adds up known sizes; above `space` it raises CapacityError."""
    limit_bytes = space.effective_bytes(space.unwritten_bytes)
    explanation = space.explanation

    def check(refs: Iterable[ShardRef]) -> int | None:
        known_bytes = sum(ref.size_bytes or 0 for ref in refs)
        if known_bytes > limit_bytes:
            raise CapacityError(
                f"the shards total {size(known_bytes)}; {explanation}",
                remedy=f"{space.remedy}, or warm fewer shards",
            )
        return known_bytes or None

    return check


def _state_of(published: Published) -> str:
    return CACHED if published.hit else FETCHED


def _lacks_facts(ref: ShardRef, *, versions: bool) -> bool:
    return ref.size_bytes is None or (versions and ref.version is None)


def _completed(ref: ShardRef, obj: RemoteObject | None, *, versions: bool) -> ShardRef:
    """Return a ref with the size, and with `versions` the version, that its origin has reported."""
    if obj is None:
        return ref
    version = ref.version
    if versions and not version:
        version = obj.version
    return ref._replace(size_bytes=obj.size_bytes, version=version or None)
