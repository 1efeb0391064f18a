"""Counting of the samples, and tokens, of lists of shards.

`Cache.index` counts shards here, for `shardcache index`. The shards pass through the cache, which
may be smaller than the dataset: each may be evicted once it is counted. A shard is fetched only if
the count of its current version is unknown, or if tokens are counted. A shard is published once it
is complete, checked and in its place in the cache; a lease keeps a published shard in the cache.
The facts of a published shard are its version, size and number of samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardcache.cache.bulk.round import FETCHED, Event, Round, Send, ShardOutcome
from shardcache.cache.fetching.leasing import Leasing
from shardcache.cache.fetching.transfers import Transfers
from shardcache.cache.listings.shard_listing import name_of
from shardcache.cache.versions.history import History
from shardcache.cache.waiting.waits import PriorityClass, Wait
from shardcache.fetch.download import Downloader
from shardcache.origin.objects import RemoteObject
from shardcache.origin.registry import Origins
from shardcache.shared.exceptions import CorruptShardError, TokensError
from shardcache.shared.lists.shard_columns import Shards
from shardcache.shared.protocol import ShardRef
from shardcache.shared.tarindex.named_members import TokenMember
from shardcache.store.indexing.indexer import TokensRequest
from shardcache.store.indexing.indexers import Indexers
from shardcache.store.shard import Facts, Shard
from shardcache.store.store import Store

KNOWN = "known"
"""State of a shard that was not fetched: its count was known, or the shard was cached."""


class _Counted(NamedTuple):
    """A counted shard.

    Attributes:
        ref: the shard, with version, size and samples, and with tokens if they were counted.
        was_fetched: True if the shard had to be fetched to be counted.
    """

    ref: ShardRef
    was_fetched: bool


@dataclass(frozen=True, slots=True, repr=False)
class Counting:
    """Counts the samples of lists of shards, `_max_transfers` shards at a time.

    Args:
        _history: remembers the sample counts of shards that are no longer cached.
    """

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
        are_current: bool,
        member: TokenMember | None = None,
    ) -> None:
        """Report version, size and samples of each shard's current version.

        A url that occurs several times is counted once. The `number` in a shard's event is the
        number of its url, from 0, in the order of `refs` without repetitions.

        Args:
            refs: the shards.
            send: gets the events; an exception from it aborts the counting.
            are_current: True if the versions in `refs` are those that the origins have now, so that
                origins are asked only for missing ones.
            member: the member of each sample whose tokens are counted as well, for which every
                shard is fetched; None to count only samples.
        """
        current = await self._in_current_versions(refs, are_current=are_current)
        numbers = {ref.url: number for number, ref in enumerate(current)}
        total_samples = 0

        async def visit(ref: ShardRef) -> ShardOutcome:
            """Count one shard, and add its samples to the total."""
            nonlocal total_samples
            if member is None:
                counted = await self._count_samples(ref)
            else:
                counted = await self._count_tokens(ref, member)
            assert counted.ref.samples is not None
            assert counted.ref.size_bytes is not None
            total_samples += counted.ref.samples
            state = FETCHED if counted.was_fetched else KNOWN
            details = _details(counted.ref, numbers[ref.url])
            return ShardOutcome(state, counted.ref.size_bytes, details)

        work = Round(current, self._transfers, send, unfetched_state=KNOWN)
        totals = await work.run(visit, self._max_transfers)
        await send({"event": "done", **totals, "samples": total_samples})

    async def _in_current_versions(self, refs: Sequence[ShardRef], *, are_current: bool) -> Shards:
        """Return each url once, in its current version, with its sample count if known."""
        # Urls whose version the origin has to be asked for. This is a dict to keep their order.
        unsure = dict.fromkeys(ref.url for ref in refs if ref.version is None or not are_current)
        objects = await self._downloader.stat_all(self._stat, unsure)
        counts = {(ref.url, ref.version): ref.samples for ref in refs if ref.samples is not None}
        current: dict[str, ShardRef] = {}
        for ref in refs:
            if ref.url in current:
                continue
            obj = objects.get(ref.url)
            if ref.url not in unsure:
                current[ref.url] = ref
            elif obj is not None:
                current[ref.url] = _ref_of(obj, counts.get((obj.url, obj.version)))
            else:  # the request failed; it is made again when the shard is counted
                current[ref.url] = ShardRef(ref.url)
        return await self._history.fill(Shards.of(current.values()))

    async def _stat(self, url: str) -> RemoteObject:
        """Return an object as its origin has it now."""
        return await self._downloader.stat_ahead(self._origins.origin(url), url)

    async def _count_samples(self, ref: ShardRef) -> _Counted:
        """Return a shard with its count. The shard is fetched only if the count is not known."""
        if ref.version is None:
            origin = self._origins.origin(ref.url)
            ref = _ref_of(await self._downloader.stat(origin, ref.url))
        # 1. The count is known.
        if ref.samples is not None and ref.size_bytes is not None:
            return _Counted(ref, was_fetched=False)

        # 2. The shard is cached. A lease also records that the shard was used.
        name = name_of(ref)  # the version is known, so the name is the shard's key
        if name in self._store.shards:
            async with self._leasing.retained(ref) as published:
                ref_with_count = _ref_with_count(published.facts)
                return _Counted(ref_with_count, was_fetched=not published.is_hit)

        # 3. The shard is fetched, without a lease: it may be evicted for the next shard at once,
        #    and a lease would then fetch it again.
        shard = await self._transfers.wait(name, ref, PriorityClass.WARM, Wait())
        assert isinstance(shard, Shard)  # this wait does not accept a partial shard
        facts = await self._store.facts(shard)
        if facts.samples is None:  # another request fetched it as a file, which is not indexed
            async with self._leasing.retained(ref) as published:
                facts = published.facts
        return _Counted(_ref_with_count(facts), was_fetched=True)

    async def _count_tokens(self, ref: ShardRef, member: TokenMember) -> _Counted:
        """Count samples and tokens; after an error, count once more.

        The cached copy may be damaged. The second attempt has it checked, and fetched again if it
        is damaged.
        """
        try:
            return await self._try_count_tokens(ref, member)
        except (CorruptShardError, TokensError):
            return await self._try_count_tokens(ref, member)

    async def _try_count_tokens(self, ref: ShardRef, member: TokenMember) -> _Counted:
        """Count samples and tokens; on an error, mark the cached copy as one to be checked."""
        layout = self._store.layout
        async with self._leasing.retained(ref) as published:
            request = TokensRequest(
                shard_path=str(layout.tar(published.shard.key)),
                sidecar_path=str(layout.sidecar(published.shard.key)),
                url=published.facts.url,
                member=str(member),
            )
            try:
                tokens = await self._indexers.count_tokens(request)
            except (CorruptShardError, TokensError) as exn:
                published.shard.suspicion = exn.message
                raise
        complete = _ref_with_count(published.facts)._replace(tokens=tokens)
        return _Counted(complete, was_fetched=not published.is_hit)


def _details(ref: ShardRef, number: int) -> Event:
    """Return the fields that the event of a counted shard has in addition to those of any round."""
    details: Event = {
        "number": number,
        "version": ref.version,
        "size_bytes": ref.size_bytes,
        "samples": ref.samples,
    }
    if ref.tokens is not None:
        details["tokens"] = ref.tokens
    return details


def _ref_of(obj: RemoteObject, samples: int | None = None) -> ShardRef:
    """Return an object as a shard; `samples` is its number of samples, None if that is unknown."""
    return ShardRef(obj.url, obj.version, obj.size_bytes, samples)


def _ref_with_count(facts: Facts) -> ShardRef:
    """Return a published shard with its version, size and number of samples."""
    return ShardRef(facts.url, facts.version, facts.origin_bytes, facts.samples)
