"""Listing of a shard's samples as JSON rows: keys, and sizes of members. The content of a sample table.

A sample table is a tar with such rows, made by `shardcache index --samples`, for choosing samples without their bytes.
A row of a table has `shard`, the number of the shard in the index file, and its `version`; `samples`, the number of
samples in the shard; `first`, the number of the first one that it lists; their
`keys`; and for each extension under `sizes`, the sizes in bytes, null where a sample has no such member.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardcache.tarindex.tables import Tables, key_of

Row = dict[str, Any]

SUFFIX = ".samples.tar"
"""Ending of a sample table's url, in place of the `.json` of the index file beside it."""

_MOST_SAMPLES = 50_000  # a few megabytes: shards of text may have millions of samples


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


def rows_of(tables: Tables, most: int = _MOST_SAMPLES) -> Iterator[Row]:
    """Yield the rows of a shard, each of at most `most` samples; a shard without samples has one row, too."""
    samples = len(tables.member_ends)
    for first in range(0, samples or 1, most):
        numbers = range(first, min(first + most, samples))
        sizes: dict[str, list[int | None]] = {}
        for place, number in enumerate(numbers):
            start = tables.member_ends[number - 1] if number else 0
            for member in range(start, tables.member_ends[number]):
                extension = tables.extensions[tables.extension_ids[member]]
                column = sizes.setdefault(extension, [None] * len(numbers))
                column[place] = tables.ends[member] - tables.starts[member]
        yield {
            "samples": samples,
            "first": first,
            "keys": [key_of(tables, number) for number in numbers],
            "sizes": sizes,
        }


def entries_of(row: Row, url: str) -> Iterator[IndexEntry]:
    """Yield the samples of a row, of the shard at `url`. Raises KeyError, TypeError, IndexError, AttributeError."""
    columns = row["sizes"].items()
    for place, key in enumerate(row["keys"]):
        yield IndexEntry(key, {name: sizes[place] for name, sizes in columns if sizes[place] is not None}, url)
