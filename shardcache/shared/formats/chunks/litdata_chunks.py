"""Chunks, the shards of LitData: samples with typed leaves, and an index.json that describes them.

A leaf is one value of a sample; other formats call it a cell. A chunk has the offsets of its
samples (`offset_table`), and in each sample the size of every leaf, then the leaves. Only the
`config` in the index.json in the same folder says what the leaves are. So a chunk cannot be indexed
without this file, its companion. Values are decoded as `litdata` decodes them.

Two kinds of chunks are cached in another form. A chunk of texts, numbers or nested values may hold
rows in Arrow's format instead of samples: it is cached as a stream of rows, as parquet files are. A
chunk in which groups of samples are compressed is cached as a plain chunk (`litdata_frames`).
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from shardcache.shared.exceptions import CorruptShardError, UnsupportedShardError
from shardcache.shared.formats import cell_values
from shardcache.shared.formats.arrow import arrow_rows
from shardcache.shared.formats.arrow.arrow_process import rows_of
from shardcache.shared.formats.chunks import litdata_values
from shardcache.shared.formats.chunks.columns import ChunkColumns, ColumnWalk
from shardcache.shared.formats.chunks.litdata_frames import is_framed, plain_chunk
from shardcache.shared.formats.chunks.offset_table import (
    U32_BYTES,
    ForwardReader,
    read_offsets,
    u32s,
)
from shardcache.shared.formats.files import opened
from shardcache.shared.formats.format import Decoder, Format, IndexOptions, ListedShard
from shardcache.shared.tarindex.members import Read
from shardcache.shared.tarindex.tables import Samples

# Names of chunks, such as chunk-0-12.bin, chunk-0-12.zstd.bin and chunk-0-12.zstd:4.bin.
_NAME = re.compile(r"chunk-[0-9]+-[0-9]+(?:\.zstd(?::[0-9]+)?)?\.bin")
_ZSTD_LEVELS = range(1, 23)
_ROWS_MAGIC = b"LDARW01\0"  # a chunk with rows in Arrow's format ends with these bytes
_CELL_PREFIX = "cell:"  # prefix of the encodings of rows' cells
_ARROW_STREAM = b"\xff\xff\xff\xff"  # a cached stream of rows begins with these bytes

_REWRITE_WITHOUT = "write the dataset again with litdata.optimize(…) without "
_UNSUPPORTED_REMEDY = "read it with litdata, or write shards with `shardcache write`"
# Members of an index.json's `config` that are needed to index a chunk, or to refuse it.
_USED_MEMBERS = (
    "compression",
    "compression_level",
    "data_format",
    "data_spec",
    "encryption",
    "item_loader",
)


class LitDataFormat(Format):
    """Chunks that `litdata.optimize` writes, each plain or compressed as a whole."""

    name = "litdata"
    suffixes = {  # noqa: RUF012  # a Mapping
        ".bin": None,
        ".zstd.bin": "zstd",
        **{f".zstd:{level}.bin": "zstd" for level in _ZSTD_LEVELS},
    }
    companion_name = "index.json"
    has_index_files = True
    may_repack = True

    def may_have_name(self, name: str) -> bool:
        """Return True if a file is named as chunks are, since many other files end in .bin."""
        return _NAME.fullmatch(name) is not None

    def index(self, path: Path, url: str, options: IndexOptions) -> Samples:
        """Return the samples of a chunk. Blocks.

        Raises CorruptShardError, TruncatedShardError, UnsupportedShardError, OSError.
        """
        with opened(path) as (read, size_bytes):
            if _is_arrow_stream(read):
                return _with_cell_prefix(arrow_rows.index(path, url))
            columns = _columns(options.companion or "", url)
            bytes_at = ForwardReader(read, size_bytes, url)
            offsets = read_offsets(bytes_at, size_bytes, url)
            # Bytes after the last sample are allowed only if they are rows: earlier releases of
            # LitData have written the samples, and then the same samples as rows.
            if offsets[-1] != size_bytes and _rows_span(read, size_bytes, url) is None:
                raise CorruptShardError(
                    f"the last sample ends at byte {offsets[-1]}, but the file at byte "
                    f"{size_bytes}",
                    url=url,
                )
            samples = ColumnWalk(bytes_at, offsets, columns, url).finish()
        return samples

    def stored_copy(self, path: Path, url: str) -> BinaryIO | None:
        """Return the rows of a chunk of rows, or the plain form of a compressed chunk. Blocks.

        Raises CorruptShardError, TruncatedShardError, UnsupportedShardError, OSError;
        MissingPackageError if rows need pyarrow.
        """
        with opened(path) as (read, size_bytes):
            if _is_arrow_stream(read):
                # `index` would take such a file for cached rows. No chunk begins with these bytes,
                # which would be a count of 2**32 - 1 samples.
                raise CorruptShardError("the file is not a chunk of LitData", url=url)
            if is_framed(read):
                return plain_chunk(path, url)
            span = _rows_span(read, size_bytes, url)
            if span is None or _has_samples(read, size_bytes, url):
                return None
        return rows_of("chunk of rows", path, url, span)

    def decoder(self, encoding: str) -> Decoder | None:
        """Return the decoder of a leaf, or of a row's cell if the encoding has `_CELL_PREFIX`.

        The encoding of a leaf is its entry in `data_format`; see `litdata_values`.
        """
        if encoding.startswith(_CELL_PREFIX):
            return cell_values.DECODERS.get(encoding.removeprefix(_CELL_PREFIX))
        return litdata_values.decoder(encoding)

    def has_image_files(self, encoding: str) -> bool:
        """As `Format.has_image_files`."""
        kind, _, _ = encoding.partition(":")
        return kind in litdata_values.IMAGE_FILES

    def companion_of(self, data: bytes, url: str) -> str:
        """Return the part of an index.json's `config` that describes the leaves, as JSON."""
        try:
            config = json.loads(data)["config"]
            used_members = {name: config.get(name) for name in _USED_MEMBERS}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exn:
            raise CorruptShardError(
                f"it does not describe chunks of LitData ({exn!r})",
                url=url,
                remedy="upload the index.json that litdata.optimize wrote with the chunks",
            ) from exn
        return json.dumps(used_members)

    def listed_shards(self, index: Mapping[str, Any]) -> Iterator[ListedShard] | None:
        """Return the chunks in an index.json of LitData; None if it is of another format.

        Raises ValueError if the chunks are not supported.
        """
        rows = index.get("chunks")
        config = index.get("config")
        if not isinstance(rows, list) or not isinstance(config, dict):
            return None
        if config.get("format") == "mds":
            raise ValueError("it is an index by LitData of MDS shards: use the index.json of MDS")
        limitation = _limitation_of(config)
        if limitation is not None:
            raise ValueError(f"{limitation.reason}: {limitation.remedy}")
        return map(_listed_chunk, rows)


