"""Contents of samples that shardcache reads: tokens, metadata, and tables of samples.

A table serves to choose samples without their bytes.

A sample table is a tar of JSON rows, made by `shardcache index --samples`. A row has `shard`, the
number of the shard in the index file, and its `version`; `samples`, the number of samples in the
shard; `first`, the number of the first one that it lists; their `keys`; for each extension under
`sizes`, the sizes in bytes, null where a sample has no such member; the samples' places in the tar
(`spans`), unless an earlier release wrote the table, or the tar is compressed; and if the table was
made with metadata, under `metadata` an object for each sample, from one small JSON member of it,
null where a sample has none.
"""

import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import Any, Self

from shardcache.errors import ConfigError, MetadataError, TokensError
from shardcache.tarindex.spans import irregular_in
from shardcache.tarindex.tables import Tables, TarBytes, fault_of, key_of, member_spans

Metadata = dict[str, Any]
Row = dict[str, Any]

SUFFIX = ".samples"
"""Ending of a sample table's url, in place of the `.json` of the index file beside it."""

MAX_METADATA_BYTES = 16 * 1024
"""Limit for the metadata of one sample, as JSON."""

DTYPES = {"uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "int16": 2, "int32": 4, "int64": 8}
"""Sizes in bytes of the types that tokens may have; arrays are little-endian."""

_MAX_MEMBER_BYTES = 1024 * 1024  # of a member with metadata, most of which may be left out
# Samples in a row of a table: a few megabytes, as shards of text may have millions of samples.
_MAX_SAMPLES = 50_000
_MAX_WITH_METADATA = 1_000  # 16 MB at worst

# numpy's format: magic, version, length of the header, and a header that is the text of a dict with
# sorted keys.
_MAGIC = b"\x93NUMPY"
_HEADER = re.compile(
    rb"\{'descr': '[<|]([iu])([1248])', "
    rb"'fortran_order': (?:False|True), "
    rb"'shape': \(([0-9]+),\), ?\}\s*",
)
_KINDS = {b"u": "uint", b"i": "int"}
_MAX_HEADER_BYTES = 1024


def _check_extension(extension: str, example: str) -> None:
    """Raise ConfigError unless members can have this extension; the message has an example."""
    if not extension or extension.startswith("."):
        raise ConfigError(
            f"{extension!r} is not a member extension",
            remedy=f'write it as "{example}", no dot',
        )


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
        _check_extension(self.extension, "json")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Build from `EXTENSION`, or `EXTENSION:FIELD,FIELD`. Raises ConfigError."""
        extension, _, fields = text.partition(":")
        return cls(extension, tuple(filter(None, fields.split(","))))


def read_metadata(
    tables: Tables,
    tar: TarBytes,
    member: MetadataMember,
    url: str,
) -> Iterator[Metadata | None]:
    """Yield the metadata of each sample of a shard; None for samples that lack the member.

    Of the tar, only these members are read. Raises MetadataError, with `url`, for a member that is
    not a JSON object, or too large.
    """
    for sample, (start, end) in enumerate(member_spans(tables, member.extension)):
        if (start, end) == (0, 0):
            yield None
            continue
        try:
            _check_size(end - start, _MAX_MEMBER_BYTES)
            found = json.loads(tar[start:end])
            if not isinstance(found, dict):
                raise TypeError(f"a {type(found).__name__}, not an object")
            if member.fields:
                found = {field: found[field] for field in member.fields if field in found}
            compact = json.dumps(found, separators=(",", ":"))
            _check_size(len(compact), MAX_METADATA_BYTES)
        except (ValueError, TypeError, RecursionError) as exn:
            where = f"the member {member.extension!r} of the sample {key_of(tables, sample)!r}"
            raise MetadataError(f"{where} holds no valid metadata: {exn}", url=url) from exn
        yield found


def _check_size(size_bytes: int, max_bytes: int) -> None:
    if size_bytes > max_bytes:
        raise ValueError(f"{size_bytes:,} bytes, more than {max_bytes:,}")


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A sample as its shard's index describes it.

    Attributes:
        key: its `__key__`.
        sizes: size in bytes of each of its members, by extension.
        url: of its shard, the sample's `__url__`.
        rows: of each `Table` that a `Joined` has, by its prefix: the sample's row by column, empty
            if it has none.
    """

    key: str
    sizes: Mapping[str, int]
    url: str
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, kw_only=True, repr=False)
    _metadata: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The JSON object of the member named by `shardcache index --metadata`.

        It is empty if the sample has none. Raises ConfigError if the table was made without.
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
    max_samples: int = _MAX_SAMPLES,
    blocks: Iterator[int] | None = None,
) -> Iterator[Row]:
    """Yield the rows of a shard, of which there is one even if it has no samples.

    Args:
        tables: the samples.
        metadata: that of each sample, None for one without; or None for a table without metadata.
        max_samples: maximum number of samples in a row.
        blocks: the number of blocks of each sample, negated for some (`spans`); None for a table
            without places.
    """
    samples = len(tables.member_ends)
    step = max_samples if metadata is None else min(max_samples, _MAX_WITH_METADATA)
    first_block = 0
    for first in range(0, samples or 1, step):
        numbers = range(first, min(first + step, samples))
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
            first_block += sum(map(abs, row["blocks"]))
        if metadata is not None:
            row["metadata"] = list(islice(metadata, len(numbers)))
        yield row


