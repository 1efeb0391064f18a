"""Pinning and unpinning by url or pattern: pins are made first, then their shards are fetched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from shardcache.access.rules import Peer
from shardcache.cache.catalog.url_matching import Matching
from shardcache.cache.operations.maintenance import Sight
from shardcache.cache.operations.rounds import Tell
from shardcache.cache.operations.warming import Warming
from shardcache.cache.readers.leasing import Published
from shardcache.cache.residency.pins import Pins, pinned_by
from shardcache.protocol import ShardRef
from shardcache.redact import redact
from shardcache.store.folder import shard_key
from shardcache.store.pinfile import Pin
from shardcache.store.space import footprint_bytes

Json = dict[str, Any]

_AT_ONCE = 256


class Pinning:
    """Serves users' pin requests."""

    def __init__(self, pins: Pins, warming: Warming) -> None:
        self._pins = pins
        self._warming = warming

    async def pin(self, refs: Sequence[ShardRef], peer: Peer, tell: Tell) -> None:
        """Pin shards and fetch the missing ones, reporting events as `warm` does.

        Shards that cannot be fetched are not pinned, unless they were before. If `tell` raises, all pins remain, and
        each applies when its shard arrives. Raises CapacityError, DiskError.
        """
        found = await self._warming.ask(refs, versions=True)
        new = await self._pins.add(await asyncio.to_thread(_pins_of, found, peer.uid))
        sums = await self._warming.fetch(found, tell, lambda arrived: self._keep(arrived, peer.uid))
        pins = [pin for url in new if (pin := self._pins.get(url)) is not None]
        await self._pins.remove([pin for pin in pins if not self._pins.is_here(pin)], peer.uid)
        await self._pins.save()
        await tell({"event": "done", **sums, "pins": self._pins.to_json()})

    async def _keep(self, found: Published, uid: int) -> None:
        """Pin a shard that has arrived. Raises CapacityError if an unexpected size exceeds the pin limit."""
        url, shard = found.facts.url, found.shard
        pin = self._pins.get(url)
        if pin is None or uid not in pin.uids:  # the origin had not given its version and size
            await self._pins.add([Pin(url, shard.key, shard.kept_bytes, frozenset({uid}))])
        self._pins.arrived(shard)

    async def unpin(self, patterns: Sequence[str], peer: Peer, sight: Sight) -> Json:
        """Remove the user's pins on matching urls, or everyone's for a trusted user; report what stays pinned."""
        matching = await asyncio.to_thread(Matching, patterns)
        pins = [pin async for pin in self._all() if pin.url in matching and sight(pin.url)]
        left = await self._pins.remove(pins, None if peer.is_trusted else peer.uid)
        return {
            "unpinned": [url for url, pin in left.items() if pin is None],
            "kept": [{"url": url, "reason": pinned_by(pin)} for url, pin in left.items() if pin is not None],
        }

    async def rows(self, sight: Sight) -> AsyncIterator[Json]:
        """Yield the pins whose urls the caller may see."""
        async for pin in self._all():
            if sight(pin.url):
                here = self._pins.is_here(pin)
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
