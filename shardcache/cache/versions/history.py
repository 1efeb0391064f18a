"""The last version fetched of each url and its sample count: rows of the catalogue.

The catalogue is the cache's database. Everything in these rows is also in the sidecars, the files
with facts and index that are next to the shards, so lost rows of cached shards can be restored.
`Publisher` stores the rows. `Leasing` and `Manifests` look them up, for versions after a restart
and for sample counts.
"""

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog

from shardcache.origin.objects import RemoteObject
from shardcache.shared.lists.shard_columns import Shards
from shardcache.store.keys import place_of, shard_key, stored_url
from shardcache.store.shard import Facts
from shardcache.store.store import Store

log = structlog.get_logger()

_KIND = "shard"  # kind of these rows in the catalogue
# Kind of the row with the number of cached shards that had no row of their own after a rebuild.
_ROWLESS_KIND = "rowless shards"
_SAMPLES_LIMIT = 2**63  # SQLite, and the columns of a list of shards, hold numbers below this
_SIDECARS_AT_ONCE = 256  # number of sidecars that are read at a time

# Number of shards whose sample counts are looked up at a time. More would block the event loop.
_FILLED_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class FetchedVersion:
    """The version of a url that was fetched last: a row of the catalogue.

    Attributes:
        version: the version.
        samples: number of its samples; None for a file that was not indexed.
    """

    version: str
    samples: int | None

    @classmethod
    def from_row(cls, row: object) -> "FetchedVersion":
        """Build from a row's value. Raises ValueError for any other value."""
        match row:
            # To Python, a bool is an int.
            case [str(version), None | int() as samples] if not isinstance(samples, bool):
                # JSON may hold half a surrogate pair, which is not text: this raises ValueError.
                version.encode()
                if samples is None or 0 <= samples < _SAMPLES_LIMIT:
                    return cls(version, samples)
        raise ValueError("the row is not a version and a number of samples")

    def to_row(self) -> list[object]:
        """Return the row's value."""
        return [self.version, self.samples]


