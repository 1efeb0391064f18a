"""Listing of a shard's samples as JSON rows: keys, sizes of members, metadata. The content of a sample table.

A sample table is a tar with such rows, made by `shardcache index --samples`, for choosing samples without their bytes.
A row of a table has `shard`, the number of the shard in the index file, and its `version`; `samples`, the number of
samples in the shard; `first`, the number of the first one that it lists; their
`keys`; for each extension under `sizes`, the sizes in bytes, null where a sample has no such member; and if the table
was made with metadata, under `metadata` an object for each sample, null where a sample has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import Any

from shardcache.errors import ConfigError
from shardcache.tarindex.metadata import Metadata
from shardcache.tarindex.tables import Tables, key_of

Row = dict[str, Any]

SUFFIX = ".samples.tar"
"""Ending of a sample table's url, in place of the `.json` of the index file beside it."""

_MOST_SAMPLES = 50_000  # a few megabytes: shards of text may have millions of samples
_MOST_WITH_METADATA = 1_000  # 16 MB at worst


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A sample as its shard's index describes it.

    Attributes:
        key: its `__key__`.
        sizes: size in bytes of each of its members, by extension.
        url: of its shard, the sample's `__url__`.
    """

    key: str
    sizes: Mapping[str, int]
    url: str
    _metadata: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The JSON object of the member named by `shardcache index --metadata`; empty if the sample has none.

        Raises ConfigError if the table was made without.
        """
        if self._metadata is None:
            raise ConfigError(
                "the table of samples has no metadata",
                url=self.url,
                remedy="write both files again: shardcache index URL... -o index.json --samples --metadata json",
            )
        return self._metadata


def rows_of(
    tables: Tables, metadata: Iterator[Metadata | None] | None = None, most: int = _MOST_SAMPLES
) -> Iterator[Row]:
    """Yield the rows of a shard, each of at most `most` samples; a shard without samples has one row, too.

    Args:
        metadata: of each sample, None for one without; or None for a table without metadata.
    """
    samples = len(tables.member_ends)
    most = most if metadata is None else min(most, _MOST_WITH_METADATA)
    for first in range(0, samples or 1, most):
        numbers = range(first, min(first + most, samples))
        sizes: dict[str, list[int | None]] = {}
        for place, number in enumerate(numbers):
            start = tables.member_ends[number - 1] if number else 0
            for member in range(start, tables.member_ends[number]):
                extension = tables.extensions[tables.extension_ids[member]]
                column = sizes.setdefault(extension, [None] * len(numbers))
                column[place] = tables.ends[member] - tables.starts[member]
        row = {
            "samples": samples,
            "first": first,
            "keys": [key_of(tables, number) for number in numbers],
            "sizes": sizes,
        }
        yield row if metadata is None else row | {"metadata": list(islice(metadata, len(numbers)))}


def entries_of(row: Row, url: str) -> Iterator[IndexEntry]:
    """Yield the samples of a row, of the shard at `url`.

    Raises KeyError, TypeError, ValueError, IndexError, AttributeError.
    """
    columns = row["sizes"].items()
    for place, (key, metadata) in enumerate(zip(row["keys"], _metadata_of(row), strict=True)):
        present = {name: sizes[place] for name, sizes in columns if sizes[place] is not None}
        yield IndexEntry(key, present, url, metadata)


def _metadata_of(row: Row) -> Iterable[Metadata | None]:
    """Return the metadata of each sample of a row: None from a table without."""
    if "metadata" not in row:
        return repeat(None, len(row["keys"]))
    found = [{} if each is None else each for each in row["metadata"]]
    if not all(type(each) is dict for each in found):
        raise TypeError("metadata of samples must be objects")
    return found
