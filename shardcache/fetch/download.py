"""Download of a shard: parts over several connections, retried where that may help, checked and written."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from shardcache.access.urls import store_of
from shardcache.errors import OriginUnavailableError, OutdatedError, ShardChangedError
from shardcache.fetch.answers import Answers
from shardcache.fetch.connections.bandwidth import Bandwidth
from shardcache.fetch.connections.priority import Priority
from shardcache.fetch.connections.scheduler import Claim, OriginLoad, Scheduler
from shardcache.fetch.parts.hedging import HEDGED_SHARE, Hedging
from shardcache.fetch.parts.part_workers import PartWorkers
from shardcache.fetch.parts.pausable_read import Coming
from shardcache.fetch.parts.request_size import parts_per_request
from shardcache.fetch.parts.requests import Requests, RequestSpan
from shardcache.fetch.parts.stall_timeout import StallTimeout
from shardcache.fetch.retry import BACKOFF, Backoff, FailedAttempt, Retry
from shardcache.fetch.sink import Sink
from shardcache.fetch.verification.etags import Etags
from shardcache.fetch.verification.part_checksums import PartChecksums
from shardcache.metrics import Counters
from shardcache.origin.base import Origin, RemoteObject
from shardcache.transport.flow import Received, nothing
from shardcache.transport.parts import PartFileError, PartSums

T = TypeVar("T")


class Downloader:
    """Downloads shards within a total connection limit, a limit per origin and a bandwidth limit.

    Memory is bounded by 2 x `max_connections` requests: those that hold a connection slot, and as many preempted ones.
    Each holds a block of its body, or the whole part if it is a hedged request or comes through an SDK. A part keeps
    its slot until it is written, so that a slow disk slows the network down.

    Args:
        answer_ttl_s: age up to which an answer to `stat_ahead` is used.
    """

    def __init__(
        self,
        *,
        max_connections: int,
        shard_connections: int,
        attempts: int,
        stall_timeout_s: float,
        counters: Counters,
        max_bandwidth: int | None = None,
        backoff: Backoff = BACKOFF,
        hedged_share: float = HEDGED_SHARE,
        answer_ttl_s: float = 0.0,
    ) -> None:
        self._scheduler = Scheduler(max_connections)
        self._bandwidth = Bandwidth(max_bandwidth)
        self._requests = Requests(self._scheduler, self._bandwidth, Hedging(hedged_share), counters, stall_timeout_s)
        self._etags = Etags()
        self._answers = Answers(answer_ttl_s)
        self._shard_connections = shard_connections
        self._retry = Retry(attempts, counters, backoff)
        self._stall_timeout_s = stall_timeout_s
        self.counters = counters

    def __repr__(self) -> str:
        return f"<Downloader {self._scheduler} {self._bandwidth}>"

    @property
    def pauses(self) -> int:
        """Number of times a part was preempted."""
        return self._scheduler.pauses

    @property
    def failing(self) -> Mapping[str, FailedAttempt]:
        """The latest failed attempt at requests that are being repeated, by url."""
        return self._retry.failing

    def loads(self) -> list[OriginLoad]:
        """Return the load on each origin, and its limit."""
        return self._scheduler.loads()

    def reconsider(self) -> None:
        """Re-evaluate priorities now; otherwise that happens when a part begins or ends, some fifty times a second."""
        self._scheduler.deal()

    def expect(self, url: str, priority: Callable[[], Priority]) -> AbstractContextManager[None]:
        """Respect the priority of a download that has not begun; see `Scheduler.expect`."""
        return self._scheduler.expect(priority, store_of(url))

    async def stat_ahead(self, origin: Origin, url: str) -> RemoteObject:
        """Return `origin.stat(url)`, retried like a part, and keep it for the next `stat` of the object."""
        obj = await self.ask(url, lambda received: origin.stat(url))
        self._answers.keep(obj)
        return obj

    async def stat(self, origin: Origin, url: str, version: str | None = None) -> RemoteObject:
        """Return the object that the next download is to fetch: a kept answer, or `origin.stat(url)`, retried.

        Raises the origin's errors; OutdatedError if the object is not in the given version.
        """
        obj = self._answers.take(url, version)
        if obj is None:
            obj = await self.ask(url, lambda received: origin.stat(url))
        if version not in (None, obj.version):
            # The sample order was computed for another version; reading this one instead would be silently wrong.
            raise OutdatedError(f"the origin has version {obj.version}, the manifest names {version}", url=obj.url)
        return obj

    async def ask(self, url: str, request: Callable[[Received], Awaitable[T]]) -> T:
        """Return the result of a small request, or of a listing that reports its pages; retried like a part.

        Raises what the request raises; OriginUnavailableError only after the last attempt.
        """

        async def attempt() -> T:
            self.counters.origin_requests += 1
            stall_timeout = StallTimeout(self._stall_timeout_s, url, nothing)
            async with stall_timeout.limit():
                return await request(stall_timeout.received)

        return await self._retry.call(url, attempt)

    async def download(
        self,
        origin: Origin,
        obj: RemoteObject,
        sink: Sink,
        *,
        priority: Callable[[], Priority],
        progress: Callable[[int], None],
        coming: Coming | None = None,
    ) -> None:
        """Fetch every part missing from the sink, in order, and check the whole object.

        Args:
            priority: returns the current priority for connections and bandwidth.
            progress: called with the number of bytes on disk, including those of an earlier run.
            coming: counts the bytes that have arrived but are not on disk yet.

        Raises the origin's errors once retries cannot help, ShardChangedError without a retry when the origin holds
        another version, CorruptShardError when the object differs from the origin's checksum or ETag, and the sink's
        errors. The first error cancels all parts of the shard; finished parts are kept.
        """
        download = _Download(origin, obj, sink, priority, progress, coming or Coming())
        missing = sink.missing()
        if obj.ranges:
            await self._ranges(download, missing)
        elif missing:
            await self._whole(download)
        if not obj.guarded and (await self._present_version(origin, obj.url)) != obj.version:
            raise ShardChangedError("the object was replaced during the download", url=obj.url)
        try:
            await asyncio.to_thread(download.part_checksums.verify)
            await self._etags.verify(obj, sink.path)
        except OSError as exn:
            raise sink.disk_error(exn) from exn

    async def _present_version(self, origin: Origin, url: str) -> str:
        return (await self.ask(url, lambda received: origin.stat(url))).version

    async def _ranges(self, download: _Download, missing: list[int]) -> None:
        download.start(missing)
        part_workers = PartWorkers(
            self._shard_connections, self._requests_for(download, missing), partial(self._run, download)
        )
        try:
            # A reader that waits can start at the beginning: the fewer parts share the link, the sooner that arrives.
            await part_workers.run(1 if download.priority().alone else self._shard_connections)
        except BaseExceptionGroup as failures:
            first = failures.exceptions[0]
            raise first from first.__cause__

    def _requests_for(self, download: _Download, missing: list[int]) -> Iterator[range]:
        """Yield consecutive parts for one request each; single parts as soon as a reader waits."""
        count = self._parts_per_request(download, len(missing))
        rest = deque(missing)
        while rest:
            run = range(rest[0], rest.popleft() + 1)
            most = 1 if download.priority().waiting else count
            while rest and rest[0] == run.stop and len(run) < most:
                run = range(run.start, rest.popleft() + 1)
            yield run

    def _parts_per_request(self, download: _Download, missing: int) -> int:
        if not download.obj.joinable:
            return 1
        origin = store_of(download.obj.url)
        bytes_per_s = self._scheduler.connection_bytes_per_s(origin)
        part_s = None if bytes_per_s is None else download.sink.part_bytes / bytes_per_s
        return parts_per_request(missing, min(self._shard_connections, self._scheduler.share(origin)), part_s)

    async def _whole(self, download: _Download) -> None:
        count = -(-download.obj.size_bytes // download.sink.part_bytes)
        download.start(range(count))
        await self._run(download, range(count))

    async def _run(self, download: _Download, parts: range) -> None:
        """Fetch consecutive parts with one request; after a failure, part by part."""
        claim = download.claim()
        count = len(parts)

        async def attempt() -> list[PartSums]:
            nonlocal count
            piece = download.piece(claim, parts.start, count)
            if download.obj.ranges:
                count = 1
            return await self._attempt(download, piece)

        while parts:
            finished = await self._retry.call(download.obj.url, attempt)
            download.record(finished)
            parts = parts[len(finished) :]

    async def _attempt(self, download: _Download, piece: RequestSpan) -> list[PartSums]:
        while True:
            try:
                return await self._requests.fetch(piece)
            except OriginUnavailableError:
                if not piece.claim.paused:  # an origin may close a paused connection; that is not a failure
                    raise
            except PartFileError as exn:
                raise download.sink.disk_error(exn.cause) from exn.cause


@dataclass(slots=True)
class _Download:
    """State shared by the parts of one download."""

    origin: Origin
    obj: RemoteObject
    sink: Sink
    priority: Callable[[], Priority]
    progress: Callable[[int], None]
    coming: Coming
    part_checksums: PartChecksums = field(init=False)
    done_bytes: int = 0

    def __post_init__(self) -> None:
        self.part_checksums = PartChecksums(self.sink)

    def claim(self) -> Claim:
        """Return a claim that ranks after those of earlier parts."""
        return Claim(self.priority, store_of(self.obj.url))

    def piece(self, claim: Claim, first: int, count: int) -> RequestSpan:
        """Return consecutive parts as one request."""
        parts = replace(self.sink.parts(first, count), algorithm=self.part_checksums.algorithm)
        return RequestSpan(self.origin, self.obj, parts, claim, partial(self.coming.begin, first))

    def start(self, missing: list[int] | range) -> None:
        """Count the bytes that are already on disk."""
        self.done_bytes = self.obj.size_bytes - sum(self.sink.parts(index, 1).size_bytes for index in missing)
        self.progress(self.done_bytes)

    def record(self, finished: list[PartSums]) -> None:
        """Record finished parts."""
        self.coming.end(finished[0].index)
        for sums in finished:
            self.sink.record(sums)
            self.part_checksums.record(sums)
            self.done_bytes += self.sink.parts(sums.index, 1).size_bytes
        self.progress(self.done_bytes)