def _listed_chunk(row: Any) -> ListedShard:
    """Return the chunk that a row of an index.json lists. Raises ValueError."""
    fields = row if isinstance(row, dict) else {}
    name = fields.get("filename")
    samples = fields.get("chunk_size")
    if type(name) is not str or type(samples) is not int or samples < 0:
        raise ValueError(f"a chunk has no filename, or no chunk_size: {str(row)[:100]}")
    # The size in the object store is unknown: `chunk_bytes` is the size before compression.
    return ListedShard(name, samples, size_bytes=None)


class _Limitation(NamedTuple):
    """A reason why chunks are not supported, and the remedy for it."""

    reason: str
    remedy: str


def _limitation_of(config: Mapping[str, Any]) -> _Limitation | None:
    """Return why chunks with this `config` are not supported; None if they are."""
    if config.get("encryption"):
        return _Limitation("its chunks are encrypted", _REWRITE_WITHOUT + "encryption=")
    loader = config.get("item_loader") or "PyTreeLoader"
    if loader != "PyTreeLoader":
        return _Limitation(
            f"chunks for the item loader {loader} are not supported",
            _UNSUPPORTED_REMEDY,
        )
    if config.get("compression_level") == "sample":
        return _Limitation(
            "each of its samples is compressed by itself (compression_level='sample')",
            _REWRITE_WITHOUT + "it",
        )
    return None


