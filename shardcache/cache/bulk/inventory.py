"""The cached shards and parts of objects, as users name them: listed, evicted and verified.

`Cache` does this for the commands `shardcache ls`, `evict` and `verify`. Users name shards by urls,
prefixes of urls, or patterns, and see only the urls that the daemon's rules (`AllowList`) permit
them. A shard is published once it is complete, checked and in its place in the cache. Its facts,
such as url and size, are in its sidecar, a file next to it. To quarantine a damaged shard is to
take it out of the cache and keep its files apart. A file of parts (`PartFile`) has the cached parts
of one object that was read by ranges.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardcache.access.rules import AllowList, Peer
from shardcache.access.urls import canonical
from shardcache.cache.disk_health import DiskHealth
from shardcache.cache.fetching.transfers import Transfers
from shardcache.cache.listings.matching import matcher
from shardcache.cache.space.pins import Pins, describe_pin
from shardcache.cache.space.residency import Residency
from shardcache.origin.registry import Origins
from shardcache.shared.exceptions import CacheError, CorruptShardError, ExhaustedError
from shardcache.shared.protocol import Json
from shardcache.store.keys import stored_url
from shardcache.store.part_file import PartFile
from shardcache.store.shard import Facts, Shard
from shardcache.store.store import Store

_PER_TURN = 256  # number of shards or files that are listed before other tasks run


class _Verified(NamedTuple):
    """Result of reading a shard, or the parts of an object, again.

    Attributes:
        url: url of the shard or object.
        size_bytes: number of cached bytes.
        error: the damage, or the reason why it could not be read; None if it is sound.
    """

    url: str
    size_bytes: int
    error: CacheError | CorruptShardError | None


@dataclass(frozen=True, slots=True, repr=False)
class Inventory:
    """The published shards, and the objects of which parts are cached."""

    _store: Store
    _residency: Residency
    _pins: Pins
    _health: DiskHealth
    _transfers: Transfers
    _allow: AllowList

    async def rows(self, prefix: str, peer: Peer) -> AsyncIterator[Json]:
        """Yield the published shards under a url prefix, and then the objects with cached parts.

        Only those whose urls the user may see are among them. Raises ConfigError for a prefix of an
        unknown protocol.
        """
        await Origins.check_protocols([prefix])
        is_requested = self._visible_under(prefix, peer)
        async for shard, facts in self._shards(is_requested):
            yield {
                "url": facts.url,
                "version": facts.version,
                "size_bytes": facts.size_bytes,
                "cached_bytes": facts.size_bytes,
                "samples": facts.samples,
                "leases": shard.leases,
                "pinned": shard.pinned,
                "used_at_s": shard.used_at_s,
            }
        async for file, url in self._part_files(is_requested):
            yield {
                "url": url,
                "version": file.partial.obj.version,
                "size_bytes": file.partial.obj.size_bytes,
                "cached_bytes": file.kept_parts_bytes,
                "samples": None,
                "leases": file.leases.total(),
                "pinned": False,
                "used_at_s": file.used_at_s,
            }

    async def evict(self, patterns: Sequence[str], peer: Peer) -> Json:
        """Remove the matching shards and parts that the user may see.

        Returns:
            `evicted`, the urls of what was removed; `kept`, the url and reason of all that stays;
            and `freed_bytes`.

        Raises ConfigError for a pattern of an unknown protocol.
        """
        await Origins.check_protocols(patterns)
        matches = await asyncio.to_thread(matcher, patterns)
        visible = self._visible_to(peer)
        evicted: list[str] = []
        kept: list[Json] = []
        freed_bytes = 0

        def is_requested(url: str) -> bool:
            """Return whether a url matches, and the user may see it."""
            return matches(url) and visible(url)

        async for shard, facts in self._shards(is_requested):
            reason = await self._evict(shard, facts)
            if reason is None:
                evicted.append(facts.url)
                freed_bytes += shard.kept_bytes
            else:
                kept.append({"url": facts.url, "reason": reason})

        async for file, url in self._part_files(is_requested):
            parts_bytes = await self._residency.parts.evict_all(file)
            freed_bytes += parts_bytes
            if parts_bytes:
                evicted.append(url)
            else:
                kept.append({"url": url, "reason": "ranges of it are being read"})
        return {"evicted": evicted, "kept": kept, "freed_bytes": freed_bytes}

    async def _evict(self, shard: Shard, facts: Facts) -> str | None:
        """Evict a shard; return None, or the reason why it stays, in words for the user."""
        if shard.must_stay:
            pin = self._pins.get(facts.url) if shard.pinned else None
            if pin is not None:
                return describe_pin(pin)
            return f"in use by {shard.leases} reader(s)"
        if not await self._residency.evict(shard):
            return "a process still has it open, or a hard link to it exists"
        return None

    async def verify(self, prefix: str, peer: Peer) -> AsyncIterator[Json]:
        """Read every shard and part under a url prefix again, and yield events.

        Damaged shards are quarantined, and damaged parts are dropped. The numbers of shards in the
        events include the objects with cached parts. The last event also counts the shards that
        were refused as damaged when they last arrived, and thus are not cached.

        Raises ConfigError for a prefix of an unknown protocol.
        """
        await Origins.check_protocols([prefix])
        is_requested = self._visible_under(prefix, peer)
        shards = [shard_facts async for shard_facts in self._shards(is_requested)]
        files = [file_url async for file_url in self._part_files(is_requested)]
        total_bytes = sum(shard.size_bytes for shard, _ in shards)
        total_bytes += sum(file.kept_parts_bytes for file, _ in files)
        count = len(shards) + len(files)
        yield {"event": "start", "shards": count, "total_bytes": total_bytes}
        done_shards = 0
        done_bytes = 0
        corrupt_shards = 0
        async for verified in self._verified(shards, files):
            error = verified.error
            if isinstance(error, CorruptShardError):
                corrupt_shards += 1
            done_shards += 1
            done_bytes += verified.size_bytes
            result: Json = {"event": "shard", "url": verified.url, "ok": error is None}
            if error is not None:
                result["error"] = error.to_json()
            yield result
            yield {
                "event": "progress",
                "done_shards": done_shards,
                "shards": count,
                "done_bytes": done_bytes,
                "total_bytes": total_bytes,
            }
        refused = sum(map(is_requested, self._transfers.refusals))
        yield {
            "event": "done",
            "shards": count,
            "corrupt": corrupt_shards,
            "refused": refused,
            "bytes": done_bytes,
        }

    async def _verified(
        self,
        shards: Sequence[tuple[Shard, Facts]],
        files: Sequence[tuple[PartFile, str]],
    ) -> AsyncIterator[_Verified]:
        """Read shards, and then parts of objects, again; yield the result for each."""
        for shard, facts in shards:
            error = await self._verify(shard)
            yield _Verified(facts.url, shard.size_bytes, error)
        for file, url in files:
            size_bytes = file.kept_parts_bytes  # before damaged parts are dropped
            parts_error = await self._verify_parts(file, url)
            yield _Verified(url, size_bytes, parts_error)

    async def _verify(self, shard: Shard) -> CorruptShardError | ExhaustedError | None:
        """Read a shard again; return its damage, or the reason why it could not be read.

        Return None if it is sound, or has been evicted.
        """
        if self._store.shards.get(shard.key) is not shard:
            return None  # the shard was evicted after it was listed
        try:
            with self._residency.retained(shard):
                await self._store.check(shard)
        except (CorruptShardError, ExhaustedError) as exn:
            if isinstance(exn, CorruptShardError):
                await self._health.take_out(shard, exn)
            return exn
        return None

    async def _verify_parts(
        self,
        file: PartFile,
        url: str,
    ) -> CacheError | CorruptShardError | None:
        """Read the parts of an object again; return their damage, or why they could not be read.

        Return None if they are sound, or no longer cached as parts.
        """
        if not file.is_kept_by_part:
            return None  # the parts were evicted, or taken over by a transfer of the whole object
        try:
            damaged = await self._residency.parts.verify(file)
        except CacheError as exn:
            return exn if file.is_kept_by_part else None  # it may be gone in the meantime
        if not damaged:
            return None
        numbers = ", ".join(map(str, damaged))
        message = f"parts {numbers} of the cached file {file.partial.path} are damaged; dropped"
        return CorruptShardError(message, url=url)

    def _visible_under(self, prefix: str, peer: Peer) -> Callable[[str], bool]:
        """Return a predicate: may the user see this url, and is it under the prefix?"""
        visible = self._visible_to(peer)
        ends_within_scheme = "://" not in prefix and not prefix.startswith("/")
        if ends_within_scheme:
            start = prefix  # `canonical` would take a prefix such as "s3:" for a path
        else:
            start = canonical(prefix)
        return lambda url: canonical(url).startswith(start) and visible(url)

    async def _shards(
        self,
        is_requested: Callable[[str], bool],
    ) -> AsyncGenerator[tuple[Shard, Facts], None]:
        """Yield the published shards whose urls are requested, with their facts.

        A shard whose sidecar proves to be damaged is quarantined, and not listed.

        Args:
            is_requested: returns whether a url is among the requested ones.
        """
        for number, shard in enumerate(list(self._store.shards.values())):
            if number % _PER_TURN == 0:
                await asyncio.sleep(0)
            if shard.facts is not None and not is_requested(shard.facts.url):
                continue  # the url is known already, so the sidecar need not be read
            try:
                facts = await self._store.facts(shard)
            except CorruptShardError as exn:
                await self._health.take_out(shard, exn)
                continue
            if is_requested(facts.url) and self._store.shards.get(shard.key) is shard:
                yield shard, facts

    async def _part_files(
        self,
        is_requested: Callable[[str], bool],
    ) -> AsyncGenerator[tuple[PartFile, str], None]:
        """Yield the files of parts whose object's url is requested, with that url."""
        for number, file in enumerate(self._store.parts.files()):
            if number % _PER_TURN == 0:
                await asyncio.sleep(0)
            url = stored_url(file.partial.obj.url)
            # Parts that a transfer of the whole object has taken over are no longer listed.
            if file.is_kept_by_part and is_requested(url):
                yield file, url

    def _visible_to(self, peer: Peer) -> Callable[[str], bool]:
        """Return a predicate: may the user see this url?"""
        return lambda url: self._allow.may_see(url, peer)