def _sizes_of(tables: Tables, numbers: range) -> dict[str, list[int | None]]:
    """Return, by extension, the size of that member in bytes of each sample."""
    sizes: dict[str, list[int | None]] = {}
    for place, number in enumerate(numbers):
        start = tables.member_ends[number - 1] if number else 0
        for member in range(start, tables.member_ends[number]):
            extension = tables.extensions[tables.extension_ids[member]]
            if extension not in sizes:
                sizes[extension] = [None] * len(numbers)
            sizes[extension][place] = tables.ends[member] - tables.starts[member]
    return sizes


def entries_of(row: Row, url: str) -> Iterator[IndexEntry]:
    """Yield the samples of a row, of the shard at `url`.

    Raises KeyError, TypeError, ValueError, IndexError, AttributeError for a row with other fields,
    or values of other types.
    """
    columns = row["sizes"].items()
    samples = zip(row["keys"], _metadata_of(row), strict=True)
    for place, (key, metadata) in enumerate(samples):
        present = {name: sizes[place] for name, sizes in columns if sizes[place] is not None}
        yield IndexEntry(key, present, url, metadata)


def _metadata_of(row: Row) -> Iterable[Metadata | None]:
    if "metadata" not in row:
        return repeat(None, len(row["keys"]))
    found = [{} if each is None else each for each in row["metadata"]]
    if not all(type(each) is dict for each in found):
        raise TypeError("metadata of samples must be objects")
    return found


@dataclass(frozen=True, slots=True)
class TokenMember:
    """The member of each sample that holds its tokens.

    Attributes:
        extension: of the member.
        dtype: a name of `DTYPES`, for plain arrays; None for `.npy` files, which state their own.
    """

    extension: str = "npy"
    dtype: str | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for a type that tokens cannot have."""
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(
                f"tokens cannot be of type {self.dtype!r}",
                remedy=f"choose one of {', '.join(DTYPES)}",
            )
        _check_extension(self.extension, "npy")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Build from `EXTENSION` for `.npy` files, or `EXTENSION:DTYPE`. Raises ConfigError."""
        extension, _, dtype = text.partition(":")
        return cls(extension, dtype or None)

    def __str__(self) -> str:
        return self.extension if self.dtype is None else f"{self.extension}:{self.dtype}"


