"""Interface of the formats of shards: their names, their index, and the values in them.

The daemon calls a format to recognise, copy and index a shard as it arrives, and the client calls
it to decode values.

- A sample is one training example: in a tar, files with the same key; in other formats, a row or a
  record.
- A column consists of the values that all samples have under the same name. In a tar, the name is a
  member's extension.
- A cell is the bytes of one column of one sample.
- An encoding is a format's name for the way in which it stores the values of a column; "" stands
  for plain bytes.
- A sidecar is the index of a shard as the cache stores it, in a file next to the shard.
- A companion is another file of the dataset without which a shard cannot be indexed. Few formats
  have one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from shardcache.shared.exceptions import ConfigError, UnsupportedShardError
from shardcache.shared.tarindex.members import Read
from shardcache.shared.tarindex.tables import Samples

Decoder = Callable[[bytes], Any]
"""Returns the value of a cell, given its bytes."""

RowsDecoder = Callable[[int, bytes], list[dict[str, Any]]]
"""`decode(first_column, cells)` returns consecutive samples, each a dict of all its values.

`cells` is a piece of the shard, from the samples' first cell to their last cell; `first_column` is
the number of the first cell's column. A sample without any cells leaves no trace in `cells`, so it
may be missing from the result. The caller then sets `__key__`, the sample's key, and `__url__`, its
shard's url, in each dict. Samples with large cells are decoded value by value instead, because
parsing all of their bytes would take longer than the calls that it saves.
"""

RunDecoder = Callable[[bytes, int, memoryview], Sequence[Any]]
"""`decode(cells, begin, ends)` returns the values of a run: consecutive cells of one column.

`cells` has the bytes of all these cells. The other arguments are offsets in the shard, not in
`cells`: `begin` is where the first cell begins, and `ends` has the end of each cell. The values are
those that the column's `Decoder` would return.
"""

Crc32c = Callable[[bytes, int], int]
"""`crc32c(data, crc)` continues a CRC32C with further bytes, `data`, and returns it.

