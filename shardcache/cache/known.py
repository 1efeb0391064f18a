"""What is remembered of a url after its shard is gone: the version seen last, and that version's sample count."""

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


class Known:
    """Rows of the catalogue, one a url: `[version, samples]`."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._rebuilding = asyncio.Lock()

    async def rebuild(self, store: Store) -> None:
        """Make up for rows that were lost, from the sidecars of the published shards; whoever asks meanwhile waits.

        Of several versions of one url it is the one that was read last. Counts of shards that are no longer here are
        not to be had this way.
        """
        async with self._rebuilding:
            if await self._catalogue.count(_KIND) >= len(store.shards):
                return
            log.info("sample counts are read from the sidecars", shards=len(store.shards))
            async with aclosing(store.sidecars()) as sidecars:
                async for some in sidecars:
                    rows = [((_KIND, facts.url), [facts.version, facts.samples]) for facts in some]
                    await self._catalogue.add_many(rows)

    async def remember(self, facts: Facts) -> None:
        """Note what a shard turned out to be."""
        await self._catalogue.put([facts.version, facts.samples], _KIND, facts.url)

    async def versions(self, urls: Sequence[str]) -> list[str | None]:
        """Return the version of each url that was fetched last, or None."""
        rows = await self._rows(urls)
        return [str(row[0]) if row else None for row in rows]

    async def fill(self, refs: list[ShardRef]) -> list[ShardRef]:
        """Return the refs with sample counts where they are known; one of unknown version gets the last one's."""
        unknown = [ref.url for ref in refs if ref.samples is None]  # an index file tells every count
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
