"""Batch runs over many shards, a few at a time, with events for each outcome and for overall progress."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from shardcache.cache.catalog.aliases import AliasTable
from shardcache.cache.transfers.transfers import Transfers
from shardcache.errors import ShardcacheError
from shardcache.fetch.download import Downloader
from shardcache.origin.base import RemoteObject
from shardcache.origin.registry import Origins
from shardcache.protocol import ShardRef
from shardcache.redact import redact

Event = dict[str, Any]
Tell = Callable[[Event], Awaitable[None]]

_PROGRESS_S = 0.25
_QUESTIONS = 16  # concurrent requests for sizes and versions
_FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ShardOutcome:
    """Result for one shard.

    Attributes:
        state: name of the counter that it adds to.
        size_bytes: size at the origin.
        origin_bytes: bytes fetched from the origin for it.
        details: further fields of its event, in addition to url and state.
    """

    state: str
    size_bytes: int
    origin_bytes: int = 0
    details: Event = field(default_factory=dict)


Visit = Callable[[ShardRef], Awaitable[ShardOutcome]]


class Round:
    """The shards of one request and its progress. An exception from `tell`, as after a disconnect, aborts the request.

    Args:
        states: the states that outcomes can have; `failed` is added to them.
    """

    def __init__(self, refs: Sequence[ShardRef], states: Sequence[str], transfers: Transfers, tell: Tell) -> None:
        self._refs = refs
        self._transfers = transfers
        self._tell = tell
        self._counts = Counter(dict.fromkeys([*states, _FAILED], 0))
        self._arriving: set[str] = set()
        self._done_bytes = 0
        self._origin_bytes = 0
        sizes = [ref.size_bytes for ref in refs if ref.size_bytes is not None]
        self._total_bytes = sum(sizes) or None  # a shard without a size is most likely missing

    async def run(self, visit: Visit, at_once: int) -> Event:
        """Visit every shard, reporting `resolved`, `progress` and each `shard` or `error` event; return the totals."""
        await self._tell({"event": "resolved", "shards": len(self._refs), "total_bytes": self._total_bytes})
        async with asyncio.TaskGroup() as group:
            ticking = group.create_task(self._tick())
            async with asyncio.TaskGroup() as workers:
                todo = iter(self._refs)
                for _ in range(at_once):
                    workers.create_task(self._work(visit, todo))
            ticking.cancel()
        await self._tell(self._progress())
        return {"shards": len(self._refs), **self._counts, "origin_bytes": self._origin_bytes}

    async def _work(self, visit: Visit, todo: Iterator[ShardRef]) -> None:
        for ref in todo:  # shared by all workers
            name = AliasTable.of(ref)
            self._arriving.add(name)
            try:
                outcome = await visit(ref)
            except ShardcacheError as exn:
                self._counts[_FAILED] += 1
                await self._tell({"event": "error", "error": exn.to_json()})
            else:
                self._count(outcome)
                await self._tell({"event": "shard", "url": ref.url, "state": outcome.state, **outcome.details})
            finally:
                self._arriving.discard(name)
            await asyncio.sleep(0)  # a hundred thousand cached shards would block the event loop

    def _count(self, outcome: ShardOutcome) -> None:
        self._counts[outcome.state] += 1
        self._done_bytes += outcome.size_bytes
        self._origin_bytes += outcome.origin_bytes

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            await self._tell(self._progress())

    def _progress(self) -> Event:
        transfers = map(self._transfers.get, self._arriving)
        return {
            "event": "progress",
            "done_shards": self._counts.total(),
            "shards": len(self._refs),
            "done_bytes": self._done_bytes + sum(transfer.arrived_bytes for transfer in transfers if transfer),
            "total_bytes": self._total_bytes,
        }


@asynccontextmanager
async def reporting(urls: Collection[str], downloader: Downloader, tell: Tell) -> AsyncIterator[None]:
    """Report the most often repeated request for any of the urls during the block, whenever that changes."""

    async def watch() -> None:
        told = None
        while True:
            await asyncio.sleep(_PROGRESS_S)
            failing = [(failed, url) for url, failed in downloader.failing.items() if url in urls]
            if failing and (latest := max(failing))[0] != told:
                told, url = latest
                await tell({"event": "retrying", "url": redact(url), "message": str(told)})

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def ask_all(urls: Iterable[str], origins: Origins, downloader: Downloader) -> dict[str, RemoteObject]:
    """Return the origin's object for each url, omitting those whose request fails: their transfers report the error."""
    questions = asyncio.Semaphore(_QUESTIONS)
    found: dict[str, RemoteObject] = {}

    async def ask(url: str) -> None:
        async with questions:
            try:
                found[url] = await downloader.stat_ahead(origins.origin(url), url)
            except ShardcacheError:
                return

    await asyncio.gather(*map(ask, urls))
    return found
