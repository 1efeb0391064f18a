"""Work through lists of shards on a user's request: warming and counting, a few at a time, with events for progress."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from shardcache.cache.planner import name_of
from shardcache.cache.transfers import Leasing, Published, Transfers
from shardcache.cache.waits import Class, Wait
from shardcache.errors import CapacityError, CorruptShardError, ShardcacheError, TokensError
from shardcache.fetch.download import Downloader
from shardcache.origin.base import RemoteObject
from shardcache.origin.registry import Origins
from shardcache.protocol import ShardRef
from shardcache.redact import redact
from shardcache.shards import Shards
from shardcache.store.indexing.indexer import TokensRequest
from shardcache.store.indexing.indexers import Indexers
from shardcache.store.shard import Shard
from shardcache.tarindex.contents import TokenMember
from shardcache.units import size

Event = dict[str, Any]
Send = Callable[[Event], Awaitable[None]]
Outcome = tuple[str, int, Event]
"""Result for one shard: the counter that it adds to, its size at the origin, and further fields of its event."""

_PROGRESS_S = 0.25
_FETCHED, _FAILED = "fetched", "failed"


class Round:
    """The shards of one request and its progress; `found` counts those that need not be fetched."""

    def __init__(self, refs: Sequence[ShardRef], found: str, transfers: Transfers, send: Send) -> None:
        self._refs = refs
        self._transfers = transfers
        self._send = send
        self._counts = Counter(dict.fromkeys((_FETCHED, found, _FAILED), 0))
        self._arriving: set[str] = set()
        self._done_bytes = 0
        self._origin_bytes = 0
        sizes = [ref.size_bytes for ref in refs if ref.size_bytes is not None]
        self.total_bytes = sum(sizes) or None  # as far as it is known

    async def run(self, visit: Callable[[ShardRef], Awaitable[Outcome]], at_once: int) -> Event:
        """Visit every shard, reporting `resolved`, `progress` and each `shard` or `error` event; return the totals."""
        await self._send({"event": "resolved", "shards": len(self._refs), "total_bytes": self.total_bytes})
        async with asyncio.TaskGroup() as group:
            ticking = group.create_task(self._tick())
            async with asyncio.TaskGroup() as workers:
                todo = iter(self._refs)
                for _ in range(at_once):
                    workers.create_task(self._work(visit, todo))
            ticking.cancel()
        await self._send(self._progress())
        return {"shards": len(self._refs), **self._counts, "origin_bytes": self._origin_bytes}

    async def _work(self, visit: Callable[[ShardRef], Awaitable[Outcome]], todo: Iterator[ShardRef]) -> None:
        for ref in todo:  # shared by all workers
            name = name_of(ref)
            self._arriving.add(name)
            try:
                state, size_bytes, details = await visit(ref)
            except ShardcacheError as exn:
                self._counts[_FAILED] += 1
                await self._send({"event": "error", "error": exn.to_json()})
            else:
                self._counts[state] += 1
                self._done_bytes += size_bytes
                self._origin_bytes += size_bytes if state == _FETCHED else 0
                await self._send({"event": "shard", "url": ref.url, "state": state, **details})
            finally:
                self._arriving.discard(name)
            await asyncio.sleep(0)  # a hundred thousand cached shards would block the event loop

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            await self._send(self._progress())

    def _progress(self) -> Event:
        transfers = map(self._transfers.get, self._arriving)
        return {
            "event": "progress",
            "done_shards": self._counts.total(),
            "shards": len(self._refs),
            "done_bytes": self._done_bytes + sum(transfer.arrived_bytes for transfer in transfers if transfer),
            "total_bytes": self.total_bytes,
        }


@asynccontextmanager
async def reporting(urls: Collection[str], downloader: Downloader, send: Send) -> AsyncIterator[None]:
    """Report the most often repeated request for any of the urls during the block, whenever that changes."""

    async def watch() -> None:
        sent = None
        while True:
            await asyncio.sleep(_PROGRESS_S)
            failing = [(failed, url) for url, failed in downloader.failing.items() if url in urls]
            if failing and (latest := max(failing))[0] != sent:
                sent, url = latest
                await send({"event": "retrying", "url": redact(url), "message": str(sent)})

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


class Warming:
    """Fetches or counts lists of shards, `max_transfers` at a time."""

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

    async def warm(self, refs: Sequence[ShardRef], send: Send) -> None:
        """Fetch the shards, reporting to `send`; sizes that no listing gave are requested meanwhile.

        Raises CapacityError as soon as they are known to exceed the cache's capacity together.
        """
        unique = list(dict.fromkeys(refs))
        await self._leasing.recall(ref.url for ref in unique if ref.version is None)
        # In an order of its own: nodes that warm the same shards do not all want the same one at a time.
        wanted = random.sample(unique, len(unique))
        space = self._store.measured()  # before own transfers make that inexact
        limit_bytes, explanation = space.effective_bytes(space.unwritten_bytes), space.explanation

        def check_size(refs: Sequence[ShardRef]) -> int | None:
            known_bytes = sum(ref.size_bytes or 0 for ref in refs)
            if known_bytes > limit_bytes:
                message = f"the shards total {size(known_bytes)}; {explanation}"
                raise CapacityError(message, remedy=f"{space.remedy}, or warm fewer shards")
            return known_bytes or None

        check_size(wanted)
        delivered, work = list[Published](), Round(wanted, "cached", self._transfers, send)

        async def note(found: Published) -> None:
            delivered.append(found)

        fetching = asyncio.create_task(self.fetch(work, note))
        asking = asyncio.create_task(self.ask(wanted))
        try:
            await asyncio.wait((fetching, asking), return_when=asyncio.FIRST_COMPLETED)
            if not fetching.done():
                work.total_bytes = check_size(asking.result())
            totals = await fetching
        finally:
            fetching.cancel()
            asking.cancel()
            await asyncio.gather(fetching, asking, return_exceptions=True)
        space = self._store.measured()
        for found in delivered:
            if self._store.shards.get(found.shard.key) is not found.shard:
                totals["cached" if found.hit else _FETCHED] -= 1
                totals[_FAILED] += 1
                message = f"evicted again, to make room for other shards; {space.explanation}"
                evicted = CapacityError(message, url=found.facts.url, remedy=f"{space.remedy}, or warm fewer shards")
                await send({"event": "error", "error": evicted.to_json()})
        await send({"event": "done", **totals})

    async def fetch(self, work: Round, use: Callable[[Published], Awaitable[None]]) -> Event:
        """Fetch a round, reporting every event but the last; return its totals. `use` gets each shard, retained."""

        async def visit(ref: ShardRef) -> Outcome:
            async with self._leasing.published(ref) as found:
                await use(found)
            state = "cached" if found.hit else _FETCHED
            return state, found.facts.origin_bytes, {"size_bytes": found.facts.size_bytes}

        return await work.run(visit, self._max_transfers)

    async def ask(self, refs: Iterable[ShardRef], *, versions: bool = False) -> list[ShardRef]:
        """Return each ref once, with sizes that its pattern did not give, and, if asked for, versions."""
        wanted = list(dict.fromkeys(refs))
        unknown = [ref.url for ref in wanted if ref.size_bytes is None or (versions and ref.version is None)]
        found = await self._downloader.stat_all(self._origins.origin, unknown)
        return [
            ref._replace(size_bytes=obj.size_bytes, version=ref.version or (obj.version if versions else None))
            if (obj := found.get(ref.url))
            else ref
            for ref in wanted
        ]

    # Counting. The shards pass through the cache, which may be smaller than the dataset: each may be evicted once it is
    # counted. A shard is fetched only if the count of its present version is unknown, or if tokens are counted.

    async def count(
        self, refs: Sequence[ShardRef], send: Send, *, listed: bool, member: TokenMember | None = None
    ) -> None:
        """Report version, size and samples of each shard's present version to `send`; an exception from it aborts.

        A repeated url is counted once, at its first place, `number`. `listed`: the versions in the refs come from a
        fresh listing. With a `member`, its tokens are counted, too, for which each shard is fetched.
        """
        present = await self._present(refs, listed=listed)
        numbers = {ref.url: number for number, ref in enumerate(present)}
        samples = 0

        async def visit(ref: ShardRef) -> Outcome:
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
            return "known" if hit else _FETCHED, counted.size_bytes, details

        totals = await Round(present, "known", self._transfers, send).run(visit, self._max_transfers)
        await send({"event": "done", **totals, "samples": samples})

    async def _present(self, refs: Sequence[ShardRef], *, listed: bool) -> Shards:
        """Return each url once, in its present version, with that version's sample count if it is known."""
        unsure = dict.fromkeys(ref.url for ref in refs if not listed or ref.version is None)
        found = await self._downloader.stat_all(self._origins.origin, unsure)
        counts = {(ref.url, ref.version): ref.samples for ref in refs if ref.samples is not None}
        present: dict[str, ShardRef] = {}
        for ref in refs:
            obj = found.get(ref.url)
            now = _ref(obj, counts.get((obj.url, obj.version))) if obj else ShardRef(ref.url)
            present.setdefault(ref.url, now if ref.url in unsure else ref)
        return await self._leasing.history.fill(Shards.of(present.values()))

    async def _counted(self, ref: ShardRef) -> tuple[ShardRef, bool]:
        """Return the shard's ref with every field set, and True if no fetch was needed."""
        if ref.version is None:
            ref = _ref(await self._downloader.stat(self._origins.origin(ref.url), ref.url))
        if ref.samples is not None and ref.size_bytes is not None:
            return ref, True
        name = name_of(ref)
        if name in self._store.shards:
            async with self._leasing.published(ref) as found:  # records the use
                facts, hit = found.facts, found.hit
        else:  # no lease: if the shard has already been evicted for the next one, a lease would re-fetch it
            shard = await self._transfers.wait(name, ref, Class.WARM, Wait())
            assert isinstance(shard, Shard)
            facts, hit = await self._store.facts(shard), False
            if facts.samples is None:  # somebody wanted a plain file at the same time
                async with self._leasing.published(ref) as found:
                    facts = found.facts
        return ShardRef(facts.url, facts.version, facts.origin_bytes, facts.samples), hit

    async def _tokens_counted(self, ref: ShardRef, member: TokenMember) -> tuple[ShardRef, bool]:
        """Return the shard's ref with every field set, tokens included, and True if no fetch was needed."""
        try:
            return await self._count_tokens(ref, member)
        except (CorruptShardError, TokensError):  # of a cached shard that has been damaged: it is checked by now
            return await self._count_tokens(ref, member)

    async def _count_tokens(self, ref: ShardRef, member: TokenMember) -> tuple[ShardRef, bool]:
        async with self._leasing.published(ref) as found:
            facts, layout, key = found.facts, self._store.layout, found.shard.key
            request = TokensRequest(str(layout.tar(key)), str(layout.sidecar(key)), facts.url, str(member))
            try:
                tokens = await self._indexers.count_tokens(request)
            except (CorruptShardError, TokensError) as exn:
                found.shard.suspicion = exn.message
                raise
        return ShardRef(facts.url, facts.version, facts.origin_bytes, facts.samples, tokens), found.hit


def _ref(obj: RemoteObject, samples: int | None = None) -> ShardRef:
    return ShardRef(obj.url, obj.version, obj.size_bytes, samples)
