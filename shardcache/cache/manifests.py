"""A user's patterns, prefixes and index files: resolved to lists of shards, and matched against cached urls."""

import asyncio
import math
import time
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import structlog

from shardcache.access import AllowList, Peer, canonical, is_glob, is_sound
from shardcache.cache.planner import History, Listing
from shardcache.errors import ConfigError, NotFoundError, OriginUnavailableError, ProtocolError
from shardcache.fetch.download import Downloader
from shardcache.origin.base import RemoteObject
from shardcache.origin.listing import expand, expand_braces, glob_regex, in_braces, named_by_braces
from shardcache.origin.registry import Origins
from shardcache.protocol import ShardRef, Wanted
from shardcache.redact import redact
from shardcache.shardlist import MAX_SHARDS
from shardcache.shards import Shards
from shardcache.transport.workers import Received
from shardcache.url_names import is_index

log = structlog.get_logger()

_KIND = "shards"  # of rows in the catalogue
_INDEX_TTL_S = 2.0  # all ranks of a job ask within seconds of each other
_MAX_SENT_BYTES = 64 * 1024 * 1024  # of a list that a user sends, inflated


@dataclass(slots=True, eq=False, repr=False)
class Manifests:
    """Resolves patterns; reuses a listing for a time, and beyond that while the origin is unavailable.

    The lists that a user was given or has sent, of shards that this user may have fetched, are known by fingerprint.
    """

    _origins: Origins
    _downloader: Downloader
    _history: History
    _allow: AllowList
    _ttl_s: float
    _memory_bytes: int  # limit of the lists that are kept without being in any plan
    _listed: dict[tuple[str, ...], tuple[float, Listing, int]] = field(default_factory=dict, init=False)
    _known: dict[tuple[Peer, tuple[str, ...]], Listing] = field(default_factory=dict, init=False)  # the latest last
    _indexes: WeakValueDictionary[tuple[str, str], Shards] = field(default_factory=WeakValueDictionary, init=False)
    _locks: WeakValueDictionary[tuple[str, ...], asyncio.Lock] = field(default_factory=WeakValueDictionary, init=False)

    async def resolve(
        self,
        patterns: Sequence[str],
        peer: Peer,
        *,
        max_age_s: float = math.inf,
        wanted: Wanted = "samples",
    ) -> Listing:
        """Return the shards of every pattern, in order, with known sample counts; listings older than `max_age_s` are
        not used. Those made while this request waits are new enough.

        Of files that are `wanted`, versions and sizes are known, too, unless the origin does not answer. Raises
        NotAllowedError before any request to an origin, NotFoundError if no shard matches, and origins' errors.
        """
        key, asked_s = (wanted, *patterns), time.monotonic()
        await asyncio.to_thread(self._check_patterns, patterns, peer)
        async with self._locks.setdefault(key, asyncio.Lock()):  # hundreds of workers start at the same moment
            self._forget(asked_s)
            if key not in self._listed or self._listed[key][0] < asked_s - max_age_s:
                self._listed[key] = time.monotonic(), await self._list_all(patterns, wanted), -1
            listed_s, old, filled_after = self._listed[key]
            changes = self._history.changes  # an index file gives every count; others are looked up when one is new
            listing = await self._filled(old) if changes != filled_after and -1 in old.shards.samples else old
            self._listed[key] = listed_s, listing, changes
            if listing is not old:
                self._known.pop((peer, (await asyncio.to_thread(lambda: old.shards.fingerprint),)), None)
            if wanted in ("files", "entries") and not await asyncio.to_thread(self._are_sound, listing, peer):
                return listing  # for the user to see; a plan that has one of its odd keys is refused
            known = await self._admit(listing, peer)
            self._origins.origin(url := listing.shards.urls[0]).expect(url)
            return known if known.remembered == listing.remembered else listing  # a user may have sent the same counts

    async def admit(self, packed: bytes, peer: Peer) -> None:
        """Make a user's own list known. Raises ProtocolError, NotAllowedError."""
        async with self._locks.setdefault((str(peer.uid),), asyncio.Lock()):  # a user's by turns: each may be large
            await self._admit(await asyncio.to_thread(lambda: Listing(Shards.unpack(packed, _MAX_SENT_BYTES))), peer)

    def turn(self, fingerprint: str, peer: Peer) -> asyncio.Lock:
        """Return what a reader holds while it sends a list."""
        return self._locks.setdefault((str(peer.uid), fingerprint), asyncio.Lock())

    async def known(self, fingerprints: Sequence[str], peer: Peer, wanted: Wanted = "samples") -> Listing | None:
        """Return the shards of lists that this user was given or has sent; None if one is unknown or all too large."""
        key = tuple(fingerprints)
        async with self._locks.setdefault(key if (peer, key) in self._known else (str(peer.uid),), asyncio.Lock()):
            found = self._known.pop((peer, key), None)
            if found is None:
                lists = [self._known[peer, (each,)] for each in key if (peer, (each,)) in self._known]
                if not 0 < len(key) == len(lists) or sum(each.memory_bytes for each in lists) > self._memory_bytes:
                    return None
                found = await asyncio.to_thread(Listing.joined, lists)
            return await asyncio.to_thread(self._keep(key, peer, found).wanting, wanted)

    async def _admit(self, listing: Listing, peer: Peer) -> Listing:
        key = (await asyncio.to_thread(lambda: listing.shards.fingerprint),)
        if (peer, key) not in self._known:
            await asyncio.to_thread(self._allow.check_all, listing.shards.urls, peer)  # an index file may name any url
        return self._keep(key, peer, self._known.pop((peer, key), listing))

    def _keep(self, key: tuple[str, ...], peer: Peer, listing: Listing) -> Listing:
        """Note the latest use of a list, which users share; forget those that were not used for longest."""
        listing = self._known[peer, key] = next((each for (_, k), each in self._known.items() if k == key), listing)
        excess_bytes = sum(each.memory_bytes for each in set(self._known.values())) - self._memory_bytes
        while excess_bytes > 0 and len(self._known) > 1:
            excess_bytes -= self._known.pop(next(iter(self._known))).memory_bytes
        return listing

    def _check_patterns(self, patterns: Sequence[str], peer: Peer) -> None:
        """Raise NotAllowedError unless the user is allowed every pattern. Blocks."""
        for pattern in patterns:
            braced = in_braces(pattern)
            head = braced[: braced.find("/", braced.find("://") + 3)]
            # A brace before the path expands to several hosts: each of them must be allowed.
            self._allow.check_all([pattern, *expand_braces(pattern)] if "{" in head else [pattern], peer)

    def _are_sound(self, listing: Listing, peer: Peer) -> bool:
        """Return whether all listed keys are urls. Raises NotAllowedError for a url not allowed to the user. Blocks."""
        sound = [url for url in listing.shards.urls if is_sound(url)]
        self._allow.check_all(sound, peer)
        return len(sound) == len(listing.shards)

    async def _list_all(self, patterns: Sequence[str], wanted: Wanted) -> Listing:
        named = await asyncio.to_thread(lambda: [_named(pattern, wanted) for pattern in patterns])
        lists = [each or await self._list(pattern, wanted) for pattern, each in zip(patterns, named, strict=True)]
        if sum(map(len, lists)) > MAX_SHARDS:
            remedy = "write larger shards, or read the dataset in several parts"
            raise ConfigError(f"the patterns match more than {MAX_SHARDS:,} shards", remedy=remedy)
        if not any(lists):
            raise NotFoundError("no urls given", remedy="name at least one shard")
        shards = await asyncio.to_thread(Shards.joined, lists)
        if wanted in ("files", "objects") and (
            unknown := [ref.url for ref in shards if None in (ref.version, ref.size_bytes)]
        ):
            found = await self._downloader.stat_all(self._origins.origin, unknown)
            shards = await asyncio.to_thread(lambda: Shards.of(_stated(ref, found.get(ref.url)) for ref in shards))
        known = next((each for each in self._known.values() if each.shards is shards), None)
        return await asyncio.to_thread(Listing, shards) if known is None else known

    async def _filled(self, listing: Listing) -> Listing:
        shards = await self._history.fill(listing.shards)
        more = listing.shards.samples.count(-1) - shards.samples.count(-1)
        return Listing(shards, listing.names, listing.remembered + more) if more else listing

    async def _list(self, pattern: str, wanted: Wanted) -> Shards:
        def request(received: Received) -> Awaitable[Shards]:
            return expand(pattern, self._origins, received, self._indexes, wanted)

        row = (_KIND, pattern) if wanted == "samples" else (_KIND, pattern, wanted)
        try:
            shards = await self._downloader.ask(pattern, request)
        except OriginUnavailableError as exn:
            known: Shards | None = None
            if not _is_secret(pattern):
                known = await self._history.catalogue.get(*row, parse=listing_of)
            if known is None:
                raise
            log.warning("origin unavailable; using the last known listing", url=pattern, cause=exn.message)
            return known
        packed = await asyncio.to_thread(_row_of, pattern, shards)
        if packed is not None:
            await self._history.catalogue.put(packed, *row)
        return shards

    def _forget(self, now_s: float) -> None:
        """Forget stale listings, and the oldest while they take too much memory."""
        total_bytes = 0
        for key, (listed_s, listing, _) in reversed(list(self._listed.items())):
            # An index file costs one request, and may just have been updated for the job that asks.
            ttl_s = min(self._ttl_s, _INDEX_TTL_S) if any(map(is_index, key)) else self._ttl_s
            total_bytes += listing.memory_bytes
            if now_s - listed_s >= ttl_s or total_bytes > self._memory_bytes:
                del self._listed[key]


