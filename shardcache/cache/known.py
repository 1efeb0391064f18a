"""What is remembered of a url after its shard is gone: the version seen last, and that version's sample count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardcache.protocol import ShardRef
from shardcache.store.catalogue import Catalogue
from shardcache.store.shard import Facts

_KIND = "shard"


class Known:
    """Rows of the catalogue, one a url: `[version, samples]`."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    async def remember(self, facts: Facts) -> None:
        """Note what a shard turned out to be."""
        await self._catalogue.put([facts.version, facts.samples], _KIND, facts.url)

    async def versions(self, urls: Sequence[str]) -> list[str | None]:
        """Return the version of each url that was fetched last, or None."""
        rows = await self._catalogue.get_many([(_KIND, url) for url in urls])
        return [row[0] if row else None for row in rows]

    async def fill(self, refs: list[ShardRef]) -> list[ShardRef]:
        """Return the refs with sample counts where they are known; one of unknown version gets the last one's."""
        unknown = [ref.url for ref in refs if ref.samples is None]  # an index file tells every count
        rows = await self._catalogue.get_many([(_KIND, url) for url in unknown])
        known = dict(zip(unknown, rows, strict=True))
        return [_filled(ref, known.get(ref.url)) for ref in refs]


def _filled(ref: ShardRef, row: list[object] | None) -> ShardRef:
    if row is None or ref.samples is not None or ref.version not in (None, row[0]):
        return ref
    samples = row[1]
    return replace(ref, samples=samples) if isinstance(samples, int) else ref
