"""A user's patterns, prefixes and index files: resolved to lists of shards, and matched against cached urls."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

import structlog

from shardcache.access import INDEX_SUFFIX, AllowList, Peer, is_glob
from shardcache.cache.planner import History
from shardcache.cache.waits import Turns
from shardcache.errors import ConfigError, NotFoundError, OriginUnavailableError
from shardcache.fetch.download import Downloader
from shardcache.origin.listing import asks_store, expand, expand_braces, glob_regex
from shardcache.origin.registry import Origins
from shardcache.protocol import ShardRef
from shardcache.redact import redact
from shardcache.shardlist import MAX_SHARDS

log = structlog.get_logger()

_KIND = "listing"

# Sample counts are looked up for this many shards at a time: larger batches would block the event loop.
_FILLED = 1_000

# All ranks of a job ask within seconds of each other.
_INDEX_TTL_S = 2.0


@dataclass(frozen=True, slots=True)
class Resolved:
    """The shards that a list of patterns matches, in the order of the patterns."""

    refs: list[ShardRef]
    remembered: int  # sample counts that come from this daemon's own catalogue; other nodes may lack them


@dataclass(slots=True, eq=False, repr=False)
class Manifests:
    """Resolves patterns; reuses a listing for a time, and beyond that while the origin is unavailable."""

    _origins: Origins
    _downloader: Downloader
    _history: History
    _allow: AllowList
    _turns: Turns
    _ttl_s: float
    _listed: dict[str, tuple[float, list[ShardRef]]] = field(default_factory=dict, init=False)
    _locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary, init=False)

    async def resolve(self, patterns: Sequence[str], peer: Peer, *, fresh: bool = False) -> Resolved:
        """Return the shards of every pattern, in order, with known sample counts; `fresh` ignores remembered listings.

        Raises NotAllowedError before any request to an origin, NotFoundError if no shard matches, and origins' errors.
        """
        await asyncio.to_thread(self._check_patterns, patterns, peer)
        for pattern in patterns if fresh else ():
            self._listed.pop(pattern, None)
        refs: list[ShardRef] = []
        for pattern in patterns:
            refs += await self._resolve(pattern)
            if len(refs) > MAX_SHARDS:
                raise ConfigError(
                    f"the patterns match more than {MAX_SHARDS:,} shards",
                    remedy="write larger shards, or read the dataset in several parts",
                )
        if not refs:
            raise NotFoundError("no urls given", remedy="name at least one shard")
        await self.check_allowed(refs, peer)  # an index file may name any url
        filled, remembered = [], 0
        for first in range(0, len(refs), _FILLED):
            piece = refs[first : first + _FILLED]
            filled += await self._history.fill(piece)
            remembered += _counted(filled[first:]) - _counted(piece)
        return Resolved(filled, remembered)

    async def check_allowed(self, refs: Sequence[ShardRef], peer: Peer) -> None:
        """Raise NotAllowedError unless the user is allowed to have all of these shards fetched."""
        await self._turns.take(refs, lambda some: self._allow.check_all((ref.url for ref in some), peer))

    def _check_patterns(self, patterns: Sequence[str], peer: Peer) -> None:
        """Raise NotAllowedError unless the user is allowed every pattern. Blocks."""
        for pattern in patterns:
            head = pattern[: pattern.find("/", pattern.find("://") + 3)]
            # A brace before the path expands to several hosts: each of them must be allowed.
            self._allow.check_all([pattern, *expand_braces(pattern)] if "{" in head else [pattern], peer)

    async def _resolve(self, pattern: str) -> list[ShardRef]:
        lock = self._locks.setdefault(pattern, asyncio.Lock())
        async with lock:  # hundreds of workers start at the same moment; only one lists
            self._forget()
            if pattern not in self._listed:
                refs = await self._list(pattern)
                self._listed[pattern] = (time.monotonic(), refs)
                self._forget()
                return refs
            return self._listed[pattern][1]

    async def _list(self, pattern: str) -> list[ShardRef]:
        try:
            refs = await self._downloader.ask(pattern, lambda received: expand(pattern, self._origins, received))
        except OriginUnavailableError as exn:
            rows = None if _is_secret(pattern) else await self._history.catalogue.get(_KIND, pattern)
            if rows is None:
                raise
            log.warning("origin unavailable; using the last known listing", url=pattern, cause=exn.message)
            return await asyncio.to_thread(_read_rows, rows)
        rows = await asyncio.to_thread(_rows, pattern, refs)
        if rows is not None:
            await self._history.catalogue.put(rows, _KIND, pattern)
        return refs

    def _forget(self) -> None:
        """Forget stale listings, and the oldest while their total exceeds twice the limit for one manifest."""
        now_s, index_ttl_s = time.monotonic(), min(self._ttl_s, _INDEX_TTL_S)
        for pattern, (listed_s, _) in list(self._listed.items()):
            # An index file costs one request, and may just have been updated for the job that asks.
            if now_s - listed_s >= (index_ttl_s if pattern.endswith(INDEX_SUFFIX) else self._ttl_s):
                del self._listed[pattern]
        total = sum(len(refs) for _, refs in self._listed.values())
        while total > 2 * MAX_SHARDS:
            total -= len(self._listed.pop(next(iter(self._listed)))[1])


def matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return a predicate: does a redacted url match any of the patterns, by the rules of `expand`?

    Blocks: a brace pattern may expand to millions of urls. Raises ConfigError.
    """
    texts = [text for pattern in patterns for text in expand_braces(redact(pattern))]
    prefixes = tuple(text for text in texts if text.endswith("/") and not is_glob(text))
    globs = [glob_regex(text) for text in texts if is_glob(text)]
    urls = frozenset(text for text in texts if not is_glob(text))
    return lambda url: url in urls or url.startswith(prefixes) or any(glob.fullmatch(url) for glob in globs)


def _counted(refs: list[ShardRef]) -> int:
    return sum(ref.samples is not None for ref in refs)


def _rows(pattern: str, refs: list[ShardRef]) -> str | None:
    """Return a listing for the catalogue; None if the origin was not asked or a url is secret. Blocks."""
    if not asks_store(pattern) or _is_secret(pattern) or any(_is_secret(ref.url) for ref in refs):
        return None
    return "\n".join(json.dumps([*ref.to_json(), *([] if ref.tokens is None else [ref.tokens])]) for ref in refs)


def _read_rows(rows: str) -> list[ShardRef]:
    """Return a listing from the catalogue. Blocks."""
    return [
        replace(ShardRef.from_json(row[:4]), tokens=row[4] if len(row) > 4 else None)
        for row in map(json.loads, rows.split("\n"))
    ]


def _is_secret(url: str) -> bool:
    """Return whether a url contains secrets, and so must not be stored."""
    return redact(url) != url
