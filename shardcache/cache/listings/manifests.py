"""Patterns, prefixes and index files of users, resolved to listings of shards.

To resolve a pattern means to list the shards that it matches, if necessary by asking its origin. An
index file lists shards with their sample counts. A `Listing` has shards and their names in plans.

A listing is known to a user if it was resolved here for the user, or if the user has sent it. The
user's readers can then name it by its fingerprint, a hash of its shards, instead of sending it.
"""

import asyncio
import math
import time
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import structlog

from shardcache.access.deceptive import is_sound
from shardcache.access.protocols import WEB
from shardcache.access.rules import AllowList, Peer
from shardcache.access.urls import protocol_of
from shardcache.cache.listings.shard_listing import Listing
from shardcache.cache.versions.history import History
from shardcache.cache.versions.revalidation import Revalidation
from shardcache.fetch.download import Downloader
from shardcache.origin.objects import RemoteObject
from shardcache.origin.patterns.braces import expand_braces, with_braces
from shardcache.origin.patterns.expansion import expand, named_by_braces
from shardcache.origin.registry import Origins
from shardcache.shared.exceptions import (
    ConfigError,
    NotFoundError,
    OriginUnavailableError,
    ProtocolError,
)
from shardcache.shared.lists.shard_columns import Shards
from shardcache.shared.lists.shardlist import MAX_SHARDS
from shardcache.shared.protocol import ShardRef, Wanted
from shardcache.shared.urls.url_names import is_index
from shardcache.shared.wording.redact import redact
from shardcache.transport.between.flow import Received

log = structlog.get_logger()

_ROW_KIND = "shards"  # kind of the catalogue's rows that hold listings
# Time for which an index file is used again: all ranks of a job ask within seconds of each other.
_INDEX_TTL_S = 2.0
_MAX_SENT_BYTES = 64 * 1024 * 1024  # maximum size of a listing that a user sends, decompressed
_UNKNOWN = -1  # the sample count of a shard whose samples have not been counted

Fingerprints = tuple[str, ...]
"""The fingerprints of one or more listings, whose shards are read one after another."""


@dataclass(slots=True)
class _ReusableListing:
    """A listing that may be used again.

    Attributes:
        listed_s: time at which the origins were asked for it, by the monotonic clock.
        listing: the listing.
        counted_after: the value of `History.changes` when sample counts were last looked up for the
            listing; None if they never were.
    """

    listed_s: float
    listing: Listing
    counted_after: int | None = None


@dataclass(frozen=True, slots=True)
class ListingLimits:
    """Limits of age and memory of listings.

    Attributes:
        ttl_s: time for which a listing is used again, in seconds.
        memory_bytes: maximum memory of the reusable listings, and of the known listings.
    """

    ttl_s: float
    memory_bytes: int