def _named(pattern: str, wanted: Wanted) -> Shards | None:
    """Return what a pattern names without a request to the origin, None if the origin has to be asked. Blocks."""
    if wanted == "objects":
        return Shards.of([ShardRef(pattern)])
    return None if wanted == "entries" else named_by_braces(pattern)


def _stated(ref: ShardRef, obj: RemoteObject | None) -> ShardRef:
    if obj is None or ref.version not in (None, obj.version):
        return ref
    return ref._replace(version=obj.version, size_bytes=obj.size_bytes)


def matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return a predicate: does a redacted url match any of the patterns, by the rules of `expand`?

    Blocks: a brace pattern may expand to millions of urls. Raises ConfigError.
    """
    expanded = (text for pattern in patterns for text in expand_braces(redact(pattern)))
    texts = list(map(canonical, expanded))
    prefixes = tuple(text for text in texts if text.endswith("/") and not is_glob(text))
    globs = [glob_regex(text) for text in texts if is_glob(text)]
    urls = frozenset(texts)  # a url may have the characters of a glob in its name

    def matches(url: str) -> bool:
        place = canonical(url)
        return place in urls or place.startswith(prefixes) or any(glob.fullmatch(place) for glob in globs)

    return matches


def listing_of(row: object) -> Shards:
    """Return the listing in a row of the catalogue. Blocks. Raises ValueError for any other value."""
    try:
        match row:
            case str(text):
                return Shards.unpack(b64decode(text, validate=True))
    except ProtocolError as exn:
        raise ValueError(exn.message) from exn
    raise ValueError("the row is not a listing")


def _row_of(pattern: str, shards: Shards) -> str | None:
    """Return a listing for the catalogue; None if a url is secret. Blocks."""
    if _is_secret(pattern) or any(map(_is_secret, shards.urls)):
        return None
    return b64encode(shards.packed).decode()


def _is_secret(url: str) -> bool:
    """Return whether a url contains secrets, and so must not be stored."""
    return redact(url) != url
