"""Interface of the formats of shards: their names, their index, and the values in them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from shardcache.errors import ConfigError, UnsupportedShardError
from shardcache.tarindex.members import Read
from shardcache.tarindex.tables import Samples

Decoder = Callable[[bytes], Any]
"""Returns the value of a column, given its bytes."""

RowsDecoder = Callable[[int, bytes], list[dict[str, Any]]]
"""Returns samples that follow each other, none of whose columns is large, with all their values.

It is given the number of the first sample's first column, and the bytes from its start to the end
of the last sample's last one. A sample that has no columns at all may be missing from the result.
The caller has to set the values of `__key__` and `__url__`.
"""

RunDecoder = Callable[[bytes, int, memoryview], Sequence[Any]]
"""Returns the values of cells of one column that lie one after another.

It is given their bytes, where these begin in the shard, and where each cell ends there, as a table
of numbers. The values are those of the column's `Decoder`.
"""

Crc32c = Callable[[bytes, int], int]
"""Returns the CRC32C of bytes that follow others, given the CRC32C of these, 0 for none."""

_COMPRESSIONS = {
    ".gz": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".bz2": "bzip2",
    ".xz": "xz",
}


def with_compressions(*suffixes: str) -> dict[str, str | None]:
    """Return the suffixes of plain and compressed files, each with its compression or None."""
    compressions: dict[str, str | None] = dict.fromkeys(suffixes)
    for suffix in suffixes:
        for ending, compression in _COMPRESSIONS.items():
            compressions[suffix + ending] = compression
    return compressions


@dataclass(frozen=True, slots=True)
class IndexOptions:
    """Options of indexing a shard, beside its file.

    Attributes:
        require_end: reject a tar without an end-of-archive block.
        ignore_trailing_data: accept a tar with data after that block.
        require_adjacent: reject a tar in which a key comes again with other members.
        companion: what `Format.companion_of` returned; None if the format needs none.
        crc32c: computes the CRC32C of bytes, for formats whose records have one.
    """

    require_end: bool = True
    ignore_trailing_data: bool = False
    require_adjacent: bool = True
    companion: str | None = None
    crc32c: Crc32c | None = None


@dataclass(frozen=True, slots=True)
class ListedShard:
    """A shard in the index file that a format's own writer has made.

    Attributes:
        name: relative to the index file.
        samples: number of them.
        size_bytes: in the object store; None if the file does not say it.
    """

    name: str
    samples: int
    size_bytes: int | None


class Walk(Protocol):
    """A shard that is still arriving, indexed from its beginning.

    Attributes:
        samples: those found so far; the last one may be incomplete.
    """

    samples: Samples

    def advance(self) -> bool:
        """Find more of the shard; return False at its end.

        Raises what `read` raises, and ShardError.
        """
        ...


class Format:
    """A format of shards. Subclasses override what differs from a file of plain bytes.

    Attributes:
        name: in sidecars and messages.
        suffixes: of files, in lower case, with the compression that each states.
        magic: first bytes of a plain file; empty if they may be any.
        reads_early: True if `walk` reads a shard that is still arriving.
        repacks: True if `stored_copy` may return another file than the object.
        needs: name of the file in the same folder without which a shard cannot be indexed.
        lists: True if `listed` reads an index file that the format's own writer makes.
        is_often_a_file: True if other programs read such files just as often. Where shards and
            other files are both expected, it counts as another file.
        is_numbered_behind: True if plain files are often named `NAME.SUFFIX-00000-of-00010`, with
            their number behind the suffix.
    """

    name: str
    suffixes: Mapping[str, str | None]
    magic: bytes = b""
    reads_early: bool = False
    repacks: bool = False
    needs: str | None = None
    lists: bool = False
    is_often_a_file: bool = False
    is_numbered_behind: bool = False

    def has_name(self, name: str) -> bool:
        """Return whether a file may have this name, which ends with one of the suffixes."""
        return True

    def index(self, path: Path, url: str, options: IndexOptions) -> Samples:
        """Return the samples of the cached file at `path`. Blocks.

        A member is one cell: the bytes of one column of one sample. Raises ShardError with the
        shard's `url`, OSError.
        """
        raise NotImplementedError

    def walk(self, read: Read, size_bytes: int, url: str) -> Walk:
        """Return the walk over a shard that is still arriving.

        Args:
            read: returns bytes of the shard, once they have arrived.
            size_bytes: of the whole shard.
            url: for errors.
        """
        raise NotImplementedError

    def decoder(self, encoding: str) -> Decoder | None:
        """Return the decoder of a column's values; None for bytes.

        Raises UnsupportedShardError for values that must not or cannot be decoded, ConfigError if a
        library is missing. Both name neither shard nor column.
        """
        if encoding:
            raise UnsupportedShardError(
                f"its encoding {encoding!r} is unknown to this release",
                remedy="update shardcache, or leave the column out by members=",
            )
        return None

    def run_decoder(self, encoding: str) -> RunDecoder | None:
        """Return the decoder of many cells at once; None if they are decoded one by one.

        Only for an encoding that `decoder` decodes.
        """
        return None

    def rows_decoder(self, columns: Sequence[str]) -> RowsDecoder | None:
        """Return the decoder of whole samples at once; None if columns are decoded one by one.

        The same values are the result either way.

        Args:
            columns: names of the shard's.
        """
        return None

    def companion_of(self, data: bytes, url: str) -> str:
        """Return the extract that indexing a shard needs, of the file that `needs` names.

        Args:
            data: content of that file.
            url: of the same.

        Raises ShardError, with the file's `url`.
        """
        raise NotImplementedError

    def listed(self, index: Mapping[str, Any]) -> Iterator[ListedShard] | None:
        """Return the shards in a parsed index file; None if it is of another format.

        Raises ValueError, with a reason, for one that is damaged or not supported.
        """
        return None

    def stored_copy(self, path: Path, url: str) -> BinaryIO | None:
        """Return the stream of bytes to cache in place of a file; None to keep the file. Blocks.

        The caller closes it. Raises ShardError with the shard's `url`, OSError.
        """
        return None


def needs_package(package: str, values: str) -> ConfigError:
    """Return the error for values whose decoding needs a package that is not installed."""
    return ConfigError(
        f"{values} needs the Python package {package}",
        remedy=f"pip install {package}; or leave the column out by members=",
    )
