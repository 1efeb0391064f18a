"""Counting of the samples, and tokens, of lists of shards.

The shards pass through the cache, which may be smaller than the dataset: each may be evicted once
it is counted. A shard is fetched only if the count of its present version is unknown, or if tokens
are counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardcache.cache.bulk.round import FETCHED, Event, Round, Send, ShardOutcome
from shardcache.cache.fetching.leasing import Leasing
from shardcache.cache.fetching.transfers import Transfers
from shardcache.cache.listings.shard_listing import name_of
from shardcache.cache.versions.history import History
from shardcache.cache.waiting.waits import Class, Wait
from shardcache.errors import CorruptShardError, TokensError
from shardcache.fetch.download import Downloader
from shardcache.origin.objects import RemoteObject
from shardcache.origin.registry import Origins
from shardcache.shared.lists.shard_columns import Shards
from shardcache.shared.protocol import ShardRef
from shardcache.store.indexing.indexer import TokensRequest
from shardcache.store.indexing.indexers import Indexers
from shardcache.store.shard import Facts, Shard
from shardcache.store.store import Store
from shardcache.tarindex.contents import TokenMember

KNOWN = "known"
"""State of shards that need not be fetched."""


@dataclass(frozen=True, slots=True, repr=False)
class Counting:
    """Counts the samples of lists of shards, `max_transfers` at a time."""

    _store: Store
    _transfers: Transfers
    _leasing: Leasing
    _history: History
    _origins: Origins
    _downloader: Downloader
    _indexers: Indexers
    _max_transfers: int

    async def count(
        self,
        refs: Sequence[ShardRef],
        send: Send,
        *,
        listed: bool,
        member: TokenMember | None = None,
    ) -> None:
        """Report version, size and samples of each shard's present version.

        A repeated url is counted once, at its first place, `number`.

        Args:
            send: gets the events; an exception from it aborts.
            listed: whether the versions in the refs come from a fresh listing.
            member: a member whose tokens are counted as well: then every shard is fetched.
        """
        present = await self._present(refs, listed=listed)
        numbers = {ref.url: number for number, ref in enumerate(present)}
        total_samples = 0

        async def visit(ref: ShardRef) -> ShardOutcome:
            nonlocal total_samples
            if member is None:
                counted, hit = await self._counted(ref)
            else:
                counted, hit = await self._tokens_counted(ref, member)
            assert counted.samples is not None
            assert counted.size_bytes is not None
            total_samples += counted.samples
            details: Event = {
                "number": numbers[ref.url],
                "version": counted.version,
                "size_bytes": counted.size_bytes,
                "samples": counted.samples,
            }
            if counted.tokens is not None:
                details["tokens"] = counted.tokens
            return ShardOutcome(KNOWN if hit else FETCHED, counted.size_bytes, details)

        work = Round(present, KNOWN, self._transfers, send)
        totals = await work.run(visit, self._max_transfers)
        await send({"event": "done", **totals, "samples": total_samples})

    async def _stat(self, url: str) -> RemoteObject:
        return await self._downloader.stat_ahead(self._origins.origin(url), url)

    async def _present(self, refs: Sequence[ShardRef], *, listed: bool) -> Shards:
        """Return each url once, in its present version, with that one's sample count if known."""
        # Urls of which the origin has to be asked for the version; a dict, to keep their order.
        unsure = dict.fromkeys(ref.url for ref in refs if not listed or ref.version is None)
        found = await self._downloader.stat_all(self._stat, unsure)
        counts = {(ref.url, ref.version): ref.samples for ref in refs if ref.samples is not None}
        present: dict[str, ShardRef] = {}
        for ref in refs:
            if ref.url in present:
                continue
            obj = found.get(ref.url)  # None also if the request failed: it is repeated in its turn
            if ref.url not in unsure:
                present[ref.url] = ref
            elif obj is None:
                present[ref.url] = ShardRef(ref.url)
            else:
                present[ref.url] = _ref_of(obj, counts.get((obj.url, obj.version)))
        return await self._history.fill(Shards.of(present.values()))

    async def _counted(self, ref: ShardRef) -> tuple[ShardRef, bool]:
        """Return the shard's ref with every field set, and True if no fetch was needed."""
        if ref.version is None:
            origin = self._origins.origin(ref.url)
            ref = _ref_of(await self._downloader.stat(origin, ref.url))
        if ref.samples is not None and ref.size_bytes is not None:
            return ref, True

        name = name_of(ref)
        if name in self._store.shards:
            async with self._leasing.published(ref) as found:  # records the use
                return _counted_ref(found.facts), found.hit

        # No lease: if the shard has already been evicted for the next one, a lease would re-fetch
        # it.
        shard = await self._transfers.wait(name, ref, Class.WARM, Wait())
        assert isinstance(shard, Shard)  # this wait does not accept a partial shard
        facts = await self._store.facts(shard)
        if facts.samples is None:  # somebody wanted a plain file at the same time
            async with self._leasing.published(ref) as found:
                facts = found.facts
        return _counted_ref(facts), False

    async def _tokens_counted(self, ref: ShardRef, member: TokenMember) -> tuple[ShardRef, bool]:
        """Return the shard's ref with every field set, and True if no fetch was needed."""
        try:
            return await self._count_tokens(ref, member)
        except (CorruptShardError, TokensError):
            # The cached copy may be damaged: it is checked when it is leased again, and then
            # fetched again if it is.
            return await self._count_tokens(ref, member)

    async def _count_tokens(self, ref: ShardRef, member: TokenMember) -> tuple[ShardRef, bool]:
        """As `_tokens_counted`; after an error, the cached shard is suspected to be damaged."""
        layout = self._store.layout
        async with self._leasing.published(ref) as found:
            request = TokensRequest(
                tar=str(layout.tar(found.shard.key)),
                sidecar=str(layout.sidecar(found.shard.key)),
                url=found.facts.url,
                member=str(member),
            )
            try:
                tokens = await self._indexers.count_tokens(request)
            except (CorruptShardError, TokensError) as exn:
                found.shard.suspicion = exn.message
                raise
        return _counted_ref(found.facts)._replace(tokens=tokens), found.hit


def _ref_of(obj: RemoteObject, samples: int | None = None) -> ShardRef:
    return ShardRef(obj.url, obj.version, obj.size_bytes, samples)


def _counted_ref(facts: Facts) -> ShardRef:
    return ShardRef(facts.url, facts.version, facts.origin_bytes, facts.samples)