def _columns(companion: str, url: str) -> ChunkColumns:
    """Return the columns that a companion describes.

    Args:
        companion: the result of `companion_of`.
        url: url of the chunk, for errors.

    Raises CorruptShardError; UnsupportedShardError for chunks that are not supported.
    """
    try:
        config = json.loads(companion)
        encodings = config["data_format"]
        names = _leaf_names(json.loads(config["data_spec"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exn:
        raise CorruptShardError(
            f"the config in its index.json is damaged ({exn!r})",
            url=url,
            remedy="upload the index.json that litdata.optimize wrote with the chunks",
        ) from exn
    limitation = _limitation_of(config)
    if limitation is not None:
        raise UnsupportedShardError(limitation.reason, url=url, remedy=limitation.remedy)
    if names is None:
        raise UnsupportedShardError(
            "samples of nested dicts or lists are not supported",
            url=url,
            remedy=_UNSUPPORTED_REMEDY,
        )
    no_fixed_sizes = [None] * len(names)
    return ChunkColumns(names, encodings, no_fixed_sizes)


def _leaf_names(spec: Any) -> list[str] | None:
    """Return the names of a sample's leaves; None if samples are nested.

    The names are the keys of a sample that is a dict, and otherwise numbers.

    Args:
        spec: the structure of samples as `litdata` writes it: a version, and a tree of types,
            contexts and children.

    Raises KeyError, TypeError, ValueError, AttributeError for a spec that is not such a tree.
    """
    _version, root = spec
    children = root["children_spec"]
    if root["type"] is None:  # a sample is a single leaf, not a container
        return ["0"]
    if any(child["children_spec"] for child in children):
        return None
    # The type is that of a dict, OrderedDict or defaultdict.
    if root["type"].lower().endswith("dict"):
        context = root["context"]
        names = json.loads(context) if isinstance(context, str) else context
        if isinstance(names, dict):  # the context of a defaultdict, which also names its factory
            names = names["dict_context"]
        return [str(name) for name in names]
    return [str(number) for number in range(len(children))]


def _is_arrow_stream(read: Read) -> bool:
    """Return True for the stream of rows that is cached in place of a chunk of rows."""
    return read(0, 0, len(_ARROW_STREAM)) == _ARROW_STREAM


def _with_cell_prefix(samples: Samples) -> Samples:
    """Mark the encodings of rows' cells with `_CELL_PREFIX`, and return the samples.

    The mark is needed since leaves have encodings of the same names that store other bytes. Plain
    bytes need no mark.
    """
    samples.encodings = [
        _CELL_PREFIX + encoding if encoding else "" for encoding in samples.encodings
    ]
    return samples


def _rows_span(read: Read, size_bytes: int, url: str) -> tuple[int, int] | None:
    """Return start and end of the rows at the end of a chunk; None for a chunk without rows.

    The rows are followed by their size, u32, and `_ROWS_MAGIC`. Raises CorruptShardError for rows
    that would begin before the chunk.
    """
    tail_bytes = U32_BYTES + len(_ROWS_MAGIC)
    if size_bytes < tail_bytes:
        return None
    tail = read(size_bytes - tail_bytes, tail_bytes, tail_bytes)
    if tail[U32_BYTES:] != _ROWS_MAGIC:
        return None
    end = size_bytes - tail_bytes
    [rows_bytes] = u32s(tail[:U32_BYTES])
    start = end - rows_bytes
    if start < 0:
        raise CorruptShardError(
            f"its table of rows is damaged: it would begin {-start} bytes before the file", url=url
        )
    return start, end


def _has_samples(read: Read, size_bytes: int, url: str) -> bool:
    """Return True if a chunk with rows has samples before the rows."""
    offsets = read_offsets(ForwardReader(read, size_bytes, url), size_bytes, url)
    return offsets[0] != offsets[-1]


LITDATA = LitDataFormat()
