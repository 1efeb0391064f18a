"""Lists of shards in columns, shared by daemon and client: little memory, no objects to scan, and short messages."""

import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate, chain, islice, pairwise
from operator import sub
from typing import Any, Self, TypeAlias

from shardcache.errors import ProtocolError
from shardcache.protocol import MAX_MESSAGE_BYTES, ShardRef

_HEAD = struct.Struct("<3Q")  # number of shards, bytes of their urls and of their versions
_ROW_BYTES = 2 * 4 + 3 * 8  # of a packed shard, besides its texts
_AT_ONCE = 1_000  # shards of which there are objects at the same time
_PIECE_SHARDS = 20_000  # packed, they are far below the size of a request that the daemon accepts

Columns: TypeAlias = Sequence[Sequence[Any]]
"""Urls, versions, sizes, numbers of samples and of tokens of the same shards; None for what is not known."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts, one after another in UTF-8; an empty one stands for none."""

    ends: "array[int]"  # from 0 on, one more than there are texts
    text: bytes

    def __getitem__(self, number: int) -> str:
        return self.text[self.ends[number] : self.ends[number + 1]].decode()

    def __iter__(self) -> Iterator[str]:
        return (self.text[start:stop].decode() for start, stop in pairwise(self.ends))

    @classmethod
    def of(cls, lengths: Iterable[int], text: bytes) -> Self:
        """Build from the texts' lengths in bytes. Raises ValueError unless they are texts."""
        texts = cls(array("Q", accumulate(lengths, initial=0)), text)
        if texts.ends[-1] != len(text):
            raise ValueError("the lengths of texts do not fit their bytes")
        list(() if text.isascii() else texts)  # a text could end within a character
        return texts

    def cut(self, some: slice) -> "Texts":
        """Return some of the texts."""
        ends = self.ends[some.start : some.stop + 1]
        return Texts(array("Q", (end - ends[0] for end in ends)), self.text[ends[0] : ends[-1]])

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that two sequences share if and only if their texts are equal."""
        return digest((self.ends.tobytes(), self.text))

    @property
    def lengths(self) -> "array[int]":
        """Length of each text in bytes."""
        return array("I", map(sub, self.ends[1:], self.ends))


@dataclass(frozen=True)
class Shards(Sequence[ShardRef]):
    """An immutable list of shards; numbers that are not known are -1."""

    urls: Texts
    versions: Texts
    sizes: "array[int]"  # in bytes, in the object store
    samples: "array[int]"
    tokens: "array[int]"

    @classmethod
    def of(cls, refs: Iterable[ShardRef]) -> Self:
        """Build from shards."""
        rest = iter(refs)
        return cls.of_columns([*zip(*some, strict=True)][:5] for some in iter(lambda: [*islice(rest, _AT_ONCE)], []))

    @classmethod
    def of_columns(cls, columns: Iterable[Columns]) -> Self:
        """Build from the columns of some shards after those of others."""
        texts, numbers = [(array("Q", [0]), bytearray()) for _ in range(2)], [array("q") for _ in range(3)]
        for urls, versions, *counts in columns:
            for (ends, text), some in zip(texts, (urls, versions), strict=True):
                encoded = [(each or "").encode() for each in some]
                ends.extend(islice(accumulate(map(len, encoded), initial=len(text)), 1, None))
                text += b"".join(encoded)
            for column, each in zip(numbers, counts, strict=True):
                column.extend(-1 if count is None else count for count in each)
        urls_of, versions_of = (Texts(ends, bytes(text)) for ends, text in texts)
        return cls(urls_of, versions_of, *numbers)

    @classmethod
    def joined(cls, lists: Sequence["Shards"]) -> "Shards":
        """Return the shards of several lists, one after another."""
        if len(lists) == 1:
            return lists[0]
        urls, versions = (
            Texts.of(chain.from_iterable(each.lengths for each in some), b"".join(each.text for each in some))
            for some in ([each.urls for each in lists], [each.versions for each in lists])
        )
        numbers = zip(*((each.sizes, each.samples, each.tokens) for each in lists), strict=True)
        return cls(urls, versions, *(array("q", b"".join(map(bytes, some))) for some in numbers))

    def with_samples(self, counts: Iterable[int]) -> Self:
        """Return the same shards with other numbers of samples, and none of tokens."""
        return replace(self, samples=array("q", counts), tokens=array("q", [-1]) * len(self))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> ShardRef:  # type: ignore[override]  # no slices
        number = range(len(self))[index]
        counts = (None if each[number] < 0 else each[number] for each in (self.sizes, self.samples, self.tokens))
        size_bytes, samples, tokens = counts
        return ShardRef(self.urls[number], self.versions[number] or None, size_bytes, samples, tokens)

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits (BLAKE2b, RFC 7693) that two lists share if and only if their shards are equal."""
        return digest(self._columns())

    def _columns(self) -> Iterator[bytes]:
        yield _HEAD.pack(len(self), len(self.urls.text), len(self.versions.text))
        for texts in (self.urls, self.versions):
            yield from (texts.lengths.tobytes(), texts.text)
        yield from map(bytes, (self.sizes, self.samples, self.tokens))

    @cached_property
    def packed(self) -> bytes:
        """The list as it travels: its columns, compressed. Blocks."""
        packer = zlib.compressobj(1)
        return b"".join((*map(packer.compress, self._columns()), packer.flush()))

    def pieces(self) -> Iterator["Shards"]:
        """Yield the list in pieces, each small enough for a request."""
        for some in (slice(first, first + _PIECE_SHARDS) for first in range(0, max(1, len(self)), _PIECE_SHARDS)):
            numbers = (self.sizes[some], self.samples[some], self.tokens[some])
            yield Shards(self.urls.cut(some), self.versions.cut(some), *numbers)

    @classmethod
    def unpack(cls, packed: bytes, max_bytes: int = MAX_MESSAGE_BYTES) -> Self:
        """Build from the output of `packed`, unless it is larger than `max_bytes`. Raises ProtocolError. Blocks."""
        unpacker, rest = zlib.decompressobj(), packed

        def take(size_bytes: int) -> bytes:
            nonlocal rest
            data = unpacker.decompress(rest, size_bytes) if size_bytes else b""  # 0 would mean without a limit
            rest = unpacker.unconsumed_tail
            return data

        try:
            count, *sizes_bytes = _HEAD.unpack(take(_HEAD.size))
            if sum(sizes_bytes) + _ROW_BYTES * count > max_bytes:
                raise ValueError("it is too large")
            urls, versions = (Texts.of(array("I", take(4 * count)), take(size_bytes)) for size_bytes in sizes_bytes)
            numbers = [array("q", take(8 * count)) for _ in range(3)]
            if {len(each) for each in numbers} != {count} or any(min(each, default=-2) < -1 for each in numbers):
                raise ValueError("it is empty or cut off, or has negative numbers")
        except (ValueError, struct.error, zlib.error) as exn:
            raise ProtocolError(f"not a list of shards: {exn}") from None
        return cls(urls, versions, *numbers)


def digest(pieces: Iterable[bytes]) -> str:
    """Return 32 hexadecimal digits (BLAKE2b, RFC 7693) of pieces put end to end."""
    found = blake2b(digest_size=16)
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()
