"""One shard's bytes: parts over several connections, each tried again where that may help, checked, written."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from shardcache.errors import ShardChangedError
from shardcache.fetch.buffers import Buffers
from shardcache.fetch.checksums import Ledger
from shardcache.fetch.limits import Slots
from shardcache.fetch.retry import BACKOFF, Backoff, Retry
from shardcache.fetch.sink import Sink
from shardcache.fetch.stall import Watch
from shardcache.metrics import Counters
from shardcache.origin.base import Origin, Received, RemoteObject, nothing

T = TypeVar("T")


class Downloader:
    """Downloads shards; all of them together keep to one number of connections.

    Memory is bounded by `max_connections` parts: a part keeps its slot until it is written, so that a slow disk
    slows the network down instead of filling memory.
    """

    def __init__(
        self,
        *,
        max_connections: int,
        shard_connections: int,
        attempts: int,
        stall_timeout_s: float,
        counters: Counters,
        backoff: Backoff = BACKOFF,
    ) -> None:
        self._slots = Slots(max_connections)
        self._buffers = Buffers()
        self._shard_connections = shard_connections
        self._retry = Retry(attempts, counters, backoff)
        self._stall_timeout_s = stall_timeout_s
        self._counters = counters

    def __repr__(self) -> str:
        return f"<Downloader {self._slots}>"

    async def stat(self, origin: Origin, url: str) -> RemoteObject:
        """Return `origin.stat(url)`, as patiently as a part is fetched. Raises the origin's errors."""
        return await self.ask(url, lambda received: origin.stat(url))

    async def ask(self, url: str, request: Callable[[Received], Awaitable[T]]) -> T:
        """Return what a small request, or a listing that reports its pages, gives; retried like a part.

        Raises what the request raises, OriginUnavailableError only after the last try.
        """

        async def attempt() -> T:
            self._counters.origin_requests += 1
            watch = Watch(self._stall_timeout_s, url, nothing)
            async with watch.limit():
                return await request(watch.received)

        return await self._retry.call(attempt)

    async def download(
        self,
        origin: Origin,
        obj: RemoteObject,
        sink: Sink,
        *,
        priority: Callable[[], int],
        progress: Callable[[int], None],
    ) -> None:
        """Fetch every part that the sink misses, and check the whole.

        Args:
            priority: how urgent it is right now; the lowest goes first wherever connections are short.
            progress: told the bytes on disk, those of an earlier run included.

        Raises the origin's errors once retries cannot help, ShardChangedError at once when the store holds another
        version, CorruptShardError when the whole differs from the store's checksum, and the sink's errors. The first
        error ends every part of this shard; what is written stays.
        """
        job = _Job(origin, obj, sink, Ledger(sink), priority, progress)
        missing = sink.missing()
        if obj.ranges:
            await self._ranges(job, missing)
        elif missing:
            await self._retry.call(lambda: self._stream(job))
        if not obj.guarded and (await self.stat(origin, obj.url)).version != obj.version:
            raise ShardChangedError("the object was replaced while it was read", url=obj.url)
        await asyncio.to_thread(job.ledger.verify)

    async def _ranges(self, job: _Job, missing: list[int]) -> None:
        job.start(missing)
        parts = iter(missing)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._shard_connections, len(missing))):
                    group.create_task(self._parts(job, parts))
        except BaseExceptionGroup as failures:
            first = failures.exceptions[0]
            raise first from first.__cause__

    async def _parts(self, job: _Job, parts: Iterator[int]) -> None:
        for index in parts:
            await self._part(job, index)

    async def _part(self, job: _Job, index: int) -> None:
        start, stop = job.span(index)

        async def attempt() -> None:
            async with self._slots.slot(job.priority):
                with self._buffers.lend(job.sink.part_bytes) as buffer:
                    part, watch = buffer[: stop - start], self._watch(job)
                    async with watch.limit():
                        await job.origin.read_into(job.obj, start, part, watch.received)
                    await job.write(index, part)

        await self._retry.call(attempt)

    async def _stream(self, job: _Job) -> None:
        job.start(range(-(-job.obj.size_bytes // job.sink.part_bytes)))
        async with self._slots.slot(job.priority):
            watch = self._watch(job)
            with self._buffers.lend(job.sink.part_bytes) as buffer:
                async with aclosing(job.origin.stream(job.obj, buffer, watch.received)) as parts:
                    index = 0
                    while True:
                        async with watch.limit():
                            part = await anext(parts, None)
                        if part is None:
                            return
                        await job.write(index, part)
                        index += 1

    def _watch(self, job: _Job) -> Watch:
        self._counters.origin_requests += 1
        return Watch(self._stall_timeout_s, job.obj.url, self._count)

    def _count(self, received_bytes: int) -> None:
        self._counters.origin_bytes += received_bytes


@dataclass(slots=True)
class _Job:
    """What the parts of one download share."""

    origin: Origin
    obj: RemoteObject
    sink: Sink
    ledger: Ledger
    priority: Callable[[], int]
    progress: Callable[[int], None]
    done_bytes: int = 0

    def span(self, index: int) -> tuple[int, int]:
        start = index * self.sink.part_bytes
        return start, min(start + self.sink.part_bytes, self.obj.size_bytes)

    def start(self, missing: list[int] | range) -> None:
        self.done_bytes = self.obj.size_bytes - sum(stop - start for start, stop in map(self.span, missing))
        self.progress(self.done_bytes)

    async def write(self, index: int, part: memoryview) -> None:
        await self.sink.write(index, part, self.ledger.observer(index))
        self.done_bytes += len(part)
        self.progress(self.done_bytes)
