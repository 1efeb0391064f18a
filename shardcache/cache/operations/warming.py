"""Warming: fetching shards on a user's request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

from shardcache.cache.operations.rounds import Event, Round, ShardOutcome, Tell, ask_all
from shardcache.cache.readers.leasing import Leasing, Published
from shardcache.cache.transfers.transfers import Class, Transfers
from shardcache.cache.transfers.waiting import Wait
from shardcache.errors import CapacityError
from shardcache.fetch.download import Downloader
from shardcache.origin.base import RemoteObject
from shardcache.origin.registry import Origins
from shardcache.protocol import ShardRef
from shardcache.store.store import Store
from shardcache.units import size

Use = Callable[[Published], Awaitable[None]]


async def _no_use(_found: Published) -> None:
    """No-op: the shard is already cached."""


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

    async def warm(self, refs: Sequence[ShardRef], tell: Tell) -> None:
        """Fetch the shards, reporting events to `tell`; an exception from `tell` aborts.

        Raises CapacityError if the shards together exceed the cache's capacity.
        """
        await self._leasing.recall(refs)
        sized = await self.ask(refs)
        self._check_capacity(sized)
        delivered: list[Published] = []

        async def note(found: Published) -> None:
            delivered.append(found)

        totals = await self.fetch(sized, tell, note)
        for found in delivered:
            if self._store.shards.get(found.shard.key) is not found.shard:
                totals["cached" if found.hit else "fetched"] -= 1
                totals["failed"] += 1
                await tell({"event": "error", "error": self._evicted_again(found).to_json()})
        await tell({"event": "done", **totals})

    def _evicted_again(self, found: Published) -> CapacityError:
        space = self._store.space
        message = f"evicted again, to make room for other shards; {space.explanation}"
        return CapacityError(message, url=found.facts.url, remedy=f"{space.remedy}, or warm fewer shards")

    async def fetch(self, refs: Sequence[ShardRef], tell: Tell, use: Use = _no_use) -> Event:
        """Fetch the shards, reporting every event but the last; return its totals. `use` gets each shard, retained."""

        async def visit(ref: ShardRef) -> ShardOutcome:
            return await self._fetch(ref, use)

        return await Round(refs, ("fetched", "cached"), self._transfers, tell).run(visit, self._max_transfers)

    async def _fetch(self, ref: ShardRef, use: Use) -> ShardOutcome:
        found = await self._leasing.acquire(ref, Class.WARM, Wait())
        assert isinstance(found, Published)  # this wait does not accept a partial shard
        async with self._leasing.using(found.shard):
            await use(found)
        size_bytes, details = found.facts.origin_bytes, {"size_bytes": found.facts.size_bytes}
        if found.hit:
            return ShardOutcome("cached", size_bytes, details=details)
        return ShardOutcome("fetched", size_bytes, size_bytes, details)

    async def ask(self, refs: Iterable[ShardRef], *, versions: bool = False) -> list[ShardRef]:
        """Return each ref once, with sizes that its pattern did not give: a progress bar needs the total.

        Args:
            versions: ask for missing versions, too.
        """
        wanted = list(dict.fromkeys(refs))
        unknown = [ref.url for ref in wanted if ref.size_bytes is None or (versions and ref.version is None)]
        found = await ask_all(unknown, self._origins, self._downloader)
        return [_told(ref, found.get(ref.url), versions=versions) for ref in wanted]

    def _check_capacity(self, refs: Sequence[ShardRef]) -> None:
        known_bytes, space = sum(ref.size_bytes or 0 for ref in refs), self._store.measured()
        if known_bytes > space.effective_bytes(space.unwritten_bytes):
            raise CapacityError(
                f"the shards total {size(known_bytes)}; {space.explanation}",
                remedy=f"{space.remedy}, or warm fewer shards",
            )


def _told(ref: ShardRef, obj: RemoteObject | None, *, versions: bool) -> ShardRef:
    if obj is None:
        return ref
    return replace(ref, size_bytes=obj.size_bytes, version=ref.version or (obj.version if versions else None))
