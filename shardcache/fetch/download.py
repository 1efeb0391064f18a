"""Download of a shard: parts over several connections, retried where that may help, checked and written."""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from shardcache.access import store_of
from shardcache.config import Settings
from shardcache.errors import (
    CorruptShardError,
    OriginError,
    OriginUnavailableError,
    OutdatedError,
    ShardcacheError,
    ShardChangedError,
)
from shardcache.fetch.estimates import HEDGED_SHARE, MAX_PARTS
from shardcache.fetch.reads import Bandwidth, Coming, PausableRead
from shardcache.fetch.requests import Requests, RequestSpan
from shardcache.fetch.scheduler import Claim, Limit, Priority, Scheduler
from shardcache.logs import SharedLogger
from shardcache.metrics import Counters
from shardcache.origin.base import DIGESTS, MD5, Origin, RemoteObject, digest_of
from shardcache.redact import redact
from shardcache.store.disk.disk_errors import disk_error
from shardcache.store.partial import Partial
from shardcache.transport.parts import ALGORITHMS, PartFileError, PartSums, checksum_function, combined
from shardcache.transport.workers import Received

log = SharedLogger()

P = ParamSpec("P")
T = TypeVar("T")

# A shard may become urgent while a request lasts, and a request that fails is repeated.
_REQUEST_S = 0.25
_MAX_ANSWERS = 10_000
_PRIMING = 4  # one in so many of an origin's connections may be taken by parts requested ahead
_QUESTIONS = 16  # concurrent requests for sizes and versions
# Attempts for an object that is overwritten during the download. If it is rewritten faster than it can be downloaded,
# the error goes to the reader.
_VERSIONS = 3
_MAX_DOUBTED = 1024
_MAX_RETRY_AFTER_S = 60


@dataclass(frozen=True, slots=True)
class Backoff:
    """Full-jitter exponential backoff: a random time below a bound that doubles with each failure.

    After M. Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015: while many clients contend, full
    jitter needs the fewest calls of the variants compared there.
    """

    base_s: float = 0.25
    cap_s: float = 15.0

    def pause_s(self, failures: int, uniform: float) -> float:
        """Return the pause after a number of failures (1 or more), for a random number from [0, 1)."""
        return min(self.cap_s, self.base_s * 2.0 ** min(failures - 1, 64)) * uniform


BACKOFF = Backoff()


@dataclass(frozen=True, slots=True, order=True)
class FailedAttempt:
    """A failed attempt at a request that will be repeated; its text is for people."""

    number: int
    attempts: int
    cause: str

    def __str__(self) -> str:
        return f"attempt {self.number} of {self.attempts}: {self.cause}"


