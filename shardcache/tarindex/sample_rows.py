"""Tables of samples, for choosing samples without their bytes: keys, sizes of members, metadata.

A sample table is a tar of JSON rows, made by `shardcache index --samples`. A row has `shard`, the number of the shard
in the index file, and its `version`; `samples`, the number of samples in the shard; `first`, the number of the first
one that it lists; their `keys`; for each extension under `sizes`, the sizes in bytes, null where a sample has no such
member; and if the table was made with metadata, under `metadata` an object for each sample, from one small JSON member
of it, null where a sample has none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import Any, Self

from shardcache.errors import ConfigError, MetadataError
from shardcache.tarindex.tables import Tables, TarBytes, check_extension, key_of, member_spans

Metadata = dict[str, Any]

MAX_METADATA_BYTES = 16 * 1024
"""Limit for the metadata of one sample, as JSON."""

_MAX_MEMBER_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class MetadataMember:
    """The member of each sample that holds its metadata.

    Attributes:
        extension: of the member.
        fields: of its JSON object that are metadata; empty for all.
    """

    extension: str
    fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise ConfigError for an extension that no member has."""
        check_extension(self.extension, "json")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Build from `EXTENSION`, or `EXTENSION:FIELD,FIELD`. Raises ConfigError."""
        extension, _, fields = text.partition(":")
        return cls(extension, tuple(filter(None, fields.split(","))))


def read_metadata(tables: Tables, tar: TarBytes, member: MetadataMember, url: str) -> Iterator[Metadata | None]:
    """Yield the metadata of each sample of a shard; None for samples that lack the member.

    Args:
        tar: the bytes of the tar, of which only these members are read.
        url: url for error messages.

    Raises MetadataError for a member that is not a JSON object, or too large.
    """
    for sample, (start, end) in enumerate(member_spans(tables, member.extension)):
        if (start, end) == (0, 0):
            yield None
            continue
        try:
            _check(end - start, _MAX_MEMBER_BYTES)
            found = json.loads(tar[start:end])
            if isinstance(found, dict) and member.fields:
                found = {field: found[field] for field in member.fields if field in found}
            _check(len(json.dumps(found, separators=(",", ":"))), MAX_METADATA_BYTES)
        except (ValueError, RecursionError) as exn:
            raise _unsuitable(str(exn), key_of(tables, sample), member, url) from exn
        if not isinstance(found, dict):
            raise _unsuitable(f"a {type(found).__name__}, not an object", key_of(tables, sample), member, url)
        yield found


def _check(size_bytes: int, max_bytes: int) -> None:
    if size_bytes > max_bytes:
        raise ValueError(f"{size_bytes:,} bytes, more than {max_bytes:,}")


def _unsuitable(reason: str, key: str, member: MetadataMember, url: str) -> MetadataError:
    message = f"the member {member.extension!r} of the sample {key!r} holds no valid metadata: {reason}"
    return MetadataError(message, url=url)


Row = dict[str, Any]

SUFFIX = ".samples.tar"
"""Ending of a sample table's url, in place of the `.json` of the index file beside it."""

_MAX_SAMPLES = 50_000  # a few megabytes: shards of text may have millions of samples
_MAX_WITH_METADATA = 1_000  # 16 MB at worst


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
    tables: Tables, metadata: Iterator[Metadata | None] | None = None, max_samples: int = _MAX_SAMPLES
) -> Iterator[Row]:
    """Yield the rows of a shard, each of at most `max_samples` samples; a shard without samples has one row, too.

    Args:
        metadata: of each sample, None for one without; or None for a table without metadata.
    """
    samples = len(tables.member_ends)
    step = max_samples if metadata is None else min(max_samples, _MAX_WITH_METADATA)
    for first in range(0, samples or 1, step):
        numbers = range(first, min(first + step, samples))
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
