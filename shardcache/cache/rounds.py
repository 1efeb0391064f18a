"""One round over many shards: a few at a time, each one's outcome and the progress of all told as events."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardcache.cache.names import Names
from shardcache.cache.transfers import Transfers
from shardcache.errors import ShardcacheError
from shardcache.fetch.download import Downloader
from shardcache.origin.base import RemoteObject
from shardcache.origin.registry import Origins
from shardcache.protocol import ShardRef

Event = dict[str, Any]
Tell = Callable[[Event], Awaitable[None]]

_PROGRESS_S = 0.25
_QUESTIONS = 16  # at the same time, for sizes and versions
_FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one shard.

    Attributes:
        state: under which it is counted.
        size_bytes: in the store.
        origin_bytes: that came from there for it.
        details: told of it beside its url and state.
    """

    state: str
    size_bytes: int
    origin_bytes: int = 0
    details: Event = field(default_factory=dict)


Visit = Callable[[ShardRef], Awaitable[Outcome]]


class Round:
    """The shards of one request and how far it has come. What `tell` raises, as when nobody listens any more, ends it.

    Args:
        states: those that outcomes can have; `failed` comes by itself.
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
        self._total_bytes = sum(sizes) or None  # what has no size is mostly what is not there

    async def run(self, visit: Visit, at_once: int) -> Event:
        """Visit every shard, telling `resolved`, `progress` and each `shard` or `error`; return the sums."""
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
            name = Names.of(ref)
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
            await asyncio.sleep(0)  # a hundred thousand that need no fetch would hold up every reader

    def _count(self, outcome: Outcome) -> None:
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


async def ask_all(urls: Iterable[str], origins: Origins, downloader: Downloader) -> dict[str, RemoteObject]:
    """Return what the store has under each url, without those it does not answer for: their transfers tell why."""
    questions = asyncio.Semaphore(_QUESTIONS)
    found: dict[str, RemoteObject] = {}

    async def ask(url: str) -> None:
        async with questions:
            try:
                found[url] = await downloader.stat(origins.origin(url), url)
            except ShardcacheError:
                return

    await asyncio.gather(*map(ask, urls))
    return found