`crc` is the CRC32C of the bytes before `data`; 0 if there are none.
"""

_COMPRESSIONS = {
    ".gz": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".bz2": "bzip2",
    ".xz": "xz",
}


def with_compressions(*suffixes: str) -> dict[str, str | None]:
    """Return plain suffixes and their compressed variants, each with its compression or None."""
    compressions: dict[str, str | None] = dict.fromkeys(suffixes)
    for suffix in suffixes:
        for second_suffix, compression in _COMPRESSIONS.items():
            compressions[suffix + second_suffix] = compression
    return compressions


@dataclass(frozen=True, slots=True)
class IndexOptions:
    """Options of indexing a shard; a format ignores those that do not concern it.

    Attributes:
        require_end: True to reject a tar without an end-of-archive block.
        ignore_trailing_data: True to accept a tar with data after the end-of-archive block.
        require_adjacent: True to reject a tar in which the members of a sample are not next to each
            other.
        companion: the result of `Format.companion_of`; None if the format needs no other file.
        crc32c: computes the CRC32C of bytes, for formats whose records have such a checksum; None
            for other formats. It is passed in because the standard library, to which formats are
            limited, has none.
    """

    require_end: bool = True
    ignore_trailing_data: bool = False
    require_adjacent: bool = True
    companion: str | None = None
    crc32c: Crc32c | None = None


@dataclass(frozen=True, slots=True)
class ListedShard:
    """A shard as a dataset's index file lists it, where the format's own writer made that file.

    Attributes:
        name: name of the shard, relative to the index file.
        samples: number of samples in the shard.
        size_bytes: size of the shard in the object store; None if the index file does not state it.
    """

    name: str
    samples: int
    size_bytes: int | None


class Walk(Protocol):
    """Indexes a shard while it is arriving, from its beginning to its end.

    Attributes:
        samples: the samples found so far; the last sample may be incomplete.
    """

    samples: Samples

    def advance(self) -> bool:
        """Index the next member or sample; return False at the end of the shard.

        Waits for the shard's bytes. Raises ShardError, and the errors of the function `read` that
        `Format.walk` was given.
        """
        ...


class Format:
    """A format of shards. By default, the methods treat cells as plain bytes.

    Attributes:
        name: name of the format in sidecars and messages.
        suffixes: the suffixes of the format's files, in lower case, each with the compression that
            it states, or None for a plain file.
        magic: first bytes of a file that is not compressed; empty if it may begin with any bytes.
        can_walk_early: True if `walk` can read a shard that is still arriving.
        may_repack: True if the cache may store another file than the downloaded one; see
            `stored_copy`.
        companion_name: name of the companion, which is in the same folder as the shard; None if the
            shard is enough.
        has_index_files: True if the format's own writer makes an index file, which
            `listed_shards` reads.
        is_common_outside_datasets: True if files of this format often have nothing to do with
            training, as parquet files do. Where only some files of a folder are shards, these are
            not counted among them.
        may_end_in_number: True if plain files are often named `NAME.SUFFIX-00000-of-00010`, with
            their number after the suffix.
    """

    name: str
    suffixes: Mapping[str, str | None]
    magic: bytes = b""
    can_walk_early: bool = False
    may_repack: bool = False
    companion_name: str | None = None
    has_index_files: bool = False
    is_common_outside_datasets: bool = False
    may_end_in_number: bool = False

    def may_have_name(self, name: str) -> bool:
        """Return True if a file with this name may be of this format.

        A format whose suffixes are common in other files, such as ".bin", checks the name's stem.

        Args:
            name: name without folders, in lower case, which ends with one of the suffixes.
        """
        return True

    def index(self, path: Path, url: str, options: IndexOptions) -> Samples:
        """Return the samples of the cached file at `path`. Blocks.

        `Samples` describes tars: in it, a cell of another format stands for a member of a sample.
        Raises ShardError with the shard's `url`, OSError.
        """
        raise NotImplementedError

    def walk(self, read: Read, size_bytes: int, url: str) -> Walk:
        """Return the walk over a shard that is still arriving.

        Args:
            read: reads bytes of the shard, and waits until they have arrived.
            size_bytes: size of the whole shard.
            url: url of the shard, for errors.
        """
        raise NotImplementedError

    def decoder(self, encoding: str) -> Decoder | None:
        """Return the decoder of a column's values; None for values that are plain bytes.

        Raises UnsupportedShardError for values that must not or cannot be decoded, ConfigError if a
        library is missing. The errors name neither the shard nor the column.
        """
        if encoding:
            raise UnsupportedShardError(
                f"its encoding {encoding!r} is unknown to this release",
                remedy="update shardcache, or leave the column out by members=",
            )
        return None

    def has_image_files(self, encoding: str) -> bool:
        """Return True if a column's cells are image files, from which `decoder` makes images."""
        return False

    def run_decoder(self, encoding: str) -> RunDecoder | None:
        """Return the decoder of many cells at once; None if cells are decoded one by one.

        The caller asks only for an encoding that `decoder` decodes.
        """
        return None

    def rows_decoder(self, columns: Sequence[str]) -> RowsDecoder | None:
        """Return the decoder of whole samples at once; None if columns are decoded one by one.

        The values are the same either way.

        Args:
            columns: names of the shard's columns, in the order of their numbers.
        """
        return None

    def companion_of(self, data: bytes, url: str) -> str:
        """Return the part of the companion that indexing needs, for `IndexOptions.companion`.

        Args:
            data: content of the file with the name `companion_name`.
            url: url of the companion.

        Raises ShardError, with the url of the companion.
        """
        raise NotImplementedError

    def listed_shards(self, index: Mapping[str, Any]) -> Iterator[ListedShard] | None:
        """Return the shards in a parsed index file; None for the index file of another format.

        Raises ValueError, with a reason, for an index file that is damaged or not supported.
        """
        return None

    def stored_copy(self, path: Path, url: str) -> BinaryIO | None:
        """Return a stream of the bytes to cache in place of the downloaded file at `path`. Blocks.

        Returns None if the file itself is to be cached. The caller closes the stream. Raises
        ShardError with the shard's `url`, OSError.
        """
        return None


def missing_package_error(package: str, task: str) -> ConfigError:
    """Return the error for a task, such as "decoding images", that needs a missing package."""
    return ConfigError(
        f"{task} needs the Python package {package}",
        remedy=f"pip install {package}; or leave the column out by members=",
    )