@dataclass(frozen=True, slots=True)
class Retry:
    """Retry policy for requests to origins."""

    attempts: int  # maximum, the first included
    counters: Counters
    backoff: Backoff = BACKOFF
    failing: dict[str, FailedAttempt] = field(default_factory=dict)  # the latest of requests under way, by url

    async def call(self, url: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return what `attempt` returns, which requests something of `url`.

        Retries only after OriginUnavailableError: any other error would recur. Raises the last attempt's error, with
        the number of attempts.
        """
        number = 0
        try:
            while True:
                number += 1
                try:
                    return await attempt()
                except OriginUnavailableError as exn:
                    if number == self.attempts:
                        message = f"{exn.message} (given up after {number} attempts)"
                        raise type(exn)(message, url=exn.url, remedy=exn.remedy) from exn
                    self.counters.retries += 1
                    self._failed(url, FailedAttempt(number, self.attempts, exn.message))
                    asked_s = min(exn.retry_after_s, _MAX_RETRY_AFTER_S)
                await asyncio.sleep(asked_s + self.backoff.pause_s(number, random.random()))
        except OriginError as exn:
            self.counters.measures.given_up[exn.code] += 1
            raise
        finally:
            self.failing.pop(url, None)

    def _failed(self, url: str, failed: FailedAttempt) -> None:
        self.failing[url] = failed
        if failed.number > 1 and failed.number.bit_count() == 1:  # the 2nd, 4th, 8th: not every lost connection
            log.warning("request failed; retrying", url=redact(url), cause=str(failed))


def refetch(fetch: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate a function that fetches an object: repeat it if the object was replaced, and once if it is corrupt."""

    @wraps(fetch)
    async def refetching(*args: P.args, **kwargs: P.kwargs) -> T:
        corrupt = False
        for _ in range(_VERSIONS - 1):
            try:
                return await fetch(*args, **kwargs)
            except ShardChangedError:
                pass
            except CorruptShardError:
                # A retry cures a bit flipped in transit; an object damaged at the origin fails again.
                if corrupt:
                    raise
                corrupt = True
        return await fetch(*args, **kwargs)

    return refetching


class Etags:
    """Knowledge of which origins' ETags are MD5s.

    An ETag may be the MD5 of the object, but does not say so: in S3 it is for objects uploaded in one piece and not
    encrypted with a KMS or customer key; other object stores vary. So a mismatch alone proves nothing:

    - It means damage if another object of the same origin matched its ETag: 128 bits do not match by chance.
    - Otherwise the object is fetched once more. If the bytes differ from the first attempt's, they were damaged in
      transit; if they are the same, the origin's ETags are not MD5s and are ignored from then on.
    """

    def __init__(self) -> None:
        self._digests: set[str] = set()  # origins where an object matched its ETag
        self._other: set[str] = set()  # origins whose ETags are not MD5s
        self._doubted: dict[tuple[str, str], int] = {}  # MD5s that did not match, by url and version

    async def verify(self, obj: RemoteObject, path: Path) -> None:
        """Compare a file with its object's ETag, if that may be an MD5.

        Raises CorruptShardError; OSError if the file cannot be read.
        """
        if obj.checksum is None or obj.checksum.algorithm != MD5 or store_of(obj.url) in self._other:
            return
        self.judge(obj, obj.checksum.value, await asyncio.to_thread(digest_of, path, MD5))

    def judge(self, obj: RemoteObject, wanted: int, found: int) -> None:
        """Compare an object's ETag with the MD5 of the received bytes, and learn from it. Raises CorruptShardError."""
        origin, name = store_of(obj.url), (obj.url, obj.version)
        if found == wanted:
            self._digests.add(origin)
            self._doubted.pop(name, None)
        elif origin not in self._digests and self._doubted.get(name) == found:
            self._other.add(origin)
            log.warning("the origin's ETags are not MD5s; no longer comparing them", origin=origin)
        else:
            self._doubted[name] = found
            if len(self._doubted) > _MAX_DOUBTED:
                del self._doubted[next(iter(self._doubted))]
            raise CorruptShardError(
                f"the MD5 of the received bytes is {found:032x}, the origin's is {wanted:032x}",
                url=obj.url,
                remedy="upload the shard again; if the origin's value is not meant to be it, set `verify_etag = false` "
                "in its [[origin]] table",
            )


class Downloader:
    """Downloads shards within a total connection limit, a limit per origin and a bandwidth limit.

    Memory is bounded by 2 x `max_connections` requests: those that hold a connection slot, and as many preempted ones.
    Each holds a block of its body, or the whole part if it is a hedged request or comes through an SDK. A part keeps
    its slot until it is written, so that a slow disk slows the network down.
    """

    def __init__(
        self, settings: Settings, counters: Counters, *, backoff: Backoff = BACKOFF, hedged_share: float = HEDGED_SHARE
    ) -> None:
        self._settings = settings
        self.counters = counters
        self.scheduler = Scheduler(settings.max_connections, hedged_share)
        self._bandwidth = Bandwidth(settings.max_bandwidth)
        self._requests = Requests(self.scheduler, self._bandwidth, counters, settings.stall_timeout_s)
        self._etags = Etags()
        self._priming = 0  # number of first parts requested ahead, which have no slot
        self._ahead: dict[str, RemoteObject] = {}  # answers to `stat_ahead`, oldest first
        self._retry = Retry(settings.attempts, counters, backoff)
        self.asking: Counter[str] = Counter()  # small requests under way, by url

    def limits(self, url: str | None = None) -> list[Limit]:
        """Return the limits that a download of a url meets, or any download."""
        origin = None if url is None else store_of(url)
        return [*self._bandwidth.limits(), *self.scheduler.limits(origin)]

    @property
    def failing(self) -> Mapping[str, FailedAttempt]:
        """The latest failed attempt at requests that are being repeated, by url."""
        return self._retry.failing

    async def stat_all(self, origin: Callable[[str], Origin], urls: Iterable[str]) -> dict[str, RemoteObject]:
        """Return the object of each url; without those whose request failed: their transfers report the error."""
        found: dict[str, RemoteObject] = {}
        left = reversed([*urls])  # a fetch that has begun asks for the first ones itself

        async def ask() -> None:
            for url in left:  # shared: a task for each of many urls would block the event loop
                try:
                    found[url] = await self.stat_ahead(origin(url), url)
                except ShardcacheError:
                    continue

        await asyncio.gather(*(ask() for _ in range(_QUESTIONS)))
        return found

    async def stat_ahead(self, origin: Origin, url: str) -> RemoteObject:
        """Return `origin.stat(url)`, retried like a part, and keep it for the next `stat` of the object."""
        obj = await self.ask(url, lambda received: origin.stat(url))
        self._ahead.pop(url, None)
        while self._ahead and self._is_old(oldest := next(iter(self._ahead.values()))):
            del self._ahead[oldest.url]
        if len(self._ahead) < _MAX_ANSWERS:
            self._ahead[url] = obj
        return obj

    async def stat(self, origin: Origin, url: str, version: str | None = None, first_bytes: int = 0) -> RemoteObject:
        """Return the object that the next download is to fetch: an answer to `stat_ahead`, used once, or
        `origin.stat(url)`, retried.

        Unless the origin is busy, the object's `first_bytes` are requested at the same time, once.

        Raises the origin's errors; OutdatedError if the object is not in the given version.
        """

        async def request(_: Received) -> RemoteObject:
            nonlocal first_bytes
            load = self.scheduler.origin(store_of(url))
            is_busy = load.held + self._priming >= load.aimd.limit // _PRIMING
            ahead_bytes, first_bytes = 0 if is_busy else first_bytes, 0
            self._priming += ahead_bytes > 0
            try:
                return await origin.stat(url, ahead_bytes)
            finally:
                self._priming -= ahead_bytes > 0

        obj = self._ahead.pop(url, None)
        if obj is None or version not in (None, obj.version) or self._is_old(obj):
            obj = await self.ask(url, request)
        if version not in (None, obj.version):
            # The sample order was computed for another version; reading this one instead would be silently wrong.
            raise OutdatedError(f"the origin has version {obj.version}, the manifest names {version}", url=obj.url)
        return obj

    def _is_old(self, obj: RemoteObject) -> bool:
        return time.monotonic() - obj.reported_s >= self._settings.listing_ttl_s

    async def ask(self, url: str, request: Callable[[Received], Awaitable[T]]) -> T:
        """Return the result of a small request, or of a listing that reports its pages; retried like a part.

        Raises what the request raises; OriginUnavailableError only after the last attempt.
        """

        async def attempt() -> T:
            self.counters.fetched(url, 0, 1)
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

    async def download(
        self,
        origin: Origin,
        partial: Partial,
        *,
        priority: Callable[[], Priority],
        progress: Callable[[int], None],
        coming: Coming | None = None,
        first: Callable[[], Sequence[tuple[int, int]]] = tuple,
    ) -> None:
        """Fetch every part missing from a partial file, in order, and check the whole object.

        Args:
            priority: returns the current priority for connections and bandwidth.
            progress: called with the number of bytes on disk, including those of an earlier run.
            coming: counts the bytes that have arrived but are not on disk yet.
            first: returns the start and end of bytes to be fetched before all others.

        Raises the origin's errors once retries cannot help, ShardChangedError without a retry when the origin holds
        another version, CorruptShardError when the object differs from the origin's checksum or ETag, and the disk's
        errors. The first error cancels all parts of the shard; finished parts are kept.
        """
        obj, download = partial.obj, _Download(origin, partial, priority, progress, coming or Coming(), first)
        await self._fetch(download, partial.missing())
        if not obj.guarded and (await self.ask(obj.url, lambda _: origin.stat(obj.url))).version != obj.version:
            raise ShardChangedError("the object was replaced during the download", url=obj.url)
        try:
            await asyncio.to_thread(download.verify)
            await self._etags.verify(obj, partial.path)
        except OSError as exn:
            raise disk_error(exn, partial.path) from exn

    async def _fetch(self, download: "_Download", missing: list[int]) -> None:
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

    def _requests_for(self, download: "_Download", missing: list[int]) -> Iterator[range]:
        """Yield consecutive parts for one request each; single parts as soon as a reader waits."""
        count = self._parts_per_request(download, len(missing))
        left = dict.fromkeys(missing)
        while left:
            needed = download.needed_first(left) if download.obj.ranges else None
            parts = range(part := next(iter(left)) if needed is None else needed, part + 1)
            del left[part]
            maximum = 1 if download.obj.ranges and download.priority().waiting else count
            while parts.stop in left and len(parts) < maximum:
                del left[parts.stop]
                parts = range(parts.start, parts.stop + 1)
            yield parts

    def _parts_per_request(self, download: "_Download", missing: int) -> int:
        """Return how many parts a request may fetch: larger ones cost less, smaller ones reach more connections."""
        if not download.obj.ranges:
            return missing
        origin = self.scheduler.origin(store_of(download.obj.url))
        bytes_per_s = origin.link.connection_bytes_per_s
        if not download.obj.joinable or bytes_per_s is None:
            return 1
        connections = min(self._settings.shard_connections, self.scheduler.share(origin))
        in_time = int(_REQUEST_S * bytes_per_s / download.partial.part_bytes)
        return max(1, min(missing // connections, in_time, MAX_PARTS))

    async def _run(self, download: "_Download", parts: range) -> None:
        """Fetch consecutive parts with one request; after a failure, part by part."""
        claim = Claim(download.priority, store_of(download.obj.url))  # ranks after those of earlier parts
        count = len(parts)

        async def attempt() -> list[PartSums]:
            nonlocal count
            span = download.span(claim, parts.start, count)
            if download.obj.ranges:
                count = 1
            return await self._attempt(download, span)

        while parts:
            finished = await self._retry.call(download.obj.url, attempt)
            download.record(finished)
            parts = parts[len(finished) :]

    async def _attempt(self, download: "_Download", span: RequestSpan) -> list[PartSums]:
        while True:
            try:
                return await self._requests.fetch(span)
            except OriginUnavailableError:
                if not span.claim.paused:  # an origin may close a paused connection; that is not a failure
                    raise
            except PartFileError as exn:
                raise disk_error(exn.cause, download.partial.path) from exn.cause


@dataclass(slots=True)
class _Download:
    """One download: its parts, and their checksums in the algorithm of the origin's own checksum.

    A part is summed while it is written; only parts from an earlier run are read back. The file keeps the CRC32Cs.
    """

    origin: Origin
    partial: Partial
    priority: Callable[[], Priority]
    progress: Callable[[int], None]
    coming: Coming
    first: Callable[[], Sequence[tuple[int, int]]]
    done_bytes: int = 0
    _sums: dict[int, int] = field(default_factory=dict)

    @property
    def obj(self) -> RemoteObject:
        return self.partial.obj

    @property
    def algorithm(self) -> str | None:
        """Algorithm of the origin's checksum; None without a checksum, or if the algorithm is not supported."""
        wanted = self.obj.checksum
        return wanted.algorithm if wanted is not None and wanted.algorithm in ALGORITHMS else None

    def span(self, claim: Claim, first: int, count: int) -> RequestSpan:
        """Return consecutive parts as one request."""
        parts = replace(self.partial.parts(first, count), algorithm=self.algorithm)
        return RequestSpan(self.origin, self.obj, parts, claim, partial(self.coming.begin, first))

    def needed_first(self, left: Container[int]) -> int | None:
        """Return a part of those left that must be fetched before all others; None if there is none."""
        part_bytes = self.partial.part_bytes
        needed = (range(start // part_bytes, -(-stop // part_bytes)) for start, stop in self.first())
        return next((part for parts in needed for part in parts if part in left), None)

    def start(self, missing: Sequence[int]) -> None:
        """Count the bytes that are already on disk."""
        self.done_bytes = self.obj.size_bytes - sum(self.partial.parts(index, 1).size_bytes for index in missing)
        self.progress(self.done_bytes)

    def record(self, finished: list[PartSums]) -> None:
        """Record finished parts."""
        self.coming.end(finished[0].index)
        for sums in finished:
            self.partial.record(sums)
            self._sums[sums.index] = sums.checksum
            self.done_bytes += self.partial.parts(sums.index, 1).size_bytes
        self.progress(self.done_bytes)

    def verify(self) -> None:
        """Compare the whole object with the origin's checksum, if it has one. Blocks.

        Raises CorruptShardError; OSError if the file cannot be read.
        """
        algorithm, wanted = self.algorithm, self.obj.checksum
        if wanted is None or (algorithm is None and wanted.algorithm not in DIGESTS):
            return
        if algorithm is None:
            found = digest_of(self.partial.path, wanted.algorithm)
        else:
            parts = (
                self.partial.crcs() if algorithm == "crc32c" else self._with_earlier_parts(checksum_function(algorithm))
            )
            found = combined(algorithm, parts, self.partial.part_bytes, self.obj.size_bytes)
        wanted.check(found, self.obj.url)

    def _with_earlier_parts(self, checksum: Callable[[bytes, int], int]) -> list[int]:
        part_bytes = self.partial.part_bytes
        with open(self.partial.path, "rb", buffering=0) as file:
            return [
                self._sums[index]
                if index in self._sums
                else checksum(os.pread(file.fileno(), part_bytes, index * part_bytes), 0)
                for index in range(self.partial.count)
            ]
