"""The tokens of a shard: the arrays in one member of each sample, put end to end in the order of the tar."""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass
from typing import Self

from shardcache.errors import ConfigError, TokensError
from shardcache.tarindex.tables import Tables, TarBytes, check_extension, fault_of, key_of, member_spans

DTYPES = {"uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "int16": 2, "int32": 4, "int64": 8}
"""Sizes in bytes of the types that tokens may have; arrays are little-endian."""

# numpy's format: magic, version, length of the header, and a header that is the text of a dict with sorted keys.
_MAGIC = b"\x93NUMPY"
_HEADER = re.compile(
    rb"\{'descr': '[<|]([iu])([1248])', 'fortran_order': (?:False|True), 'shape': \(([0-9]+),\), ?\}\s*"
)
_KINDS = {b"u": "uint", b"i": "int"}
_MAX_HEADER_BYTES = 1024


@dataclass(frozen=True, slots=True)
class TokenMember:
    """The member of each sample that holds its tokens.

    Attributes:
        extension: of the member.
        dtype: a name of `DTYPES`, for members that are nothing but tokens; None for `.npy` files, which tell theirs.
    """

    extension: str = "npy"
    dtype: str | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for a type that tokens cannot have."""
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"tokens of type {self.dtype!r}", remedy=f"choose one of {', '.join(DTYPES)}")
        check_extension(self.extension, "npy")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Build from `EXTENSION` for `.npy` files, or `EXTENSION:DTYPE`. Raises ConfigError."""
        extension, _, dtype = text.partition(":")
        return cls(extension, dtype or None)

    def __str__(self) -> str:
        return self.extension if self.dtype is None else f"{self.extension}:{self.dtype}"


def tokens_in(data: bytes, member: TokenMember, key: str) -> int:
    """Return the number of tokens in the member of the sample `key`. Raises TokensError as `find_tokens`."""
    if member.dtype is None:
        dtype, start = _npy(data, 0, len(data), key, None)
    else:
        dtype, start = member.dtype, 0
    return _count(len(data) - start, dtype, key, None)


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """The tokens of each sample of a shard; none for samples that lack the member.

    Attributes:
        dtype: type of the tokens.
        starts: offset of each sample's first token in the tar, in bytes.
        ends: end (exclusive) of each sample's tokens, as a number of tokens from the beginning of the shard.
    """

    dtype: str
    starts: array[int]
    ends: array[int]

    @property
    def tokens(self) -> int:
        """Number of tokens in the shard."""
        return self.ends[-1] if self.ends else 0


def find_tokens(tables: Tables, tar: TarBytes, member: TokenMember, url: str) -> TokenRuns:
    """Return the tokens of a shard.

    Args:
        tar: the bytes of the tar, of which only the headers of `.npy` files are read.
        url: url for error messages.

    Raises TokensError for a sample that is unusable, a member that is not an array of tokens with one
    dimension, or members of different types: a shard without some of its tokens would give other blocks.
    """
    if tables.faults:
        raise _unsupported(fault_of(tables, min(tables.faults)) or "", url)
    dtype, starts, ends, total = member.dtype, array("Q"), array("Q"), 0
    for sample, (start, end) in enumerate(member_spans(tables, member.extension)):
        if start < end:
            key = key_of(tables, sample)
            if member.dtype is None:
                found, start = _npy(tar[start : min(end, start + _MAX_HEADER_BYTES)], start, end, key, url)
                if dtype not in (None, found):
                    raise _unsupported(f"the sample {key!r} has {found}, those before {dtype}", url)
                dtype = found
            total += _count(end - start, dtype or "", key, url)
        starts.append(start)
        ends.append(total)
    return TokenRuns(dtype or "uint8", starts, ends)


def _count(size_bytes: int, dtype: str, key: str, url: str | None) -> int:
    tokens, surplus = divmod(size_bytes, DTYPES[dtype])
    if surplus:
        reason = f"{size_bytes} bytes of tokens, which is not a multiple of {DTYPES[dtype]}"
        raise _unsupported(f"the sample {key!r} has {reason}", url)
    return tokens


def _npy(head: bytes, start: int, end: int, key: str, url: str | None) -> tuple[str, int]:
    """Return type and offset of the values of the `.npy` file at `start`, given its first bytes."""
    fixed_bytes = 10 if head[6:7] == b"\1" else 12  # later versions have a longer field for the header's length
    header_end = fixed_bytes + int.from_bytes(head[8:fixed_bytes], "little")
    found = _HEADER.fullmatch(head, fixed_bytes, min(header_end, len(head)))
    if not head.startswith(_MAGIC) or found is None:
        raise _unsupported(f"the sample {key!r} has a member that is not a .npy file of integers in one dimension", url)
    kind, size_bytes, count = _KINDS[found[1]], int(found[2]), int(found[3])
    if end - start - header_end != count * size_bytes:
        reason = f"{end - start - header_end} bytes of tokens instead of {count * size_bytes}"
        raise _unsupported(f"the sample {key!r} has {reason}", url)
    return f"{kind}{8 * size_bytes}", start + header_end


def _unsupported(reason: str, url: str | None) -> TokensError:
    return TokensError(f"its tokens cannot be cut into blocks: {reason}", url=url)