class Manifests:
    """Resolves patterns to listings of shards, and remembers listings.

    A listing is used again for a time, and for longer while its origin is unavailable. If a listing
    is known to a user, the user may request all of its shards.
    """

    def __init__(
        self,
        origins: Origins,
        downloader: Downloader,
        history: History,
        revalidation: Revalidation,
        allow: AllowList,
        limits: ListingLimits,
    ) -> None:
        self._origins = origins
        self._downloader = downloader
        self._history = history
        self._revalidation = revalidation
        self._allow = allow
        self._limits = limits
        # Listings that may be used again. The key is `wanted`, followed by the patterns.
        self._reusable: dict[tuple[str, ...], _ReusableListing] = {}
        # Listings that are known to users, least recently used first.
        self._known: dict[tuple[Peer, Fingerprints], Listing] = {}
        # The shards of index files that are in use, by the file's url and version.
        self._indexes: WeakValueDictionary[tuple[str, str], Shards] = WeakValueDictionary()
        # Locks that are in use, by the key that `_lock` was given.
        self._locks: WeakValueDictionary[tuple[str, ...], asyncio.Lock] = WeakValueDictionary()

    async def resolve(
        self,
        patterns: Sequence[str],
        peer: Peer,
        *,
        max_age_s: float = math.inf,
        wanted: Wanted = "samples",
    ) -> Listing:
        """Return the shards of every pattern, in order, with the sample counts that are known.

        If files are wanted, they also have versions and sizes, unless their origin does not answer.
        Raises NotAllowedError before any request to an origin; NotFoundError if no shard matches;
        and the origins' errors.

        Args:
            patterns: the patterns.
            peer: the user.
            max_age_s: age in seconds of the oldest listing that may be used. A listing that is made
                while this request waits is always new enough.
            wanted: says which objects are listed, and how they are read; see `shard_listing`.
        """
        asked_s = time.monotonic()
        await asyncio.to_thread(self._check_patterns, patterns, peer)
        # Hundreds of workers start at the same moment. One of them resolves the patterns, and the
        # others wait for the lock, and then use its listing.
        async with self._lock(wanted, *patterns):
            listing = await self._current(patterns, peer, wanted, asked_s, max_age_s)
            # A bucket may have keys that are not possible urls. They are listed, for users to see,
            # but the listing does not become known, so that it does not get into a plan.
            if wanted in ("files", "entries"):
                has_only_urls = await asyncio.to_thread(self._has_only_urls, listing, peer)
                if not has_only_urls:
                    return listing
            known = await self._make_known(listing, peer)
            url = listing.shards.urls[0]
            self._origins.origin(url).start_preparing(url)
            # The known listing has the same shards and counts. But if a user has sent it, its
            # `remembered_counts` leaves out the counts that come from this daemon's catalogue.
            if known.remembered_counts != listing.remembered_counts:
                return listing
            return known

    def _check_patterns(self, patterns: Sequence[str], peer: Peer) -> None:
        """Raise NotAllowedError unless the user is allowed every pattern. Blocks."""
        for pattern in patterns:
            urls = [pattern]
            braced = with_braces(pattern)  # with braces in place of other spellings of them
            host_start = braced.find("://") + len("://")
            host_end = braced.find("/", host_start)
            # Braces in the host expand to several hosts, each of which must be allowed.
            if "{" in braced[:host_end]:
                urls += expand_braces(pattern)
            self._allow.check_all(urls, peer)

    def _has_only_urls(self, listing: Listing, peer: Peer) -> bool:
        """Return True if all listed keys are possible urls. Blocks.

        Raises NotAllowedError for a url that the user may not request.
        """
        possible_urls = [url for url in listing.shards.urls if is_sound(url)]
        self._allow.check_all(possible_urls, peer)
        return len(possible_urls) == len(listing.shards)

    async def _current(
        self,
        patterns: Sequence[str],
        peer: Peer,
        wanted: Wanted,
        asked_s: float,
        max_age_s: float,
    ) -> Listing:
        """Return a listing that is new enough, with the sample counts that are known by now.

        The arguments are those of `resolve`, and the time of the request by the monotonic clock.
        """
        key = (wanted, *patterns)
        self._forget_stale(asked_s)
        reusable = self._reusable.get(key)
        if reusable is None or reusable.listed_s < asked_s - max_age_s:
            listed_s = time.monotonic()
            listing = await self._list_all(patterns, wanted)
            reusable = _ReusableListing(listed_s, listing)
            self._reusable[key] = reusable

        # The listing of an index file has every count. Any other listing may lack some. These are
        # looked up again after the history has stored further counts.
        changes = self._history.changes
        has_new_counts = changes != reusable.counted_after
        previous = reusable.listing
        listing = previous
        if has_new_counts and _UNKNOWN in previous.shards.samples:
            listing = await self._with_counts(previous)
        self._reusable[key] = _ReusableListing(reusable.listed_s, listing, changes)
        # With other counts, the listing has another fingerprint, and replaces the previous one.
        if listing is not previous:
            fingerprint = await _fingerprint(previous)
            self._known.pop((peer, (fingerprint,)), None)
        return listing

    async def _with_counts(self, listing: Listing) -> Listing:
        """Return a listing with the sample counts that the history has for its shards."""
        shards = await self._history.fill(listing.shards)
        added = listing.shards.samples.count(_UNKNOWN) - shards.samples.count(_UNKNOWN)
        if not added:
            return listing
        return Listing(shards, listing.names, listing.remembered_counts + added)

    def _forget_stale(self, now_s: float) -> None:
        """Forget reusable listings that are too old, and the oldest if they take too much memory.

        Args:
            now_s: the present time, by the monotonic clock.
        """
        newest_first = reversed(list(self._reusable.items()))
        total_bytes = 0  # memory of a listing and all newer ones
        for key, reusable in newest_first:
            ttl_s = self._limits.ttl_s
            if any(map(is_index, key)):
                # Reading an index file again takes only one request, and the file may just have
                # been updated for the job that asks.
                ttl_s = min(ttl_s, _INDEX_TTL_S)
            total_bytes += reusable.listing.memory_bytes
            if now_s - reusable.listed_s >= ttl_s or total_bytes > self._limits.memory_bytes:
                del self._reusable[key]

    # Listing of shards by their origins

    async def _list_all(self, patterns: Sequence[str], wanted: Wanted) -> Listing:
        """Return the shards of all patterns as their origins have them now."""
        if wanted == "objects":
            objects = [await self._object(url) for url in patterns]
            return await asyncio.to_thread(lambda: Listing(Shards.of(objects)))
        # One call in a thread handles all patterns, since there may be many. None stands for a
        # pattern that its origin has to be asked about.
        named = await asyncio.to_thread(lambda: [_named(pattern, wanted) for pattern in patterns])
        shards_by_pattern: list[Shards] = []
        for pattern, shards in zip(patterns, named, strict=True):
            shards_by_pattern.append(shards or await self._list(pattern, wanted))
        if sum(map(len, shards_by_pattern)) > MAX_SHARDS:
            raise ConfigError(
                f"the patterns match more than {MAX_SHARDS:,} shards",
                remedy="write larger shards, or read the dataset in several parts",
            )
        if not any(shards_by_pattern):
            raise NotFoundError("no urls given", remedy="name at least one shard")

        joined = await asyncio.to_thread(Shards.joined, shards_by_pattern)
        if wanted == "files":
            joined = await self._with_versions(joined)
        # The shards of an index file that has not changed are the same object, due to `_indexes`.
        for listing in self._known.values():
            if listing.shards is joined:
                return listing
        return await asyncio.to_thread(Listing, joined)

    async def _object(self, url: str) -> ShardRef:
        """Return an object; a ref without a version if there is none, but perhaps a folder.

        Raises the origin's errors.
        """
        try:
            obj = await self.stat(url)
        except NotFoundError:
            # The caller searches for a folder only after this error: after any other one, an object
            # that exists would seem to be missing.
            if protocol_of(url) in WEB:  # web servers have no folders
                raise
            return ShardRef(url)
        return ShardRef(url, obj.version, obj.size_bytes)

    async def stat(self, url: str) -> RemoteObject:
        """Return an object as its origin has it now, or as it is cached if the origin fails.

        Raises the origin's errors.
        """
        cached = await self._history.cached_file(url)
        if cached is None:
            return await self._downloader.stat_ahead(self._origins.origin(url), url)
        current = await self._revalidation.fetch_present(url)
        return cached if current is None else current

    async def _with_versions(self, shards: Shards) -> Shards:
        """Return files with versions and sizes; origins are asked for those that are missing."""
        incomplete = [ref.url for ref in shards if ref.version is None or ref.size_bytes is None]
        if not incomplete:
            return shards
        objects = await self._downloader.stat_all(self.stat, incomplete)
        return await asyncio.to_thread(
            lambda: Shards.of(_with_version(ref, objects.get(ref.url)) for ref in shards),
        )

    async def _list(self, pattern: str, wanted: Wanted) -> Shards:
        """Return the shards that a pattern matches.

        If the origin is unavailable, they are those of the last listing, from the catalogue.
        """

        def request(received: Received) -> Awaitable[Shards]:
            """Ask the origin once; `Downloader.ask` repeats this if necessary."""
            return expand(pattern, self._origins, received, self._indexes, wanted)

        row_key = [_ROW_KIND, pattern]
        if wanted != "samples":
            row_key.append(wanted)  # the pattern may match other objects than those with samples
        try:
            shards = await self._downloader.ask(pattern, request)
        except OriginUnavailableError as exn:
            last: Shards | None = None
            if not _has_secrets(pattern):
                last = await self._history.catalogue.get(*row_key, parse=shards_of_row)
            if last is None:
                raise
            log.warning(
                "origin unavailable; using the last known listing",
                url=pattern,
                cause=exn.message,
            )
            return last
        row = await asyncio.to_thread(_row_of, pattern, shards)
        if row is not None:
            await self._history.catalogue.put(row, *row_key)
        return shards

    # Listings that are known to users

    async def admit(self, packed: bytes, peer: Peer) -> None:
        """Make a listing that a user has sent known to this user.

        Raises ProtocolError if it is malformed, NotAllowedError if the user may not request one of
        the urls.

        Args:
            packed: the listing's shards, as `Shards.packed` has them.
            peer: the user.
        """
        # Listings of one user are unpacked one at a time, since each may be large.
        async with self._lock(str(peer.uid)):
            listing = await asyncio.to_thread(_unpacked, packed)
            await self._make_known(listing, peer)

    def sending_lock(self, fingerprint: str, peer: Peer) -> asyncio.Lock:
        """Return the lock that a reader holds while it sends a listing.

        Other readers of the same user wait for the lock. Then the listing is known, and they need
        not send it.
        """
        return self._lock(str(peer.uid), fingerprint)

    async def known(
        self,
        fingerprints: Sequence[str],
        peer: Peer,
        wanted: Wanted = "samples",
    ) -> Listing | None:
        """Return the shards of listings that are known to a user, one listing after another.

        Returns None if one of the listings is unknown, or they are too large together.

        Args:
            fingerprints: fingerprints of the listings.
            peer: the user.
            wanted: says how the objects are read; see `shard_listing`.
        """
        key = tuple(fingerprints)
        # One request at a time, since the copies that are made here may be large: by `read_as` for
        # listings that are known together, and by `_joined` for any others.
        are_known_together = (peer, key) in self._known
        lock = self._lock(*key) if are_known_together else self._lock(str(peer.uid))
        async with lock:
            listing = self._known.pop((peer, key), None)
            if listing is None:
                listing = await self._joined(key, peer)
            if listing is None:
                return None
            kept = self._keep(key, peer, listing)
            return await asyncio.to_thread(kept.read_as, wanted)

    async def _joined(self, key: Fingerprints, peer: Peer) -> Listing | None:
        """Return several listings that are known to a user as one listing.

        Returns None if one of them is unknown, or they are too large together.
        """
        listings: list[Listing] = []
        for fingerprint in key:
            listing = self._known.get((peer, (fingerprint,)))
            if listing is None:
                return None
            listings.append(listing)
        total_bytes = sum(listing.memory_bytes for listing in listings)
        if not listings or total_bytes > self._limits.memory_bytes:
            return None
        return await asyncio.to_thread(Listing.joined, listings)

    async def _make_known(self, listing: Listing, peer: Peer) -> Listing:
        """Make a listing known to a user. Raises NotAllowedError.

        Returns the listing, or one with the same shards that is known already.
        """
        key = (await _fingerprint(listing),)
        # Permission for a pattern is not enough, since an index file may name any url.
        if (peer, key) not in self._known:
            await asyncio.to_thread(self._allow.check_all, listing.shards.urls, peer)
        known = self._known.pop((peer, key), listing)
        return self._keep(key, peer, known)

    def _keep(self, key: Fingerprints, peer: Peer, listing: Listing) -> Listing:
        """Make a listing the most recently used; forget the least recently used if necessary.

        Returns the listing. If another user knows an equal listing, that one is kept and returned
        instead, to save memory.
        """
        for (_, other_key), other in self._known.items():
            if other_key == key:
                listing = other
                break
        self._known[peer, key] = listing

        while len(self._known) > 1 and self._known_bytes() > self._limits.memory_bytes:
            oldest = next(iter(self._known))
            del self._known[oldest]
        return listing

    def _known_bytes(self) -> int:
        """Return the memory of all known listings, each once even if several users know it."""
        listings = set(self._known.values())
        return sum(listing.memory_bytes for listing in listings)

    def _lock(self, *key: str) -> asyncio.Lock:
        """Return the lock of a key, which exists as long as it is in use."""
        return self._locks.setdefault(key, asyncio.Lock())


