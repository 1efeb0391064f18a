"""The last version fetched of each url and its sample count: rows of the catalogue.

The catalogue is the cache's database. A sidecar is the file next to a cached shard that has its
facts, such as version and sample count, and its index. So lost rows of cached shards can be
restored from the sidecars. `Publisher` stores the rows. `Leasing` and `Manifests` look them up, for
versions after a restart and for sample counts.
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
_COUNTS_AT_ONCE = 1_000

Row = tuple[tuple[str, str], list[object]]
"""Key and value of a row: the kind and the url, and the version and the sample count."""


@dataclass(frozen=True, slots=True)
class FetchedVersion:
    """The version of a url that was fetched last, as a row's value.

    Attributes:
        version: the version.
        samples: number of its samples; None for a file that was not indexed.
    """

    version: str
    samples: int | None

    @classmethod
    def from_row(cls, row: object) -> "FetchedVersion":
        """Build from a row's value. Raises ValueError if the value is damaged."""
        match row:
            case [str(version), None | int() as samples] if not isinstance(samples, bool):
                version.encode()  # raises ValueError for half a surrogate pair, which JSON may hold
                if samples is None or 0 <= samples < _SAMPLES_LIMIT:
                    return cls(version, samples)
        raise ValueError("the row is not a version and a number of samples")

    def to_row(self) -> list[object]:
        """Return the row's value."""
        return [self.version, self.samples]


class History:
    """The last version fetched of each url and its sample count; they outlive the shard.

    Attributes:
        catalogue: the database with the rows.
        changes: a number that rises before a row is stored, and after rows have been restored.
    """

    def __init__(self, store: Store) -> None:
        self.catalogue = store.catalogue
        self.changes = 0
        self._store = store
        self._rebuild_lock = asyncio.Lock()

    async def rebuild(self, *, damaged: bool = False) -> None:
        """Restore lost rows from the sidecars, unless no rows seem to be lost.

        The daemon calls this at its start. Lookups wait until it is done.

        Args:
            damaged: True if a lookup has found damaged rows, so that rows are known to be lost.
        """
        shards = self._store.shards
        async with self._rebuild_lock:
            if not damaged and await self._seems_complete():
                return
            log.info("rebuilding sample counts from the sidecars", shards=len(shards))
            await self._restore_rows()
            rowless = max(0, len(shards) - await self.catalogue.count(_KIND))
            await self.catalogue.put(rowless, _ROWLESS_KIND)
            self.changes += 1

    async def _seems_complete(self) -> bool:
        """Return whether there are as many rows as expected.

        Rows are lost together, when an empty database replaces a damaged one. Each cached shard has
        stored a row, so fewer rows than shards are a sign of a loss. But versions or forms of one
        url share a row: the last rebuild has stored how many shards had none of their own.
        """
        rowless = await self.catalogue.get(_ROWLESS_KIND, parse=_parse_number) or 0
        return await self.catalogue.count(_KIND) + rowless >= len(self._store.shards)

    async def _restore_rows(self) -> None:
        """Store a row for each url of a cached shard that has none.

        Of several versions of a url, the row is that of the version used last, but versions with a
        sample count come before those without.
        """
        # `add_many` does not replace rows, so the first row of a url stays.
        latest_first = list(reversed(self._store.shards))  # the store has the latest used last
        rows_without_count: list[Row] = []
        for first in range(0, len(latest_first), _SIDECARS_AT_ONCE):
            rows_with_count: list[Row] = []
            for facts in await self._read_facts(latest_first[first : first + _SIDECARS_AT_ONCE]):
                if facts.samples is None:
                    rows_without_count.append(_row_of(facts))
                else:
                    rows_with_count.append(_row_of(facts))
            await self.catalogue.add_many(rows_with_count)
        await self.catalogue.add_many(rows_without_count)

    async def _read_facts(self, keys: Sequence[str]) -> list[Facts]:
        """Return the facts of shards, except those that are evicted by now or cannot be read."""
        cached = self._store.shards
        shards = [cached[key] for key in keys if key in cached]
        return await self._store.readable_facts(shards)

    async def remember(self, facts: Facts) -> None:
        """Store a shard's version and sample count."""
        if facts.samples is None:
            # A tar that is fetched as a plain file has no count, but the row of the same version
            # may have one.
            earlier = await self.catalogue.get(_KIND, facts.url, parse=FetchedVersion.from_row)
            if earlier is not None and earlier.version == facts.version:
                return
        # The change is counted before the row is written. The catalogue serves calls in their
        # order: a caller that sees the new number looks rows up after this one is written.
        self.changes += 1
        key, row = _row_of(facts)
        await self.catalogue.put(row, *key)

    async def versions(self, urls: Sequence[str]) -> list[str | None]:
        """Return the last version fetched of each url; None for a url never fetched."""
        rows = await self._last_fetched(urls)
        return [None if row is None else row.version for row in rows]

    async def cached_file(self, url: str) -> RemoteObject | None:
        """Return the object of a url, if the version fetched last is cached as a plain file.

        Returns None otherwise.
        """
        (version,) = await self.versions([url])
        if version is None:
            return None
        key = shard_key(place_of(url, is_file=True), version)
        shard = self._store.shards.get(key)
        if shard is None:
            return None
        return RemoteObject(url, version, shard.size_bytes)

    async def fill(self, shards: Shards) -> Shards:
        """Return the shards with the missing sample counts that are known.

        The last version fetched has a known count. It is the version of a shard that names none.
        """
        samples = array("q", shards.samples)  # -1 for an unknown count
        unknown = [number for number, count in enumerate(samples) if count < 0]
        for first in range(0, len(unknown), _COUNTS_AT_ONCE):
            numbers = unknown[first : first + _COUNTS_AT_ONCE]
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
        async with self._rebuild_lock:
            pass  # this only waits for the end of a rebuild in progress
        # Rows are stored under `Facts.url`, which is a `stored_url` as well.
        keys = [(_KIND, stored_url(url)) for url in urls]
        losses = self.catalogue.losses
        rows = await self.catalogue.get_many(keys, FetchedVersion.from_row)
        if self.catalogue.losses != losses:  # damaged rows were dropped
            await self.rebuild(damaged=True)
            rows = await self.catalogue.get_many(keys, FetchedVersion.from_row)
        return rows


def _row_of(facts: Facts) -> Row:
    """Return a shard's row."""
    return (_KIND, facts.url), FetchedVersion(facts.version, facts.samples).to_row()


def _parse_number(row: object) -> int:
    """Return the number in a row. Raises ValueError if the value is damaged."""
    if type(row) is int and row >= 0:
        return row
    raise ValueError("the row is not a number")