class History:
    """The last version fetched of each url and its sample count; they outlive the shard.

    Attributes:
        catalogue: the database with these rows.
        changes: rises before a version is stored, and after versions have been restored.
    """

    def __init__(self, store: Store) -> None:
        self.catalogue = store.catalogue
        self.changes = 0
        self._store = store
        self._rebuilding = asyncio.Lock()

    async def rebuild(self, *, damaged: bool = False) -> None:
        """Restore lost rows from the sidecars.

        Each url gets the version that was used last of those with a sample count, or of all
        versions if none has a count.

        The daemon calls this at its start, and lookups wait until it is done.

        This is a no-op if there are at least as many rows as cached shards. Rows are lost together,
        when an empty database replaces a damaged one. As each cached shard has stored a row, fewer
        rows than shards are taken as a sign of such a loss. Versions or forms of one url share a
        row, though: each rebuild stores the number of shards that have none of their own. The
        comparison cannot show that single rows are damaged: a lookup that finds such rows calls
        this with `damaged`.

        Args:
            damaged: True if rows are known to be damaged, so that their number says nothing.
        """
        shards = self._store.shards
        async with self._rebuilding:
            rowless = await self.catalogue.get(_ROWLESS_KIND, parse=_number) or 0
            if not damaged and await self.catalogue.count(_KIND) + rowless >= len(shards):
                return
            log.info("rebuilding sample counts from the sidecars", shards=len(shards))
            latest_first = list(reversed(shards))  # the store has them in the order of their use
            # The first row of a url counts. If a url is cached both as a shard and as a plain file,
            # the first row has to be that of the shard, which has a count.
            rows_without_count: list[tuple[tuple[str, str], list[object]]] = []
            for first in range(0, len(latest_first), _SIDECARS_AT_ONCE):
                facts = await self._read(latest_first[first : first + _SIDECARS_AT_ONCE])
                counted = [each for each in facts if each.samples is not None]
                await self.catalogue.add_many([_row_of(each) for each in counted])
                rows_without_count += [_row_of(each) for each in facts if each.samples is None]
            await self.catalogue.add_many(rows_without_count)
            rowless = max(0, len(shards) - await self.catalogue.count(_KIND))
            await self.catalogue.put(rowless, _ROWLESS_KIND)
            self.changes += 1

    async def _read(self, keys: Sequence[str]) -> list[Facts]:
        """Return the facts of those of some shards that are still cached and can be read."""
        cached = self._store.shards
        shards = [cached[key] for key in keys if key in cached]
        # `peek` returns None for a sidecar that cannot be read.
        return [facts for facts in await self._store.peek(shards) if facts is not None]

    async def remember(self, facts: Facts) -> None:
        """Store a shard's version and sample count."""
        if facts.samples is None:
            # A tar that is fetched as a plain file has no count, but an earlier row of the same
            # version may have one.
            known = await self.catalogue.get(_KIND, facts.url, parse=FetchedVersion.from_row)
            if known is not None and known.version == facts.version:
                return
        # The change is counted before the row is written. The catalogue serves calls in their
        # order: a caller that sees the new number looks rows up after this one is written.
        self.changes += 1
        row = FetchedVersion(facts.version, facts.samples).to_row()
        await self.catalogue.put(row, _KIND, facts.url)

    async def versions(self, urls: Sequence[str]) -> list[str | None]:
        """Return the last version fetched of each url; None for a url never fetched."""
        rows = await self._last_fetched(urls)
        return [None if row is None else row.version for row in rows]

    async def cached_file(self, url: str) -> RemoteObject | None:
        """Return the object of a url, if its plain file is cached in the version fetched last."""
        (version,) = await self.versions([url])
        if version is None:
            return None
        key = shard_key(place_of(url, is_file=True), version)
        shard = self._store.shards.get(key)
        if shard is None:
            return None
        return RemoteObject(url, version, shard.size_bytes)

    async def fill(self, shards: Shards) -> Shards:
        """Return the shards with known sample counts filled in.

        A shard without a version gets the count of the last version fetched.
        """
        samples = array("q", shards.samples)  # -1 for an unknown count
        unknown = [number for number, count in enumerate(samples) if count < 0]
        for first in range(0, len(unknown), _FILLED_AT_ONCE):
            numbers = unknown[first : first + _FILLED_AT_ONCE]
            rows = await self._last_fetched([shards.urls[number] for number in numbers])
            for number, row in zip(numbers, rows, strict=True):
                if row is None or row.samples is None:
                    continue
                if shards.versions[number] in ("", row.version):
                    samples[number] = row.samples
        return replace(shards, samples=samples)

    async def _last_fetched(self, urls: Sequence[str]) -> list[FetchedVersion | None]:
        """Return the version of each url that was fetched last; None for a url never fetched.

        If rows turn out to be damaged, they are restored from the sidecars, and looked up again.
        """
        async with self._rebuilding:
            pass  # this only waits for the end of a rebuilding in progress
        # Rows are stored under `Facts.url`, which is a `stored_url` as well.
        keys = [(_KIND, stored_url(url)) for url in urls]
        losses = self.catalogue.losses
        rows = await self.catalogue.get_many(keys, FetchedVersion.from_row)
        if self.catalogue.losses != losses:  # damaged rows were dropped
            await self.rebuild(damaged=True)
            rows = await self.catalogue.get_many(keys, FetchedVersion.from_row)
        return rows


def _row_of(facts: Facts) -> tuple[tuple[str, str], list[object]]:
    """Return the key and the value of a shard's row."""
    return (_KIND, facts.url), FetchedVersion(facts.version, facts.samples).to_row()


def _number(row: object) -> int:
    """Return the number in a row. Raises ValueError for any other value."""
    if type(row) is int and row >= 0:
        return row
    raise ValueError("the row is not a number")