async def _fingerprint(listing: Listing) -> str:
    """Return the fingerprint of a listing. A thread computes it, since the listing may be large."""
    return await asyncio.to_thread(lambda: listing.shards.fingerprint)


def _unpacked(packed: bytes) -> Listing:
    """Return the listing that a user has sent. Blocks. Raises ProtocolError."""
    return Listing(Shards.unpack(packed, _MAX_SENT_BYTES))


def _named(pattern: str, wanted: Wanted) -> Shards | None:
    """Return the shards that a pattern spells out; None if the origin has to be asked. Blocks."""
    if wanted == "entries":  # only the origin knows the entries of a folder
        return None
    return named_by_braces(pattern)


def _with_version(ref: ShardRef, obj: RemoteObject | None) -> ShardRef:
    """Return a ref with the version and size of its object.

    Args:
        ref: the ref, which is returned unchanged if it states another version.
        obj: the object; None to return the ref unchanged, since its origin did not answer.
    """
    if obj is None or ref.version not in (None, obj.version):
        return ref
    return ref._replace(version=obj.version, size_bytes=obj.size_bytes)


def shards_of_row(row: object) -> Shards:
    """Return the shards in a row of the catalogue. Blocks.

    Raises ValueError for any other value.
    """
    if isinstance(row, str):
        try:
            return Shards.unpack(b64decode(row, validate=True))
        except ProtocolError as exn:
            raise ValueError(exn.message) from exn
    raise ValueError("the row is not a listing")


def _row_of(pattern: str, shards: Shards) -> str | None:
    """Return shards as a row for the catalogue; None if a url contains secrets. Blocks."""
    if _has_secrets(pattern) or any(map(_has_secrets, shards.urls)):
        return None
    return b64encode(shards.packed).decode()


def _has_secrets(url: str) -> bool:
    """Return True if a url contains secrets, so that it must not be stored."""
    return redact(url) != url
