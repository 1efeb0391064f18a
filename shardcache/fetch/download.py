"""Downloads of shards: parts over several connections, retried, checked and written."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from shardcache.access.urls import store_of
from shardcache.config.settings import Settings
from shardcache.errors import (
    OriginUnavailableError,
    OutdatedError,
    ShardcacheError,
    ShardChangedError,
)
from shardcache.fetch.etags import Etags
from shardcache.fetch.limits.bandwidth import Bandwidth
from shardcache.fetch.limits.hedging import HEDGED_SHARE, MAX_PARTS
from shardcache.fetch.limits.origin_states import Limit
from shardcache.fetch.limits.scheduler import Scheduler
from shardcache.fetch.limits.slot_claims import AskPriority, Claim
from shardcache.fetch.reads import Coming, PausableRead
from shardcache.fetch.requests import Requests, RequestSpan
from shardcache.fetch.retry import BACKOFF, Backoff, FailedAttempt, Retry
from shardcache.fetch.shard_download import ShardDownload
from shardcache.fetch.tier.tier_requests import TierFirst
from shardcache.origin.base import Origin
from shardcache.origin.objects import RemoteObject
from shardcache.store.disk.disk_errors import disk_error
from shardcache.store.partial import Partial
from shardcache.telemetry.metrics import Counters
from shardcache.transport.between.flow import Received
from shardcache.transport.between.parts import PartFileError, PartSums

T = TypeVar("T")

# Time that a request of several parts may last: before it ends, a shard may become urgent, and if
# it fails, it is repeated.
_REQUEST_S = 0.25
_MAX_ANSWERS = 10_000  # to `stat_ahead`, kept until they are used
# For each of this many connections to an origin, one first part may be requested ahead.
_CONNECTIONS_PER_FIRST_PART = 4
_MAX_STATS = 16  # concurrent requests for sizes and versions


def _ignore_progress(done_bytes: int) -> None:
    """Stand in for the progress callback of a download whose progress is not followed."""


def _nothing_first() -> Sequence[tuple[int, int]]:
    """Name no bytes that have to be fetched before all others."""
    return ()


class Downloader:
    """Downloads shards within a total connection limit, a limit per origin and a bandwidth limit.

    Memory is bounded by 2 x `max_connections` requests: those that hold a connection slot, and as
    many preempted ones. Each holds a block of its body, or the whole part if it is a hedged request
    or comes through an SDK. A part keeps its slot until it is written, so that a slow disk slows
    the network down.

    Args:
        hedged_share: the most parts of an origin whose requests are hedged, as a share of all.

    Attributes:
        asking: small requests under way, by url.
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
        self.scheduler = Scheduler(settings.max_connections, hedged_share)
        self._bandwidth = Bandwidth(settings.max_bandwidth)
        stall_timeout_s = settings.stall_timeout_s
        requests = Requests(self.scheduler, self._bandwidth, counters, stall_timeout_s)
        self._requests = TierFirst(requests, self.scheduler, counters, stall_timeout_s)
        self._etags = Etags()
        self._first_parts = 0  # number of those being requested ahead, which have no slot
        self._ahead: dict[str, RemoteObject] = {}  # answers to `stat_ahead`, oldest first
        self._retry = Retry(settings.attempts, counters, backoff)
        self.asking: Counter[str] = Counter()

    def limits(self, url: str | None = None) -> list[Limit]:
        """Return the limits that a download of a url meets, or any download."""
        origin = None if url is None else store_of(url)
        return [*self._bandwidth.limits(), *self.scheduler.limits(origin)]

    @property
    def failing(self) -> Mapping[str, FailedAttempt]:
        """The latest failed attempt at requests that are being repeated, by url."""
        return self._retry.failing

    # Small requests

    async def ask(self, url: str, request: Callable[[Received], Awaitable[T]]) -> T:
        """Return the result of a small request, or of a listing that reports its pages.

        It is retried like a part. Raises what the request raises; OriginUnavailableError only after
        the last attempt.
        """

        async def attempt() -> T:
            self.counters.fetched(url, size_bytes=0, requests=1)
            read = PausableRead(url, self._settings.stall_timeout_s)
            async with read.limit():
                return await request(read.received)

        self.asking[url] += 1
        try:
            return await self._retry.call(url, attempt)
        finally:
            self.asking[url] -= 1
            if not self.asking[url]:
                del self.asking[url]

    async def stat_all(
        self,
        stat: Callable[[str], Awaitable[RemoteObject]],
        urls: Iterable[str],
    ) -> dict[str, RemoteObject]:
        """Return the object of each url, by url, as `stat` returns it.

        Those whose request failed are missing: their transfers report the error.
        """
        objects: dict[str, RemoteObject] = {}
        # From the end: a fetch that has begun asks for the first ones itself.
        remaining = reversed(list(urls))

        async def work() -> None:
            for url in remaining:  # shared: a task for each of many urls would block the event loop
                try:
                    objects[url] = await stat(url)
                except ShardcacheError:
                    continue

        await asyncio.gather(*(work() for _ in range(_MAX_STATS)))
        return objects

    async def stat_ahead(self, origin: Origin, url: str) -> RemoteObject:
        """Return `origin.stat(url)`, retried, and keep it for the next `stat` of the object."""
        obj = await self.ask(url, lambda received: origin.stat(url))
        self._ahead.pop(url, None)
        self._drop_old_answers()
        if len(self._ahead) < _MAX_ANSWERS:
            self._ahead[url] = obj
        return obj

    def _drop_old_answers(self) -> None:
        while self._ahead:
            oldest = next(iter(self._ahead.values()))
            if not self._is_old(oldest):
                return
            del self._ahead[oldest.url]

    def _is_old(self, obj: RemoteObject) -> bool:
        return time.monotonic() - obj.reported_s >= self._settings.listing_ttl_s

    async def stat(
        self,
        origin: Origin,
        url: str,
        version: str | None = None,
        first_bytes: int = 0,
    ) -> RemoteObject:
        """Return the object that the next download is to fetch.

        That is an answer to `stat_ahead`, used once, or `origin.stat(url)`, retried.

        Args:
            version: the version that is wanted; None for any.
            first_bytes: number of the object's first bytes to request at the same time, once,
                unless the origin is busy.

        Raises the origin's errors; OutdatedError if the object is not in the given version.
        """

        async def request(_: Received) -> RemoteObject:
            nonlocal first_bytes
            ahead_bytes = 0 if self._is_busy(url) else first_bytes
            first_bytes = 0  # a retry requests the version alone
            return await self._stat_with(origin, url, ahead_bytes)

        obj = self._ahead.pop(url, None)
        if obj is None or version not in (None, obj.version) or self._is_old(obj):
            obj = await self.ask(url, request)
        if version not in (None, obj.version):
            # The sample order was computed for another version; reading this one instead would be
            # silently wrong.
            raise OutdatedError(
                f"the origin has version {obj.version}, the manifest names {version}",
                url=obj.url,
            )
        return obj

    def _is_busy(self, url: str) -> bool:
        """Return True if an origin has no connection to spare for another first part."""
        origin = self.scheduler.origin(store_of(url))
        maximum = origin.aimd.limit // _CONNECTIONS_PER_FIRST_PART
        return origin.held + self._first_parts >= maximum

    async def _stat_with(self, origin: Origin, url: str, first_bytes: int) -> RemoteObject:
        """Return an object's version; requests for first bytes are counted while they last."""
        if not first_bytes:
            return await origin.stat(url, 0)
        self._first_parts += 1
        try:
            return await origin.stat(url, first_bytes)
        finally:
            self._first_parts -= 1

    # Downloads

    async def download(
        self,
        origin: Origin,
        partial: Partial,
        *,
        priority: AskPriority,
        progress: Callable[[int], None],
        coming: Coming | None = None,
        first: Callable[[], Sequence[tuple[int, int]]] = _nothing_first,
    ) -> None:
        """Fetch every part missing from a partial file, in order, and check the whole object.

        Args:
            priority: returns the current priority for connections and bandwidth.
            progress: called with the number of bytes on disk, including those of an earlier run.
            coming: counts the bytes that have arrived but are not on disk yet.
            first: returns the start and end of bytes to be fetched before all others.

        Raises the origin's errors once retries cannot help, ShardChangedError without a retry when
        the origin holds another version, CorruptShardError when the object differs from the
        origin's checksum or ETag, and the disk's errors. The first error cancels all parts of the
        shard; finished parts are kept.
        """
        obj = partial.obj
        download = ShardDownload(origin, partial, priority, progress, coming or Coming(), first)
        await self._fetch(download, partial.missing())

        if not obj.guarded:  # the reads have not noticed if the version changed
            present = await self.ask(obj.url, lambda _: origin.stat(obj.url))
            if present.version != obj.version:
                raise ShardChangedError("the object was replaced during the download", url=obj.url)

        try:
            await asyncio.to_thread(download.verify)
            await self._etags.verify(obj, partial.path)
        except OSError as exn:
            raise disk_error(exn, partial.path) from exn

    async def fetch_parts(
        self,
        origin: Origin,
        partial: Partial,
        parts: range,
        *,
        priority: AskPriority,
        coming: Coming,
    ) -> AsyncIterator[int]:
        """Fetch consecutive parts by one request; yield the number of each that is in the file.

        The origin checks the object's version for every request. Raises as `download` does, but for
        what only the whole object can show.
        """
        download = ShardDownload(
            origin,
            partial,
            priority,
            _ignore_progress,
            coming,
            _nothing_first,
        )
        async for finished in self._request(download, parts):
            for part in finished:
                yield part

    async def _fetch(self, download: ShardDownload, missing: list[int]) -> None:
        """Fetch missing parts over several connections; the first error ends all of them."""
        download.start(missing)
        maximum = self._parts_per_request(download, len(missing))
        requests = download.requests(missing, maximum)

        async def work() -> None:
            for parts in requests:  # shared by all workers
                async for _ in self._request(download, parts):
                    pass

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._settings.shard_connections, len(missing))):
                    group.create_task(work())
        except BaseExceptionGroup as failures:
            first_failure = failures.exceptions[0]
            raise first_failure from first_failure.__cause__

    def _parts_per_request(self, download: ShardDownload, missing_parts: int) -> int:
        """Return how many parts a request may fetch.

        Larger requests cost less, smaller ones reach more connections.
        """
        if not download.obj.ranges:
            return missing_parts
        origin = self.scheduler.origin(store_of(download.obj.url))
        bytes_per_s = origin.link.connection_bytes_per_s
        if not download.obj.joinable or bytes_per_s is None:
            return 1
        connections = min(self._settings.shard_connections, self.scheduler.share(origin))
        parts_in_time = int(_REQUEST_S * bytes_per_s / download.partial.part_bytes)
        return max(1, min(missing_parts // connections, parts_in_time, MAX_PARTS))

    async def _request(self, download: ShardDownload, parts: range) -> AsyncIterator[range]:
        """Fetch consecutive parts with one request; after a failure, part by part.

        Yields those that are finished, and recorded.
        """
        # A new claim ranks after those of earlier parts.
        claim = Claim(download.priority, store_of(download.obj.url))
        count = len(parts)

        async def attempt() -> list[PartSums]:
            nonlocal count
            span = download.span(claim, parts.start, count)
            if download.obj.ranges:
                count = 1  # of the next attempt, if this one fails
            return await self._attempt(download, span)

        while parts:
            finished = await self._retry.call(download.obj.url, attempt)
            download.record(finished)
            yield parts[: len(finished)]
            parts = parts[len(finished) :]

    async def _attempt(self, download: ShardDownload, span: RequestSpan) -> list[PartSums]:
        """Send a request once; again only if it broke while it was paused."""
        while True:
            try:
                return await self._requests.fetch(span)
            except OriginUnavailableError:
                # An origin may close a paused connection; that is not a failure.
                if not span.claim.was_paused:
                    raise
            except PartFileError as exn:
                raise disk_error(exn.cause, download.partial.path) from exn.cause
