"""User operations on published shards: list, evict, verify, pin, unpin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence

from shardcache.access.rules import Peer
from shardcache.cache.disk import Quarantine
from shardcache.cache.leasing import Published
from shardcache.cache.manifests import Matching
from shardcache.cache.pins import Pin, Pins, pinned_by
from shardcache.cache.residency import Evictor
from shardcache.cache.warming import Event, Send, Warming
from shardcache.errors import CorruptShardError, ExhaustedError
from shardcache.protocol import ShardRef
from shardcache.redact import redact
from shardcache.store.folder import shard_key
from shardcache.store.shard import Facts, Shard
from shardcache.store.store import footprint_bytes

Visible = Callable[[str], bool]
"""Predicate: may the caller see this url?"""

_AT_ONCE = 256


class Maintenance:
    """Lists, evicts and verifies the shards of one store."""

    def __init__(self, evictor: Evictor, quarantine: Quarantine) -> None:
        self._evictor = evictor
        self._quarantine = quarantine
        self._inventory = evictor.inventory
        self._store = evictor.store

    async def shards(
        self, prefix: str = "", visible: Visible = lambda _: True
    ) -> AsyncGenerator[tuple[Shard, Facts], None]:
        """Yield the published shards whose url starts with `prefix`; quarantine damaged ones on the way."""

        def is_meant(facts: Facts) -> bool:
            return facts.url.startswith(prefix) and visible(facts.url)

        for number, shard in enumerate(list(self._store.shards.values())):
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)  # a hundred thousand shards would block the event loop
            if shard.facts is not None and not is_meant(shard.facts):
                continue  # without reading its sidecar
            try:
                facts = await self._store.facts(shard)
            except CorruptShardError as exn:
                await self._quarantine.found(shard, exn)
                continue
            if is_meant(facts) and self._store.shards.get(shard.key) is shard:
                yield shard, facts

    async def evict(self, patterns: Sequence[str], visible: Visible = lambda _: True) -> Event:
        """Remove the shards that match the urls, patterns or prefixes; report those that stayed and why."""
        matching = await asyncio.to_thread(Matching, patterns)
        evicted: list[str] = []
        kept: list[Event] = []
        freed_bytes = 0
        async for shard, facts in self.shards(visible=lambda url: url in matching and visible(url)):
            if shard.stays:
                kept.append({"url": facts.url, "reason": self._why_it_stays(shard, facts)})
            elif await self._evictor.evict(shard):
                evicted.append(facts.url)
                freed_bytes += shard.kept_bytes
            else:
                kept.append({"url": facts.url, "reason": "a process still has it open"})
        return {"evicted": evicted, "kept": kept, "freed_bytes": freed_bytes}

    def _why_it_stays(self, shard: Shard, facts: Facts) -> str:
        pin = self._inventory.pins.get(facts.url) if shard.pinned else None
        return f"in use by {shard.leases} reader(s)" if pin is None else pinned_by(pin)

    async def verify(self, prefix: str = "", visible: Visible = lambda _: True) -> AsyncIterator[Event]:
        """Verify every shard by reading it again, quarantine damaged ones, and yield events."""
        shards = [found async for found in self.shards(prefix, visible)]
        total_bytes = sum(shard.size_bytes for shard, _ in shards)
        yield {"event": "start", "shards": len(shards), "total_bytes": total_bytes}
        done_bytes = corrupt = 0
        for number, (shard, facts) in enumerate(shards, 1):
            error = await self._verify(shard)
            corrupt += isinstance(error, CorruptShardError)
            done_bytes += shard.size_bytes
            result = {"ok": True} if error is None else {"ok": False, "error": error.to_json()}
            yield {"event": "shard", "url": facts.url, **result}
            yield {
                "event": "progress",
                "done_shards": number,
                "shards": len(shards),
                "done_bytes": done_bytes,
                "total_bytes": total_bytes,
            }
        yield {"event": "done", "shards": len(shards), "corrupt": corrupt, "bytes": done_bytes}

    async def _verify(self, shard: Shard) -> CorruptShardError | ExhaustedError | None:
        if self._store.shards.get(shard.key) is not shard:
            return None  # evicted since it was listed
        try:
            with self._inventory.retained(shard):
                await self._store.check(shard)
        except CorruptShardError as exn:
            await self._quarantine.found(shard, exn)
            return exn
        except ExhaustedError as exn:
            return exn
        return None


class Pinning:
    """Serves users' pin requests."""

    def __init__(self, pins: Pins, warming: Warming) -> None:
        self._pins = pins
        self._warming = warming

    async def pin(self, refs: Sequence[ShardRef], peer: Peer, send: Send) -> None:
        """Pin shards and fetch the missing ones, reporting events as `warm` does.

        Shards that cannot be fetched are not pinned, unless they were before. If `send` raises, all pins remain, and
        each applies when its shard arrives. Raises CapacityError, DiskError.
        """
        found = await self._warming.ask(refs, versions=True)
        new = await self._pins.add(await asyncio.to_thread(_pins_of, found, peer.uid))
        sums = await self._warming.fetch(found, send, lambda arrived: self._keep(arrived, peer.uid))
        pins = [pin for url in new if (pin := self._pins.get(url)) is not None]
        await self._pins.remove([pin for pin in pins if not self._pins.is_cached(pin)], peer.uid)
        await self._pins.save()
        await send({"event": "done", **sums, "pins": self._pins.to_json()})

    async def _keep(self, found: Published, uid: int) -> None:
        """Pin a shard that has arrived. Raises CapacityError if an unexpected size exceeds the pin limit."""
        url, shard = found.facts.url, found.shard
        pin = self._pins.get(url)
        if pin is None or uid not in pin.uids:  # the origin had not given its version and size
            await self._pins.add([Pin(url, shard.key, shard.kept_bytes, frozenset({uid}))])
        self._pins.arrived(shard)

    async def unpin(self, patterns: Sequence[str], peer: Peer, visible: Visible) -> Event:
        """Remove the user's pins on matching urls, or everyone's for a trusted user; report what stays pinned."""
        matching = await asyncio.to_thread(Matching, patterns)
        pins = [pin async for pin in self._all() if pin.url in matching and visible(pin.url)]
        left = await self._pins.remove(pins, None if peer.is_trusted else peer.uid)
        return {
            "unpinned": [url for url, pin in left.items() if pin is None],
            "kept": [{"url": url, "reason": pinned_by(pin)} for url, pin in left.items() if pin is not None],
        }

    async def rows(self, visible: Visible) -> AsyncIterator[Event]:
        """Yield the pins whose urls the caller may see."""
        async for pin in self._all():
            if visible(pin.url):
                here = self._pins.is_cached(pin)
                yield {"url": pin.url, "size_bytes": pin.size_bytes, "cached": here, "uids": sorted(pin.uids)}

    async def _all(self) -> AsyncIterator[Pin]:
        for number, pin in enumerate(self._pins):
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)  # a hundred thousand pins would block the event loop
            yield pin


def _pins_of(refs: Iterable[ShardRef], uid: int) -> list[Pin]:
    """Return a pin for each shard of known version and size; its footprint is an estimate until it arrives."""
    uids = frozenset({uid})
    return [
        Pin(redact(ref.url), shard_key(ref.url, ref.version), footprint_bytes(ref.size_bytes), uids)
        for ref in refs
        if ref.version is not None and ref.size_bytes is not None
    ]
