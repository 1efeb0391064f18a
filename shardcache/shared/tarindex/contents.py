"""Sample tables: which samples the shards of a dataset have, for readers that choose among them.

A sample table is a tar of JSON rows, made by `shardcache index --samples`. A row lists samples of
one shard; a shard has several rows if it has many samples. A row has these fields:

    shard       number of the shard in the index file
    version     version of the shard
    samples     number of samples in the shard
    first       number of the first sample that the row lists
    keys        keys of the samples that the row lists
    sizes       for each extension, the size in bytes of each sample's member; null where a sample
                has no such member
    first_block, blocks, irregular
                places of the samples in the tar (`spans`); missing if an earlier release wrote the
                table, or the tar is compressed
    metadata    for each sample, an object from one small JSON member; null for a sample without
                that member; missing if the table was made without metadata

`select()` of the client chooses samples by their keys, sizes and metadata.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import Any

from shardcache.shared.exceptions import ConfigError, MetadataError
from shardcache.shared.tarindex.named_members import MetadataMember
from shardcache.shared.tarindex.spans import irregular_in
from shardcache.shared.tarindex.tables import Tables, TarBytes, key_of, member_spans, members_of

Metadata = dict[str, Any]
Row = dict[str, Any]

SUFFIX = ".samples"
"""Ending of a sample table's url; the index file in the same folder ends with `.json` instead."""

MAX_METADATA_BYTES = 16 * 1024
"""Limit for the metadata of one sample, as JSON."""

# Limit for a member from which metadata is taken: perhaps only some of its fields.
_MAX_MEMBER_BYTES = 1024 * 1024
# Maximum number of samples in a row: a shard of text may have millions of samples, and a row should
# take no more than a few megabytes.
_MAX_ROW_SAMPLES = 50_000
_MAX_ROW_SAMPLES_WITH_METADATA = 1_000  # such a row takes 16 MB at worst


def read_metadata(
    tables: Tables,
    tar: TarBytes,
    member: MetadataMember,
    url: str,
) -> Iterator[Metadata | None]:
    """Yield the metadata of each sample of a shard; None for samples that lack the member.

    Only these members of the tar are read. Raises MetadataError, with `url`, for a member that is
    not a JSON object, or is too large.

    Args:
        tables: the samples.
        tar: the bytes of the tar.
        member: the extension of the members with metadata, and the fields that are wanted.
        url: url of the shard.
    """
    for sample, (start, end) in enumerate(member_spans(tables, member.extension)):
        lacks_member = (start, end) == (0, 0)
        if lacks_member:
            yield None
            continue
        try:
            _check_size(end - start, _MAX_MEMBER_BYTES)
            metadata = _parse_metadata(tar[start:end], member.fields)
        except (ValueError, TypeError, RecursionError) as exn:
            where = f"the member {member.extension!r} of the sample {key_of(tables, sample)!r}"
            raise MetadataError(f"{where} holds no valid metadata: {exn}", url=url) from exn
        yield metadata


def _parse_metadata(data: bytes, wanted_fields: Sequence[str]) -> Metadata:
    """Return the metadata in a member. Raises ValueError, TypeError or RecursionError.

    Args:
        data: content of the member.
        wanted_fields: fields to return, if the member has them; empty for all fields.
    """
    metadata = json.loads(data)
    if not isinstance(metadata, dict):
        raise TypeError(f"a {type(metadata).__name__}, not an object")
    if wanted_fields:
        metadata = {name: metadata[name] for name in wanted_fields if name in metadata}
    compact = json.dumps(metadata, separators=(",", ":"))
    _check_size(len(compact), MAX_METADATA_BYTES)
    return metadata