def tokens_in(data: bytes, member: TokenMember, key: str) -> int:
    """Return the number of tokens in the member of the sample `key`.

    Raises TokensError as `find_tokens`.
    """
    dtype = member.dtype
    start = 0
    if dtype is None:
        dtype, start = _npy_values(data, 0, len(data), key, None)
    return _token_count(len(data) - start, dtype, key, None)


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """The tokens of each sample of a shard; none for samples that lack the member.

    Attributes:
        dtype: a name of `DTYPES`.
        starts: offset of each sample's first token in the tar, in bytes.
        ends: end (exclusive) of each sample's tokens, as a number of tokens from the beginning of
            the shard.
    """

    dtype: str
    starts: "array[int]"
    ends: "array[int]"

    @property
    def tokens(self) -> int:
        """Number of tokens in the shard."""
        return self.ends[-1] if self.ends else 0


def find_tokens(tables: Tables, tar: TarBytes, member: TokenMember, url: str) -> TokenRuns:
    """Return the tokens of a shard: those of each sample, end to end in the order of the tar.

    Of the tar, only the headers of `.npy` files are read. Raises TokensError, with `url`, for a
    sample that is unusable, a member that is not an array of tokens with one dimension, or members
    of different types: a shard without some of its tokens would give other blocks.
    """
    if tables.faults:
        raise _unsupported(fault_of(tables, min(tables.faults)) or "", url)
    dtype = member.dtype
    starts = array("Q")
    ends = array("Q")
    total = 0
    for sample, (start, end) in enumerate(member_spans(tables, member.extension)):
        first_token = start
        if start < end:
            key = key_of(tables, sample)
            if member.dtype is None:  # a .npy file, which states its type in a header
                head = tar[start : min(end, start + _MAX_HEADER_BYTES)]
                own_dtype, first_token = _npy_values(head, start, end, key, url)
                if dtype not in (None, own_dtype):
                    raise _unsupported(
                        f"the sample {key!r} has {own_dtype}, those before {dtype}", url
                    )
                dtype = own_dtype
            total += _token_count(end - first_token, dtype or "", key, url)
        starts.append(first_token)
        ends.append(total)
    return TokenRuns(dtype or "uint8", starts, ends)


def _token_count(size_bytes: int, dtype: str, key: str, url: str | None) -> int:
    """Return the number of tokens in some bytes. Raises TokensError if it is not a whole one."""
    tokens, surplus = divmod(size_bytes, DTYPES[dtype])
    if surplus:
        reason = f"{size_bytes} bytes of tokens, which is not a multiple of {DTYPES[dtype]}"
        raise _unsupported(f"the sample {key!r} has {reason}", url)
    return tokens


def _npy_values(head: bytes, start: int, end: int, key: str, url: str | None) -> tuple[str, int]:
    """Return type and offset of the values of a `.npy` file. Raises TokensError.

    Args:
        head: its first bytes.
        start: its offset in the tar.
        end: where it ends in the tar.
        key: of its sample, for messages.
        url: of the shard, for messages.
    """
    # Later versions have a longer field for the header's length.
    fixed_bytes = 10 if head[6:7] == b"\1" else 12
    header_end = fixed_bytes + int.from_bytes(head[8:fixed_bytes], "little")
    found = _HEADER.fullmatch(head, fixed_bytes, min(header_end, len(head)))
    if not head.startswith(_MAGIC) or found is None:
        raise _unsupported(
            f"the sample {key!r} has a member that is not a .npy file of integers in one dimension",
            url,
        )
    kind = _KINDS[found[1]]
    size_bytes = int(found[2])
    count = int(found[3])
    present_bytes = end - start - header_end
    expected_bytes = count * size_bytes
    if present_bytes != expected_bytes:
        reason = f"{present_bytes} bytes of tokens instead of {expected_bytes}"
        raise _unsupported(f"the sample {key!r} has {reason}", url)
    return f"{kind}{8 * size_bytes}", start + header_end


def _unsupported(reason: str, url: str | None) -> TokensError:
    return TokensError(f"its tokens cannot be cut into blocks: {reason}", url=url)
