"""Fetching shards because someone said so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardcache.cache.leasing import Leasing, Published
from shardcache.cache.rounds import Outcome, Round, Tell, ask_all
from shardcache.cache.transfers import Class, Transfers
from shardcache.cache.waiting import Wait
from shardcache.errors import CapacityError
from shardcache.fetch.download import Downloader
from shardcache.origin.registry import Origins
from shardcache.protocol import ShardRef
from shardcache.store.store import Store


class Warming:
    """Fetches whole lists of shards, `max_transfers` at a time."""

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
        """Fetch the shards, telling events; what `tell` raises ends it.

        Raises CapacityError when the shards together are larger than the cache.
        """
        await self._leasing.recall(refs)
        sized = await self._sized(dict.fromkeys(refs))
        self._check_capacity(sized)
        sums = await Round(sized, ("fetched", "cached"), self._transfers, tell).run(self._fetch, self._max_transfers)
        await tell({"event": "done", **sums})

    async def _fetch(self, ref: ShardRef) -> Outcome:
        found = await self._leasing.acquire(ref, Class.WARM, Wait())
        assert isinstance(found, Published)  # nobody asked for the beginning of one
        await self._leasing.release(found.shard)
        size_bytes, details = found.facts.origin_bytes, {"size_bytes": found.facts.size_bytes}
        if found.hit:
            return Outcome("cached", size_bytes, details=details)
        return Outcome("fetched", size_bytes, size_bytes, details)

    async def _sized(self, refs: Iterable[ShardRef]) -> list[ShardRef]:
        """Return the refs with the sizes that patterns leave open: a bar without an end tells nothing."""
        wanted = list(refs)
        unsized = (ref.url for ref in wanted if ref.size_bytes is None)
        found = await ask_all(unsized, self._origins, self._downloader)
        return [replace(ref, size_bytes=found[ref.url].size_bytes) if ref.url in found else ref for ref in wanted]

    def _check_capacity(self, refs: Sequence[ShardRef]) -> None:
        known_bytes = sum(ref.size_bytes or 0 for ref in refs)
        capacity_bytes = self._store.space.capacity_bytes
        if known_bytes > capacity_bytes:
            raise CapacityError(
                f"the shards take {known_bytes} bytes together, the whole cache holds {capacity_bytes}",
                remedy="raise --capacity, or warm fewer shards",
            )
