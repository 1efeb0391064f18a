"""Patterns, prefixes and index files of users, resolved to lists of shards.

To resolve a pattern means to list the shards that it matches, if necessary by asking its origin. An
index file lists shards with their sample counts. A `Listing` is a list of shards with their names
in plans. A user knows a list if it was resolved here for the user, or if the user has sent it. The
user's readers can then name it by its fingerprint, a hash, in place of sending it. Readers'
sessions and `Cache` resolve patterns here; S3 clients' requests ask for single objects.
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
from shardcache.errors import ConfigError, NotFoundError, OriginUnavailableError, ProtocolError
from shardcache.fetch.download import Downloader
from shardcache.origin.objects import RemoteObject
from shardcache.origin.patterns.braces import expand_braces, in_braces
from shardcache.origin.patterns.expansion import expand, named_by_braces
from shardcache.origin.registry import Origins
from shardcache.redact import redact
from shardcache.shared.lists.shard_columns import Shards
from shardcache.shared.lists.shardlist import MAX_SHARDS
from shardcache.shared.protocol import ShardRef, Wanted
from shardcache.shared.urls.url_names import is_index
from shardcache.transport.between.flow import Received

log = structlog.get_logger()

_KIND = "shards"  # kind of these rows in the catalogue
# Time for which an index file is used again, as all ranks of a job ask within seconds of each
# other.
_INDEX_TTL_S = 2.0
_MAX_SENT_BYTES = 64 * 1024 * 1024  # maximum size of a list that a user sends, once inflated


Fingerprints = tuple[str, ...]
"""The fingerprints of one or more lists of shards, which are read one after another."""


@dataclass(slots=True)
class _ReusableListing:
    """A listing that may be used again.

    Attributes:
        listed_s: time at which the origins were asked for it, by the monotonic clock.
        listing: the listing.
        filled_after: the value of `History.changes` when sample counts were last looked up for it;
            -1 if they never were.
    """

    listed_s: float
    listing: Listing
    filled_after: int = -1


@dataclass(frozen=True, slots=True)
class ListingLimits:
    """Limits of age and memory of the lists that are kept.

    Attributes:
        ttl_s: time for which a listing is used again, in seconds.
        memory_bytes: maximum memory of the lists that are kept without being in any plan.
    """

    ttl_s: float
    memory_bytes: int


class Manifests:
    """Resolves patterns to lists of shards, and remembers lists.

    A listing is used again for a time, and for longer while its origin is unavailable. All shards
    in a list that is known to a user are shards that the user may request.
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
        # Lists that are known to users, least recently used first.
        self._known: dict[tuple[Peer, Fingerprints], Listing] = {}
        # The shards of index files that are in use, by url and version.
        self._indexes: WeakValueDictionary[tuple[str, str], Shards] = WeakValueDictionary()
        # Locks that are in use, by the texts that `_lock` was given.
        self._locks: WeakValueDictionary[tuple[str, ...], asyncio.Lock] = WeakValueDictionary()

    async def resolve(
        self,
        patterns: Sequence[str],
        peer: Peer,
        *,
        max_age_s: float = math.inf,
        wanted: Wanted = "samples",
    ) -> Listing:
        """Return the shards of every pattern, in order, with known sample counts.

        If files are wanted, they also have versions and sizes, unless their origin does not answer.
        Raises NotAllowedError, which comes before any request to an origin; NotFoundError if no
        shard matches; and the origins' errors.

        Args:
            patterns: the patterns.
            peer: the user.
            max_age_s: age in seconds of the oldest listing that may be used. A listing that is made
                while this request waits is always new enough.
            wanted: says which objects are meant, and whether they are read as shards, as files, or
                by ranges.
        """
        asked_s = time.monotonic()
        await asyncio.to_thread(self._check_patterns, patterns, peer)
        # Hundreds of workers start at the same moment. One of them resolves the patterns, and the
        # others wait for the lock, and then use its listing.
        async with self._lock(wanted, *patterns):
            listing = await self._current(patterns, peer, wanted, asked_s, max_age_s)
            # Keys of a bucket that are not possible urls can be listed, for users to see. But such
            # a list does not become known, so no plan can be made of it.
            may_have_other_keys = wanted in ("files", "entries")
            if may_have_other_keys and not await asyncio.to_thread(self._are_sound, listing, peer):
                return listing
            known = await self._admit(listing, peer)
            url = listing.shards.urls[0]
            self._origins.origin(url).expect(url)  # the origin prepares for further requests
            # Both lists have the same shards and counts. But if a user has sent the known one, then
            # its `remembered` leaves out the counts that come from this daemon's catalogue.
            if known.remembered != listing.remembered:
                return listing
            return known

    async def _current(
        self,
        patterns: Sequence[str],
        peer: Peer,
        wanted: Wanted,
        asked_s: float,
        max_age_s: float,
    ) -> Listing:
        """Return a listing that is new enough, with the sample counts that are known by now.

        Args:
            patterns: the patterns.
            peer: the user.
            wanted: says which objects are meant.
            asked_s: time of the request, by the monotonic clock.
            max_age_s: age of the oldest listing that may be used, at the time of the request.
        """
        key = (wanted, *patterns)
        self._forget_stale(asked_s)
        reusable = self._reusable.get(key)
        if reusable is None or reusable.listed_s < asked_s - max_age_s:
            listed_s = time.monotonic()
            reusable = _ReusableListing(listed_s, await self._list_all(patterns, wanted))
            self._reusable[key] = reusable

        # The listing of an index file has every count. Any other listing may lack some (-1). Those
        # are looked up again after the history has stored further counts.
        changes = self._history.changes
        previous = reusable.listing
        listing = previous
        has_new_counts = changes != reusable.filled_after
        if has_new_counts and -1 in previous.shards.samples:
            listing = await self._filled(previous)
        self._reusable[key] = _ReusableListing(reusable.listed_s, listing, changes)
        if listing is not previous:  # the user's list with fewer counts is no longer of use
            fingerprint = await _fingerprint(previous)
            self._known.pop((peer, (fingerprint,)), None)
        return listing

    async def admit(self, packed: bytes, peer: Peer) -> None:
        """Make a list that a user has sent known to this user.

        Raises ProtocolError if it is malformed, NotAllowedError if the user may not request one of
        the urls.

        Args:
            packed: the list, as `Shards.packed` has it.
            peer: the user.
        """
        # Lists of one user are unpacked one at a time, as each may be large.
        async with self._lock(str(peer.uid)):
            listing = await asyncio.to_thread(_unpacked, packed)
            await self._admit(listing, peer)

    def sending_lock(self, fingerprint: str, peer: Peer) -> asyncio.Lock:
        """Return the lock that a reader holds while it sends a list.

        Other readers of the same user wait for the lock, and need not send the list then.
        """
        return self._lock(str(peer.uid), fingerprint)

    async def known(
        self,
        fingerprints: Sequence[str],
        peer: Peer,
        wanted: Wanted = "samples",
    ) -> Listing | None:
        """Return the shards of lists that are known to a user, one list after another.

        None if one of the lists is unknown, or they are too large together.

        Args:
            fingerprints: fingerprints of the lists.
            peer: the user.
            wanted: says whether the shards are read as such, as files, or by ranges.
        """
        key = tuple(fingerprints)
        if (peer, key) in self._known:
            lock = self._lock(*key)  # one request at a time, as `read_as` may make a large copy
        else:
            # Lists have to be joined, or one is unknown. That is done for one request of a user at
            # a time, as the lists may be large.
            lock = self._lock(str(peer.uid))
        async with lock:
            listing = self._known.pop((peer, key), None)
            if listing is None:
                listing = await self._joined(key, peer)
            if listing is None:
                return None
            kept = self._keep(key, peer, listing)
            return await asyncio.to_thread(kept.read_as, wanted)

    async def stat(self, url: str) -> RemoteObject:
        """Return an object as its origin has it now.

        If the origin fails and the file is cached, return it as it is cached. Raises the origin's
        errors.
        """
        cached = await self._history.cached_file(url)
        if cached is None:
            return await self._downloader.stat_ahead(self._origins.origin(url), url)
        present = await self._revalidation.fetch_present(url)
        return cached if present is None else present

    def _lock(self, *key: str) -> asyncio.Lock:
        """Return the lock for a key of any texts; it exists as long as it is in use."""
        return self._locks.setdefault(key, asyncio.Lock())

    async def _joined(self, key: Fingerprints, peer: Peer) -> Listing | None:
        """Return several lists that are known to a user as one list.

        None if one of them is unknown, or they are too large together.
        """
        lists: list[Listing] = []
        for fingerprint in key:
            listing = self._known.get((peer, (fingerprint,)))
            if listing is None:
                return None
            lists.append(listing)
        if not lists or sum(each.memory_bytes for each in lists) > self._limits.memory_bytes:
            return None
        return await asyncio.to_thread(Listing.joined, lists)

    async def _admit(self, listing: Listing, peer: Peer) -> Listing:
        """Make a list known to a user.

        Returns the list, or one with the same shards that is known already. Raises NotAllowedError.
        """
        key = (await _fingerprint(listing),)
        # Permission for a pattern is not enough, as an index file may name any url.
        if (peer, key) not in self._known:
            await asyncio.to_thread(self._allow.check_all, listing.shards.urls, peer)
        known = self._known.pop((peer, key), listing)
        return self._keep(key, peer, known)

    def _keep(self, key: Fingerprints, peer: Peer, listing: Listing) -> Listing:
        """Make a list the most recently used one; forget the least recently used if necessary.

        Returns the list. If another user knows an equal list, that one is kept and returned in its
        place, to save memory.
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
        """Return the memory of all known lists, each once even if several users have it."""
        lists = set(self._known.values())
        return sum(each.memory_bytes for each in lists)

    def _check_patterns(self, patterns: Sequence[str], peer: Peer) -> None:
        """Raise NotAllowedError unless the user is allowed every pattern. Blocks."""
        for pattern in patterns:
            urls = [pattern]
            braced = in_braces(pattern)  # with braces in place of other spellings of them
            host_start = braced.find("://") + len("://")
            up_to_host = braced[: braced.find("/", host_start)]
            # A pattern with braces in its host expands to several hosts, each of which must be
            # allowed.
            if "{" in up_to_host:
                urls += expand_braces(pattern)
            self._allow.check_all(urls, peer)

    def _are_sound(self, listing: Listing, peer: Peer) -> bool:
        """Return whether all listed keys are urls.

        Raises NotAllowedError for a url not allowed to the user. Blocks.
        """
        sound = [url for url in listing.shards.urls if is_sound(url)]
        self._allow.check_all(sound, peer)
        return len(sound) == len(listing.shards)

    async def _list_all(self, patterns: Sequence[str], wanted: Wanted) -> Listing:
        """Return the shards of all patterns, listed afresh."""
        if wanted == "objects":
            objects = [await self._object(url) for url in patterns]
            return await asyncio.to_thread(lambda: Listing(Shards.of(objects)))
        lists: list[Shards] = []
        # One call in a thread handles all patterns, as there may be many. None stands for a pattern
        # that its origin has to be asked about.
        named = await asyncio.to_thread(lambda: [_named(pattern, wanted) for pattern in patterns])
        for pattern, shards in zip(patterns, named, strict=True):
            lists.append(shards or await self._list(pattern, wanted))
        if sum(map(len, lists)) > MAX_SHARDS:
            raise ConfigError(
                f"the patterns match more than {MAX_SHARDS:,} shards",
                remedy="write larger shards, or read the dataset in several parts",
            )
        if not any(lists):
            raise NotFoundError("no urls given", remedy="name at least one shard")

        joined = await asyncio.to_thread(Shards.joined, lists)
        if wanted == "files":
            joined = await self._with_versions(joined)
        for listing in self._known.values():
            # The shards of one index file that has not changed are the same object, by `_indexes`.
            if listing.shards is joined:
                return listing
        return await asyncio.to_thread(Listing, joined)

    async def _object(self, url: str) -> ShardRef:
        """Return an object; if there is none, return a ref without a version.

        Such a ref is for a url that may be a folder. Raises the origin's errors.
        """
        try:
            obj = await self.stat(url)
        except NotFoundError:
            # Only this error may lead to the search for a folder: after any other, an object that
            # exists would seem to be missing.
            if protocol_of(url) in WEB:  # web servers have no folders
                raise
            return ShardRef(url)
        return ShardRef(url, obj.version, obj.size_bytes)

    async def _with_versions(self, shards: Shards) -> Shards:
        """Return files with versions and sizes; their origins are asked for missing ones."""
        unknown = [ref.url for ref in shards if ref.version is None or ref.size_bytes is None]
        if not unknown:
            return shards
        objects = await self._downloader.stat_all(self.stat, unknown)
        return await asyncio.to_thread(
            lambda: Shards.of(_with_version(ref, objects.get(ref.url)) for ref in shards),
        )

    async def _filled(self, listing: Listing) -> Listing:
        """Return a list with the sample counts from the history filled in."""
        shards = await self._history.fill(listing.shards)
        added = listing.shards.samples.count(-1) - shards.samples.count(-1)
        if not added:
            return listing
        return Listing(shards, listing.names, listing.remembered + added)

    async def _list(self, pattern: str, wanted: Wanted) -> Shards:
        """Return the shards that a pattern matches.

        If the origin is unavailable, they are those of the last listing, from the catalogue.
        """

        def request(received: Received) -> Awaitable[Shards]:
            """Make one attempt, of which `Downloader.ask` makes several if necessary."""
            return expand(pattern, self._origins, received, self._indexes, wanted)

        row_key = [_KIND, pattern]
        if wanted != "samples":
            row_key.append(wanted)  # the pattern may match other objects than those with samples
        try:
            shards = await self._downloader.ask(pattern, request)
        except OriginUnavailableError as exn:
            last: Shards | None = None
            if not _is_secret(pattern):
                last = await self._history.catalogue.get(*row_key, parse=shards_of_row)
            if last is None:
                raise
            log.warning(
                "origin unavailable; using the last known listing",
                url=pattern,
                cause=exn.message,
            )
            return last
        packed = await asyncio.to_thread(_row_of, pattern, shards)
        if packed is not None:
            await self._history.catalogue.put(packed, *row_key)
        return shards

    def _forget_stale(self, now_s: float) -> None:
        """Forget listings that are too old, and the oldest listings if all take too much memory.

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


async def _fingerprint(listing: Listing) -> str:
    """Return the fingerprint of a list, which is computed in a thread if it is not known."""
    return await asyncio.to_thread(lambda: listing.shards.fingerprint)


def _unpacked(packed: bytes) -> Listing:
    """Return the list that a user has sent. Blocks. Raises ProtocolError."""
    return Listing(Shards.unpack(packed, _MAX_SENT_BYTES))


def _named(pattern: str, wanted: Wanted) -> Shards | None:
    """Return the shards that a pattern spells out; None if the origin has to be asked. Blocks."""
    if wanted == "entries":  # a listing of a folder's entries always asks the origin
        return None
    return named_by_braces(pattern)


def _with_version(ref: ShardRef, obj: RemoteObject | None) -> ShardRef:
    """Return a ref with the version and size of its object.

    Args:
        ref: the ref, which stays as it is if it names another version.
        obj: the object; None if its origin did not answer, which changes nothing.
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
    if _is_secret(pattern) or any(map(_is_secret, shards.urls)):
        return None
    return b64encode(shards.packed).decode()


def _is_secret(url: str) -> bool:
    """Return whether a url contains secrets, and so must not be stored."""
    return redact(url) != url
