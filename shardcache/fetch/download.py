"""Download of a shard: parts over several connections, retried where that may help, checked and written."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from shardcache.access.urls import store_of
from shardcache.config import Settings
from shardcache.errors import OriginUnavailableError, OutdatedError, ShardChangedError
from shardcache.fetch import tier
from shardcache.fetch.hedging import HEDGED_SHARE, MAX_PARTS, Hedging
from shardcache.fetch.limits import Bandwidth
from shardcache.fetch.priority import Claim, Priority
from shardcache.fetch.reads import Coming, StallTimeout
from shardcache.fetch.requests import Requests, RequestSpan
from shardcache.fetch.retry import BACKOFF, Backoff, FailedAttempt, Retry
from shardcache.fetch.scheduler import Scheduler
from shardcache.fetch.verification import Etags, PartChecksums, Sink
from shardcache.metrics import Counters
from shardcache.origin.base import Origin, RemoteObject
from shardcache.transport.flow import Received, nothing
from shardcache.transport.parts import PartFileError, PartSums

T = TypeVar("T")

# A shard may become urgent while a request lasts, and a request that fails is repeated.
_REQUEST_S = 0.25
_MAX_ANSWERS = 10_000


class Answers:
    """Keeps what origins reported when a command asked for sizes, so that its downloads need not ask again.

    Each answer is used once: if the object has been replaced since, the next attempt asks.

    Args:
        ttl_s: age up to which an answer is used; 0 keeps none.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._kept: dict[str, RemoteObject] = {}  # oldest first

    def keep(self, obj: RemoteObject) -> None:
        """Keep an answer that has just arrived, if there is space for it."""
        self._kept.pop(obj.url, None)
        while self._kept and self._is_old(next(iter(self._kept.values()))):
            del self._kept[next(iter(self._kept))]
        if len(self._kept) < _MAX_ANSWERS:
            self._kept[obj.url] = obj

    def take(self, url: str, version: str | None) -> RemoteObject | None:
        """Remove and return the answer about an object; None if there is no recent one about this version."""
        obj = self._kept.pop(url, None)
        if obj is None or version not in (None, obj.version) or self._is_old(obj):
            return None
        return obj

    def _is_old(self, obj: RemoteObject) -> bool:
        return time.monotonic() - obj.reported_s >= self._ttl_s


class Downloader:
    """Downloads shards within a total connection limit, a limit per origin and a bandwidth limit.

    Memory is bounded by 2 x `max_connections` requests: those that hold a connection slot, and as many preempted ones.
    Each holds a block of its body, or the whole part if it is a hedged request or comes through an SDK. A part keeps
    its slot until it is written, so that a slow disk slows the network down.

    Args:
        settings: limits on connections, attempts, stalls and bandwidth; `listing_ttl_s` is the age up to which an
            answer to `stat_ahead` is used.
        hedged_share: see `Hedging`.
    """

    def __init__(
        self,
        settings: Settings,
        counters: Counters,
        *,
        backoff: Backoff = BACKOFF,
        hedged_share: float = HEDGED_SHARE,
    ) -> None:
        self._settings = settings
        self.counters = counters
        self.scheduler = Scheduler(settings.max_connections)
        self._requests = Requests(
            self.scheduler,
            Bandwidth(settings.max_bandwidth),
            Hedging(hedged_share),
            counters,
            settings.stall_timeout_s,
        )
        self._etags = Etags()
        self._answers = Answers(settings.listing_ttl_s)
        self._retry = Retry(settings.attempts, counters, backoff)

    def __repr__(self) -> str:
        return f"<Downloader {self.scheduler}>"

    @property
    def failing(self) -> Mapping[str, FailedAttempt]:
        """The latest failed attempt at requests that are being repeated, by url."""
        return self._retry.failing

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
            stall_timeout = StallTimeout(self._settings.stall_timeout_s, url, nothing)
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
        if obj.ranges:
            await self._ranges(download, sink.missing())
        elif sink.missing():
            whole = range(-(-obj.size_bytes // sink.part_bytes))
            download.start(whole)
            await self._run(download, whole)
        if not obj.guarded and (await self.ask(obj.url, lambda _: origin.stat(obj.url))).version != obj.version:
            raise ShardChangedError("the object was replaced during the download", url=obj.url)
        try:
            await asyncio.to_thread(download.part_checksums.verify)
            await self._etags.verify(obj, sink.path)
        except OSError as exn:
            raise sink.disk_error(exn) from exn

    async def _ranges(self, download: _Download, missing: list[int]) -> None:
        download.start(missing)
        requests = self._requests_for(download, missing)

        async def work() -> None:
            for parts in requests:
                await self._run(download, parts)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._settings.shard_connections, len(missing))):
                    group.create_task(work())
        except BaseExceptionGroup as failures:
            first = failures.exceptions[0]
            raise first from first.__cause__

    def _requests_for(self, download: _Download, missing: list[int]) -> Iterator[range]:
        """Yield consecutive parts for one request each; single parts as soon as a reader waits."""
        count = self._parts_per_request(download, len(missing))
        left = deque(missing)
        while left:
            parts = range(left[0], left.popleft() + 1)
            maximum = 1 if download.priority().waiting else count
            while left and left[0] == parts.stop and len(parts) < maximum:
                parts = range(parts.start, left.popleft() + 1)
            yield parts

    def _parts_per_request(self, download: _Download, missing: int) -> int:
        """Return how many parts a request may fetch: larger ones cost less, smaller ones reach more connections."""
        origin = store_of(download.obj.url)
        bytes_per_s = self.scheduler.connection_bytes_per_s(origin)
        if not download.obj.joinable or bytes_per_s is None:
            return 1
        connections = min(self._settings.shard_connections, self.scheduler.share(origin))
        in_time = int(_REQUEST_S * bytes_per_s / download.sink.part_bytes)
        return max(1, min(missing // connections, in_time, MAX_PARTS))

    async def _run(self, download: _Download, parts: range) -> None:
        """Fetch consecutive parts with one request; after a failure, part by part."""
        claim = Claim(download.priority, store_of(download.obj.url))  # ranks after those of earlier parts
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
                return await tier.fetch(self._requests, piece)
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