def _check_size(size_bytes: int, max_bytes: int) -> None:
    """Raise ValueError if a size is above its limit."""
    if size_bytes > max_bytes:
        raise ValueError(f"{size_bytes:,} bytes, more than {max_bytes:,}")


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A sample as its shard's index describes it.

    Attributes:
        key: the sample's `__key__`.
        sizes: size in bytes of each of the sample's members, by extension.
        url: url of the sample's shard, which is the sample's `__url__`.
        rows: if the dataset is joined with tables (the client's `Joined`), the sample's row in each
            of them, by the table's prefix. A row maps columns to values; it is empty if the table
            has no row for the sample.
    """

    key: str
    sizes: Mapping[str, int]
    url: str
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, kw_only=True, repr=False)
    _metadata: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The JSON object of the member named by `shardcache index --metadata`.

        The object is empty if the sample has no such member. Raises ConfigError if the table was
        made without metadata.
        """
        if self._metadata is None:
            raise ConfigError(
                "the table of samples has no metadata",
                url=self.url,
                remedy="write both files again: "
                "shardcache index URL... -o index.json --samples --metadata json",
            )
        return self._metadata


def rows_of(
    tables: Tables,
    metadata: Iterator[Metadata | None] | None = None,
    max_samples: int = _MAX_ROW_SAMPLES,
    blocks: Iterator[int] | None = None,
) -> Iterator[Row]:
    """Yield the rows of a shard: at least one, even if the shard has no samples.

    Args:
        tables: the samples.
        metadata: yields the metadata of each sample, or None for a sample without metadata; None
            for a table without metadata.
        max_samples: maximum number of samples in a row.
        blocks: yields the number of blocks of each sample, as `spans.blocks_of` does; None for a
            table without the places of samples.
    """
    samples = len(tables.member_ends)
    samples_per_row = max_samples
    if metadata is not None:
        samples_per_row = min(max_samples, _MAX_ROW_SAMPLES_WITH_METADATA)
    first_block = 0
    for first in range(0, max(samples, 1), samples_per_row):
        numbers = range(first, min(first + samples_per_row, samples))
        row: Row = {
            "samples": samples,
            "first": first,
            "keys": [key_of(tables, number) for number in numbers],
            "sizes": _sizes_of(tables, numbers),
        }
        if blocks is not None:
            row["first_block"] = first_block
            row["blocks"] = list(islice(blocks, len(numbers)))
            row["irregular"] = irregular_in(tables, numbers, row["blocks"], row["sizes"])
            # A number is negative if its sample cannot be read from its blocks alone.
            first_block += sum(map(abs, row["blocks"]))
        if metadata is not None:
            row["metadata"] = list(islice(metadata, len(numbers)))
        yield row


def _sizes_of(tables: Tables, numbers: range) -> dict[str, list[int | None]]:
    """Return the row's field `sizes` for some samples, given by their numbers."""
    sizes: dict[str, list[int | None]] = {}
    for place, number in enumerate(numbers):
        for member in members_of(tables, number):
            extension = tables.extensions[tables.extension_ids[member]]
            if extension not in sizes:
                sizes[extension] = [None] * len(numbers)
            sizes[extension][place] = tables.ends[member] - tables.starts[member]
    return sizes


def entries_of(row: Row, url: str) -> Iterator[IndexEntry]:
    """Yield the samples of a row, which belongs to the shard at `url`.

    Raises KeyError, TypeError, ValueError, IndexError, AttributeError for a row with other fields,
    or values of other types.
    """
    columns = row["sizes"].items()
    keys_and_metadata = zip(row["keys"], _metadata_of(row), strict=True)
    for place, (key, metadata) in enumerate(keys_and_metadata):
        member_sizes = {name: sizes[place] for name, sizes in columns if sizes[place] is not None}
        yield IndexEntry(key, member_sizes, url, metadata)


def _metadata_of(row: Row) -> Iterable[Metadata | None]:
    """Return the metadata of each sample of a row; empty for a sample without metadata.

    If the table was made without metadata, the result has None for each sample.
    """
    if "metadata" not in row:
        return repeat(None, len(row["keys"]))
    metadata = [{} if each is None else each for each in row["metadata"]]
    if not all(type(each) is dict for each in metadata):
        raise TypeError("metadata of samples must be objects")
    return metadata
