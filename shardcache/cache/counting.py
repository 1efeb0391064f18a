"""Counting of the samples in each shard of a dataset, for its index file."""

from __future__ import annotations

from collections.abc import Sequence

from shardcache.cache.leasing import Leasing, Published
from shardcache.cache.planner import name_of
from shardcache.cache.waits import Class, Wait
from shardcache.cache.warming import Round, Send, ShardOutcome, ask_all
from shardcache.fetch.download import Downloader
from shardcache.origin.base import RemoteObject
from shardcache.origin.registry import Origins
from shardcache.protocol import ShardRef
from shardcache.store.indexers import Indexers
from shardcache.store.indexing import TokensRequest
from shardcache.store.shard import Facts, Shard
from shardcache.tarindex import TokenMember


class Counting:
    """Counts the samples of lists of shards, `max_transfers` at a time.

    The shards pass through the cache, which may be smaller than the dataset: each may be evicted once it is counted.
    A shard is fetched only if the count of its present version is unknown.
    """

    def __init__(
        self, leasing: Leasing, origins: Origins, downloader: Downloader, indexers: Indexers, max_transfers: int
    ) -> None:
        self._leasing = leasing
        self._store = leasing.store
        self._transfers = leasing.transfers
        self._origins = origins
        self._downloader = downloader
        self._indexers = indexers
        self._max_transfers = max_transfers

    async def count(
        self, refs: Sequence[ShardRef], send: Send, *, listed: bool, member: TokenMember | None = None
    ) -> None:
        """Report version, size and samples of each shard's present version to `send`; an exception from it aborts.

        A repeated url is counted once, at its first place; `number` is that place.

        Args:
            listed: whether the versions in the refs come from a fresh listing of the origin.
            member: count the tokens in this member, too; each shard that is not cached is fetched for that.
        """
        present = await self._present(refs, listed=listed)
        numbers = {ref.url: number for number, ref in enumerate(present)}
        samples = 0

        async def visit(ref: ShardRef) -> ShardOutcome:
            nonlocal samples
            counted, hit = await (self._counted(ref) if member is None else self._tokens_counted(ref, member))
            assert counted.samples is not None and counted.size_bytes is not None
            samples += counted.samples
            details = {
                "number": numbers[ref.url],
                "version": counted.version,
                "size_bytes": counted.size_bytes,
                "samples": counted.samples,
            } | ({} if counted.tokens is None else {"tokens": counted.tokens})
            if hit:
                return ShardOutcome("known", counted.size_bytes, details=details)
            return ShardOutcome("fetched", counted.size_bytes, counted.size_bytes, details)

        sums = await Round(present, ("fetched", "known"), self._transfers, send).run(visit, self._max_transfers)
        await send({"event": "done", **sums, "samples": samples})

    async def _present(self, refs: Sequence[ShardRef], *, listed: bool) -> list[ShardRef]:
        """Return each url once, in its present version, with that version's sample count if it is known."""
        unsure = dict.fromkeys(ref.url for ref in refs if not listed or ref.version is None)
        found = await ask_all(unsure, self._origins, self._downloader)
        counts = {(ref.url, ref.version): ref.samples for ref in refs if ref.samples is not None}
        present: dict[str, ShardRef] = {}
        for ref in refs:
            obj = found.get(ref.url)
            now = _ref(obj, counts.get((obj.url, obj.version))) if obj else ShardRef(ref.url)
            present.setdefault(ref.url, now if ref.url in unsure else ref)
        return await self._leasing.history.fill(list(present.values()))

    async def _counted(self, ref: ShardRef) -> tuple[ShardRef, bool]:
        """Return the shard's ref with every field set, and True if no fetch was needed."""
        if ref.version is None:
            ref = _ref(await self._downloader.stat(self._origins.origin(ref.url), ref.url))
        if ref.samples is not None and ref.size_bytes is not None:
            return ref, True
        facts, hit = await self._facts(ref)
        return ShardRef(facts.url, facts.version, facts.origin_bytes, facts.samples), hit

    async def _tokens_counted(self, ref: ShardRef, member: TokenMember) -> tuple[ShardRef, bool]:
        """Return the shard's ref with every field set, tokens included, and True if no fetch was needed."""
        found = await self._leasing.acquire(ref, Class.WARM, Wait())
        assert isinstance(found, Published)  # this wait does not accept a partial shard
        async with self._leasing.using(found.shard):
            facts, layout, key = found.facts, self._store.layout, found.shard.key
            request = TokensRequest(str(layout.tar(key)), str(layout.sidecar(key)), facts.url, str(member))
            tokens = await self._indexers.count_tokens(request)
        return ShardRef(facts.url, facts.version, facts.origin_bytes, facts.samples, tokens), found.hit

    async def _facts(self, ref: ShardRef) -> tuple[Facts, bool]:
        name = name_of(ref)
        if name in self._store.shards:
            found = await self._leasing.acquire(ref, Class.WARM, Wait())
            assert isinstance(found, Published)  # this wait does not accept a partial shard
            async with self._leasing.using(found.shard):  # records the use
                return found.facts, found.hit
        # No lease: if the shard has already been evicted for the next one, a lease would re-fetch it.
        shard = await self._transfers.wait(name, ref, Class.WARM, Wait())
        assert isinstance(shard, Shard)
        return await self._store.facts(shard), False


def _ref(obj: RemoteObject, samples: int | None = None) -> ShardRef:
    return ShardRef(obj.url, obj.version, obj.size_bytes, samples)
