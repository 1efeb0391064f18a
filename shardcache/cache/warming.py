"""Fetching shards because someone said so, with progress told as events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardcache.cache.leasing import Leasing, Published
from shardcache.cache.names import Names
from shardcache.cache.transfers import Class, Transfers
from shardcache.cache.waiting import Wait
from shardcache.errors import CapacityError, ShardcacheError
from shardcache.fetch.download import Downloader
from shardcache.origin.registry import Origins
from shardcache.protocol import ShardRef
from shardcache.store.store import Store

Event = dict[str, Any]
Tell = Callable[[Event], Awaitable[None]]

_PROGRESS_S = 0.25
_QUESTIONS = 16  # at the same time, for sizes


@dataclass(slots=True)
class _Job:
    """One request and how far it has come."""

    refs: list[ShardRef]
    tell: Tell
    states: dict[str, int] = field(default_factory=lambda: {"fetched": 0, "cached": 0, "failed": 0})
    arriving: set[str] = field(default_factory=set)
    done_bytes: int = 0
    origin_bytes: int = 0

    @property
    def total_bytes(self) -> int | None:
        sizes = [ref.size_bytes for ref in self.refs if ref.size_bytes is not None]
        return sum(sizes) or None  # what has no size is mostly what is not there


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
        """Fetch the shards, telling events; what `tell` raises, as when nobody listens any more, ends it.

        Raises CapacityError when the shards together are larger than the cache.
        """
        await self._leasing.recall(refs)
        job = _Job(await self._sized(dict.fromkeys(refs)), tell)
        self._check_capacity(job)
        await tell({"event": "resolved", "shards": len(job.refs), "total_bytes": job.total_bytes})
        async with asyncio.TaskGroup() as group:
            ticking = group.create_task(self._tick(job))
            async with asyncio.TaskGroup() as workers:
                todo = iter(job.refs)
                for _ in range(self._max_transfers):
                    workers.create_task(self._work(job, todo))
            ticking.cancel()
        await tell(self._progress(job))
        await tell({"event": "done", "shards": len(job.refs), **job.states, "origin_bytes": job.origin_bytes})

    async def _work(self, job: _Job, todo: Iterator[ShardRef]) -> None:
        for ref in todo:  # shared by all workers
            name = Names.of(ref)
            job.arriving.add(name)
            try:
                await job.tell(await self._one(job, ref))
            except ShardcacheError as exn:
                job.states["failed"] += 1
                await job.tell({"event": "error", "error": exn.to_json()})
            finally:
                job.arriving.discard(name)

    async def _one(self, job: _Job, ref: ShardRef) -> Event:
        found = await self._leasing.acquire(ref, Class.WARM, Wait())
        assert isinstance(found, Published)  # nobody asked for the beginning of one
        await self._leasing.release(found.shard)
        facts, state = found.facts, "cached" if found.hit else "fetched"
        job.states[state] += 1
        job.done_bytes += facts.origin_bytes
        job.origin_bytes += 0 if found.hit else facts.origin_bytes
        return {"event": "shard", "url": facts.url, "state": state, "size_bytes": facts.size_bytes}

    async def _tick(self, job: _Job) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            await job.tell(self._progress(job))

    def _progress(self, job: _Job) -> Event:
        transfers = map(self._transfers.get, job.arriving)
        return {
            "event": "progress",
            "done_shards": sum(job.states.values()),
            "shards": len(job.refs),
            "done_bytes": job.done_bytes + sum(transfer.done_bytes for transfer in transfers if transfer),
            "total_bytes": job.total_bytes,
        }

    async def _sized(self, refs: dict[ShardRef, None]) -> list[ShardRef]:
        """Return the refs with the sizes that patterns leave open: a bar without an end tells nothing."""
        questions = asyncio.Semaphore(_QUESTIONS)

        async def sized(ref: ShardRef) -> ShardRef:
            if ref.size_bytes is not None:
                return ref
            async with questions:
                try:
                    obj = await self._downloader.stat(self._origins.origin(ref.url), ref.url)
                except ShardcacheError:
                    return ref  # its transfer meets the same error and tells it
            return replace(ref, size_bytes=obj.size_bytes)

        return list(await asyncio.gather(*map(sized, refs)))

    def _check_capacity(self, job: _Job) -> None:
        known_bytes = sum(ref.size_bytes or 0 for ref in job.refs)
        capacity_bytes = self._store.space.capacity_bytes
        if known_bytes > capacity_bytes:
            raise CapacityError(
                f"the shards take {known_bytes} bytes together, the whole cache holds {capacity_bytes}",
                remedy="raise --capacity, or warm fewer shards",
            )
