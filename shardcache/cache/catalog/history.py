"""History of urls that outlives their shards: the last version fetched and its sample count."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import structlog

from shardcache.protocol import ShardRef
from shardcache.redact import redact
from shardcache.store.catalogue import Catalogue
from shardcache.store.shard import Facts
from shardcache.store.store import Store

log = structlog.get_logger()

_KIND = "shard"


class History:
    """Rows of the catalogue, one per url: `[version, samples]`."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._rebuilding = asyncio.Lock()

    async def rebuild(self, store: Store) -> None:
        """Restore lost rows from the sidecars of the published shards; lookups wait until this is done.

        If several versions of a url are cached, the most recently read one is kept. Counts of shards no longer cached
        cannot be restored.
        """
        async with self._rebuilding:
            if await self._catalogue.count(_KIND) >= len(store.shards):
                return
            log.info("rebuilding sample counts from the sidecars", shards=len(store.shards))
            async with aclosing(store.sidecars()) as sidecars:
                async for some in sidecars:
                    rows = [((_KIND, facts.url), [facts.version, facts.samples]) for facts in some]
                    await self._catalogue.add_many(rows)

    async def remember(self, facts: Facts) -> None:
        """Store a shard's version and sample count."""
        await self._catalogue.put([facts.version, facts.samples], _KIND, facts.url)

    async def versions(self, urls: Sequence[str]) -> list[str | None]:
        """Return the last version fetched of each url, or None."""
        rows = await self._rows(urls)
        return [str(row[0]) if row else None for row in rows]

    async def fill(self, refs: list[ShardRef]) -> list[ShardRef]:
        """Return the refs with known sample counts filled in; a ref without a version gets the last version's."""
        unknown = [ref.url for ref in refs if ref.samples is None]  # an index file gives every count
        known = dict(zip(unknown, await self._rows(unknown), strict=True))
        return [_filled(ref, known.get(ref.url)) for ref in refs]

    async def _rows(self, urls: Sequence[str]) -> list[list[object] | None]:
        async with self._rebuilding:
            pass
        return await self._catalogue.get_many([(_KIND, redact(url)) for url in urls])


def _filled(ref: ShardRef, row: list[object] | None) -> ShardRef:
    if row is None or ref.samples is not None or ref.version not in (None, row[0]):
        return ref
    samples = row[1]
    return replace(ref, samples=samples) if isinstance(samples, int) else ref
