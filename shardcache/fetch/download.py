"""Downloads of shards: parts over several connections, retried, checked and written.

The daemon has one `Downloader`, which its fetches call. An origin is an object store or web server.
A part is the unit in which a shard is fetched, checksummed and recorded; a request fetches one part
or several in a row. A claim asks the scheduler for a connection slot, which each request needs. A
small request is one for an object's version and size, or for a listing. A request is sent ahead if
nobody waits for its result yet.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from shardcache.access.urls import store_of
from shardcache.config.settings import Settings
from shardcache.fetch.etags import Etags
from shardcache.fetch.limits.bandwidth import Bandwidth
from shardcache.fetch.limits.hedging import HEDGED_SHARE, MAX_PARTS
from shardcache.fetch.limits.origin_states import Limit
from shardcache.fetch.limits.scheduler import Scheduler
from shardcache.fetch.limits.slot_claims import AskPriority, Claim
from shardcache.fetch.reads import PausableRead, UnfinishedParts
from shardcache.fetch.requests import Requests, RequestSpan
from shardcache.fetch.retry import BACKOFF, Backoff, FailedAttempt, Retry
from shardcache.fetch.shard_download import ShardDownload
from shardcache.fetch.tier.tier_requests import TierFirst
from shardcache.origin.base import Origin
from shardcache.origin.objects import RemoteObject
from shardcache.shared.exceptions import (
    OriginBusyError,
    OriginUnavailableError,
    OutdatedError,
    ShardcacheError,
    ShardChangedError,
)
from shardcache.store.disk.disk_errors import disk_error
from shardcache.store.partial import Partial
from shardcache.telemetry.metrics import Counters
from shardcache.transport.between.flow import Received
from shardcache.transport.between.parts import PartFileError, PartSums

T = TypeVar("T")

# Longest expected time of a request for several parts, if it is larger than `_MIN_REQUEST_BYTES`.
# It is short because a shard may become urgent before the request ends, and because a request that
# fails is repeated as a whole.
_REQUEST_S = 0.25
# A request for this number of bytes is not divided because the connections seem slow: the time of a
# small request is mostly latency, and more requests would only make it longer.
_MIN_REQUEST_BYTES = 1024 * 1024
# Parts that are smaller than usual are fetched several at once, up to this size. A request for each
# of them would take a round trip of its own.
_MAX_SMALL_PARTS_BYTES = 4 * 1024 * 1024
_MAX_ANSWERS = 10_000  # limit on answers to `stat_ahead` that are kept until they are used
# First parts are requested ahead while less than this share of an origin's connections is used.
_MAX_USED_SHARE = 0.25
_MAX_STATS = 16  # concurrent requests for sizes and versions


def _ignore_progress(done_bytes: int) -> None:
    """Stand in for the progress callback of a download whose progress is not needed."""


def _nothing_first() -> Sequence[tuple[int, int]]:
    """Name no bytes that have to be fetched before all others."""
    return ()


class Downloader:
    """Downloads shards within a total connection limit, a limit per origin and a bandwidth limit.

    Memory is bounded by 2 x `max_connections` requests: those that hold a connection slot, and as
    many preempted ones, which wait for another slot. Each of them has a block of its body in
    memory, or the whole part if it is a hedged request or comes through an SDK. A hedged request is
    a second request for a late part. A part keeps its slot until it is written, so that a slow disk
    slows the network down.

    Args:
        backoff: the pauses between the attempts at a request.
        hedged_share: maximum share of an origin's parts whose requests may be hedged.

    Attributes:
        asking: number of small requests under way, by url.
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
        # Number of first parts being requested ahead, without a connection slot, by origin.
        self._first_parts: Counter[str] = Counter()
        self._ahead: dict[str, RemoteObject] = {}  # answers to `stat_ahead`, oldest first
        self._retry = Retry(settings.attempts, counters, backoff)
        self.asking: Counter[str] = Counter()

    def limits(self, url: str | None = None) -> list[Limit]:
        """Return the limits on bandwidth, on origins that throttle, and on all connections.

        Args:
            url: a url, if no other origin than the url's is wanted; None for all origins.
        """
        origin = None if url is None else store_of(url)
        return [*self._bandwidth.limits(), *self.scheduler.limits(origin)]

    @property
    def failing(self) -> Mapping[str, FailedAttempt]:
        """The latest failed attempt at a request that is being repeated, by url."""
        return {url: attempts[-1] for url, attempts in self._retry.failing.items()}

    # Small requests

    async def ask(self, url: str, request: Callable[[Received], Awaitable[T]]) -> T:
        """Return the result of a small request, which is retried as requests for parts are.

        Args:
            url: the url that the request is about, for errors and statistics.
            request: sends the request once. It gets a function to call with the bytes received, so
                that a long listing does not count as stalled.

        Raises what the request raises; OriginUnavailableError only after the last attempt.
        """

        async def send() -> T:
            self.counters.count_fetched(url, size_bytes=0, requests=1)
            read = PausableRead(url, self._settings.stall_timeout_s)
            async with read.stall_timeout():
                return await request(read.received)

        self.asking[url] += 1
        try:
            return await self._retry.call(url, send)
        finally:
            self.asking[url] -= 1
            if not self.asking[url]:
                del self.asking[url]

    async def stat_all(
        self,
        stat: Callable[[str], Awaitable[RemoteObject]],
        urls: Iterable[str],
    ) -> dict[str, RemoteObject]:
        """Return the objects of many urls, by url.

        Urls whose request has failed are missing. Their error is reported when they are fetched.

        Args:
            stat: returns the object of one url.
        """
        objects: dict[str, RemoteObject] = {}
        # The last urls are requested first: a fetch that has begun requests the first ones itself.
        remaining = reversed(list(urls))

        async def work() -> None:
            # All workers take urls from one iterator. A task for each of many urls would block the
            # event loop.
            for url in remaining:
                try:
                    objects[url] = await stat(url)
                except ShardcacheError:
                    continue

        await asyncio.gather(*(work() for _ in range(_MAX_STATS)))
        return objects

    async def stat_ahead(self, origin: Origin, url: str) -> RemoteObject:
        """Return an object as its origin describes it; keep the answer for the next `stat`.

        Callers do so for objects that will be fetched soon.
        """
        obj = await self.ask(url, lambda received: origin.stat(url))
        self._ahead.pop(url, None)  # so that the new answer goes to the end
        self._drop_old_answers()
        # If there are too many answers, this one is not kept, and `stat` asks the origin again.
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
        """Return True if the origin has described the object too long ago to rely on it."""
        return time.monotonic() - obj.reported_s >= self._settings.listing_ttl_s

    async def stat(
        self,
        origin: Origin,
        url: str,
        version: str | None = None,
        first_bytes: int = 0,
    ) -> RemoteObject:
        """Return the object that the next download will fetch, with its present version and size.

        An answer to `stat_ahead` is used once; without such an answer, the origin is asked.

        Args:
            version: the version that the object must have; None for any.
            first_bytes: number of the object's first bytes to request at the same time, so that
                they are on their way when the download begins; 0 for none. They are not requested
                while the origin is busy.

        Raises the origin's errors; OutdatedError if the object has another version.
        """
        is_retry = False

        async def request(_: Received) -> RemoteObject:
            nonlocal is_retry
            is_first_attempt = not is_retry
            is_retry = True
            # A retry requests only the version, not the first bytes again.
            if first_bytes and is_first_attempt and not self._is_busy(url):
                return await self._stat_with_first_bytes(origin, url, first_bytes)
            return await origin.stat(url)

        obj = self._take_answer(url, version)
        if obj is None:
            obj = await self.ask(url, request)
        if version not in (None, obj.version):
            # The sample order was computed for the version in the manifest. Reading another version
            # in its place would give wrong samples without an error.
            raise OutdatedError(
                f"the origin has version {obj.version}, the manifest names {version}",
                url=obj.url,
            )
        return obj

    def _take_answer(self, url: str, version: str | None) -> RemoteObject | None:
        """Take the answer to `stat_ahead`; None if it is missing, old, or of another version.

        Args:
            version: the version that the object must have; None for any.
        """
        answer = self._ahead.pop(url, None)
        if answer is None or self._is_old(answer):
            return None
        if version not in (None, answer.version):
            return None
        return answer

    def _is_busy(self, url: str) -> bool:
        """Return True if an origin has no connection to spare for another first part."""
        origin = self.scheduler.origin(store_of(url))
        used = origin.held + self._first_parts[origin.name]
        return used >= int(_MAX_USED_SHARE * origin.aimd.limit)

    async def _stat_with_first_bytes(
        self,
        origin: Origin,
        url: str,
        first_bytes: int,
    ) -> RemoteObject:
        """Return `origin.stat` of an object, and count the request for first bytes while it lasts.

        Args:
            first_bytes: number of first bytes to request as well.
        """
        name = store_of(url)
        self._first_parts[name] += 1
        try:
            return await origin.stat(url, first_bytes)
        finally:
            self._first_parts[name] -= 1
            if not self._first_parts[name]:
                del self._first_parts[name]

    # Downloads

    async def download(
        self,
        origin: Origin,
        partial: Partial,
        *,
        priority: AskPriority,
        progress: Callable[[int], None],
        unfinished: UnfinishedParts | None = None,
        first_ranges: Callable[[], Sequence[tuple[int, int]]] = _nothing_first,
    ) -> None:
        """Fetch every part missing from a partial file, in order, and check the whole object.

        The first error cancels all requests of the download; finished parts are kept.

        Args:
            partial: the file to fill.
            priority: returns the current priority for connections and bandwidth.
            progress: called with the number of bytes on disk, including those of an earlier run.
            unfinished: counts the bytes that have arrived and belong to unfinished parts; None if
                the count is not needed.
            first_ranges: returns the ranges of bytes (start and end) to be fetched before all
                others; it is called again for each request.

        Raises the origin's errors once retries cannot help, ShardChangedError without a retry when
        the origin holds another version, CorruptShardError when the object differs from the
        origin's checksum or ETag, and the disk's errors.
        """
        obj = partial.obj
        download = ShardDownload(
            origin,
            partial,
            priority,
            progress,
            unfinished or UnfinishedParts(),
            first_ranges,
        )
        await self._fetch(download, partial.missing())

        # The requests for parts of an unguarded object do not check its version. So it is compared
        # once, after all parts have arrived.
        if not obj.is_guarded:
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
        unfinished: UnfinishedParts,
    ) -> AsyncIterator[int]:
        """Fetch consecutive parts by one request; yield the number of each finished part.

        The origin checks the object's version for every request. Raises as `download` does, except
        for errors that only the whole object can show, such as a wrong checksum.

        Args:
            partial: the file to fill.
            parts: numbers of the parts.
            priority: returns the current priority for connections and bandwidth.
            unfinished: counts the bytes that have arrived and belong to unfinished parts.
        """
        download = ShardDownload(
            origin,
            partial,
            priority,
            _ignore_progress,
            unfinished,
            _nothing_first,
        )
        async for finished in self._request(download, parts):
            for part in finished:
                yield part

    async def _fetch(self, download: ShardDownload, missing: list[int]) -> None:
        """Fetch missing parts over several connections; the first error ends all of them."""
        download.start(missing)
        max_parts = self._parts_per_request(download, len(missing))
        max_urgent_parts = min(max_parts, self._parts_of_usual_size(download))
        requests = download.requests(missing, max_parts, max_urgent_parts)

        async def work() -> None:
            for parts in requests:  # shared by all workers
                async for _ in self._request(download, parts):
                    pass

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._settings.shard_connections, len(missing))):
                    group.create_task(work())
        except BaseExceptionGroup as failures:
            # The task group has cancelled the other tasks, so the first error is the cause.
            first_failure = failures.exceptions[0]
            raise first_failure from first_failure.__cause__

    def _parts_per_request(self, download: ShardDownload, missing_parts: int) -> int:
        """Return how many parts a request may fetch.

        Fewer, larger requests cost less; more, smaller requests use more connections.
        """
        # Without ranges, one request fetches the whole object.
        if not download.obj.has_ranges:
            return missing_parts
        # Several parts at once would all be held in memory, unless the object `is_joinable`.
        if not download.obj.is_joinable:
            return 1
        origin = self.scheduler.origin(store_of(download.obj.url))
        connections = min(self._settings.shard_connections, self.scheduler.share(origin))
        parts_per_connection = missing_parts // connections
        usual_parts = self._parts_of_usual_size(download)
        bytes_per_s = origin.link.connection_bytes_per_s
        if bytes_per_s is None:
            # The time of a larger request could not be estimated.
            return max(1, min(parts_per_connection, usual_parts))
        request_bytes = max(_MIN_REQUEST_BYTES, int(_REQUEST_S * bytes_per_s))
        parts_in_time = request_bytes // download.partial.part_bytes
        return max(1, min(parts_per_connection, parts_in_time, MAX_PARTS * usual_parts))

    def _parts_of_usual_size(self, download: ShardDownload) -> int:
        """Return how many parts of a download one request would fetch as a single usual part.

        That is 1, except for an object of which ranges were read before: its parts are small.
        """
        usual_bytes = min(self._settings.part_size, _MAX_SMALL_PARTS_BYTES)
        return max(1, usual_bytes // download.partial.part_bytes)

    async def _request(self, download: ShardDownload, parts: range) -> AsyncIterator[range]:
        """Fetch consecutive parts with one request; after a failure, part by part.

        Yields the parts that are finished, once they are recorded.
        """
        # The claim is made now, so that it ranks after the claims of earlier parts.
        claim = Claim(download.priority, store_of(download.obj.url))
        # The first attempt is for all parts. If it fails, each later one is for a single part.
        attempted_parts = len(parts)

        async def send() -> list[PartSums]:
            nonlocal attempted_parts
            span = download.span(claim, parts.start, attempted_parts)
            if download.obj.has_ranges:
                attempted_parts = 1
            return await self._send(download, span)

        while parts:
            finished = await self._retry.call(download.obj.url, send)
            download.record(finished)
            yield parts[: len(finished)]
            parts = parts[len(finished) :]

    async def _send(self, download: ShardDownload, span: RequestSpan) -> list[PartSums]:
        """Send a request, and send it again only if it broke while it was paused."""
        while True:
            try:
                return await self._requests.fetch(span)
            except OriginBusyError:
                # An origin that throttles has answered: the pause did not break the request.
                raise
            except OriginUnavailableError:
                # An origin may close a connection that the scheduler has paused. That is no failure
                # of the origin, so it does not count as an attempt.
                if not span.claim.was_paused:
                    raise
            except PartFileError as exn:
                raise disk_error(exn.cause, download.partial.path) from exn.cause
