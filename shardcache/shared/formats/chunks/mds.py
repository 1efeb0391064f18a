"""MDS, the format of MosaicML Streaming: shards with typed columns, and an index.json of them.

A shard describes itself: the offsets of its samples (`offset_table`) are followed by a JSON object
with the names, encodings and fixed sizes of its columns. Values are decoded as `streaming`, the
Python package, decodes them.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardcache.shared.exceptions import CorruptShardError, UnsupportedShardError
from shardcache.shared.formats.chunks import mds_values
from shardcache.shared.formats.chunks.columns import ChunkColumns, ColumnWalk
from shardcache.shared.formats.chunks.offset_table import (
    U32_BYTES,
    BytesAt,
    ForwardReader,
    read_offsets,
)
from shardcache.shared.formats.files import opened
from shardcache.shared.formats.format import (
    Decoder,
    Format,
    IndexOptions,
    ListedShard,
    Walk,
    with_compressions,
)
from shardcache.shared.tarindex.members import Read
from shardcache.shared.tarindex.tables import Samples

_VERSION = 2
_MAX_CONFIG_BYTES = 16 * 1024 * 1024  # limit for the JSON object that describes the columns
_UNSUPPORTED_REMEDY = (
    "read it with the library that wrote it, or write shards with `shardcache write`"
)


class MdsFormat(Format):
    """MDS shards, each plain or compressed as a whole."""

    name = "mds"
    suffixes = with_compressions(".mds") | {".mds.br": "brotli", ".mds.snappy": "snappy"}
    can_walk_early = True
    has_index_files = True

    def index(self, path: Path, url: str, options: IndexOptions) -> Samples:
        """Return the samples of a shard. Blocks.

        Raises CorruptShardError, TruncatedShardError, UnsupportedShardError, OSError.
        """
        with opened(path) as (read, size_bytes):
            walk = _walk(read, size_bytes, url)
            samples = walk.finish()
        return samples

    def walk(self, read: Read, size_bytes: int, url: str) -> Walk:
        """Return the walk over a shard that is still arriving."""
        return _walk(read, size_bytes, url)

    def decoder(self, encoding: str) -> Decoder | None:
        """Return the decoder of an encoding as MDS names it; see `mds_values`."""
        return mds_values.decoder(encoding)

    def has_image_files(self, encoding: str) -> bool:
        """As `Format.has_image_files`."""
        return encoding in mds_values.IMAGE_FILES

    def listed_shards(self, index: Mapping[str, Any]) -> Iterator[ListedShard] | None:
        """Return the shards in an index.json of MDS; None if it is of another format."""
        rows = index.get("shards")
        if not isinstance(rows, list) or "version" not in index:
            return None
        return map(_listed_shard, rows)


def _walk(read: Read, size_bytes: int, url: str) -> ColumnWalk:
    """Read the header of a shard, and return the walk over its samples.

    Raises CorruptShardError, TruncatedShardError, UnsupportedShardError, and what `read` raises.
    """
    bytes_at = ForwardReader(read, size_bytes, url)
    offsets = read_offsets(bytes_at, size_bytes, url)
    if offsets[-1] != size_bytes:
        raise CorruptShardError(
            f"the last sample ends at byte {offsets[-1]}, but the file at byte {size_bytes}",
            url=url,
        )
    config_start = U32_BYTES + U32_BYTES * len(offsets)  # after the count and the offsets
    columns = _columns(bytes_at, config_start, offsets[0], url)
    return ColumnWalk(bytes_at, offsets, columns, url)


def _columns(bytes_at: BytesAt, start: int, end: int, url: str) -> ChunkColumns:
    """Return the columns that the JSON object between two offsets describes."""
    if end - start > _MAX_CONFIG_BYTES:
        raise CorruptShardError(
            f"its description of columns claims {end - start:,} bytes",
            url=url,
        )
    try:
        config = json.loads(bytes_at(start, end - start))
        columns = ChunkColumns(
            config["column_names"],
            config["column_encodings"],
            # The file has null or 0 for a column without a fixed size.
            [size or None for size in config["column_sizes"]],
        )
    except (ValueError, KeyError, TypeError, RecursionError) as exn:
        raise CorruptShardError(
            f"its description of columns at byte {start} is damaged ({exn!r})",
            url=url,
        ) from exn
    reason = _unsupported_reason(config)
    if reason is not None:
        raise UnsupportedShardError(reason, url=url, remedy=_UNSUPPORTED_REMEDY)
    return columns


def _unsupported_reason(config: Mapping[str, Any]) -> str | None:
    """Return why shards with this description are not supported; None if they are.

    Args:
        config: the description in the shard, or the shard's row in an index.json.
    """
    format_ = config.get("format", "mds")
    version = config.get("version", _VERSION)
    if format_ != "mds":
        return f"shards of the format {format_!r} are not supported, only MDS"
    if version != _VERSION:
        return f"MDS of version {version!r} is not supported, only version {_VERSION}"
    return None


def _listed_shard(row: Any) -> ListedShard:
    """Return the shard that a row of an index.json lists. Raises ValueError."""
    fields = row if isinstance(row, dict) else {}
    reason = _unsupported_reason(fields)
    if reason is not None:
        raise ValueError(reason)
    # A compressed shard has both entries: `zip_data` for the file in the object store, and
    # `raw_data` for its content.
    file = fields.get("zip_data") or fields.get("raw_data")
    file_fields = file if isinstance(file, dict) else {}
    name = file_fields.get("basename")
    samples = fields.get("samples")
    if type(name) is not str or type(samples) is not int or samples < 0:
        raise ValueError(f"a row has no basename, or no number of samples: {str(row)[:100]}")
    size_bytes = file_fields.get("bytes")
    if type(size_bytes) is not int or size_bytes < 0:
        size_bytes = None
    return ListedShard(name, samples, size_bytes)


MDS = MdsFormat()
