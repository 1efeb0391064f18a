"""Lists of shards in columns, shared by daemon and client.

A list may have millions of shards. In columns (one of urls, one of versions and so on), it takes
little memory, has no objects that the garbage collector scans, and makes a short message. A packed
list is its columns as compressed bytes. A fingerprint is a hash that identifies a list.

`ShardColumns` are columns of Python values, in which a list is read and made. `Shards` is the list
itself, whose columns are arrays.
"""

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

from shardcache.shared.exceptions import ProtocolError
from shardcache.shared.protocol import MAX_MESSAGE_BYTES, ShardRef

# Head of a packed list: the number of shards, and the sizes in bytes of their urls and versions.
_HEAD = struct.Struct("<3Q")
_LENGTH_BYTES = 4  # size of a packed text's length
_NUMBER_BYTES = 8  # size of a packed number
# Size of a packed shard without its texts: the lengths of url and version, and three numbers.
_ROW_BYTES = 2 * _LENGTH_BYTES + 3 * _NUMBER_BYTES
_CHUNK_SHARDS = 1_000  # number of shards that exist as objects at the same time
# Number of shards in a piece of a list. A packed piece is far smaller than the largest request that
# the daemon accepts.
_PIECE_SHARDS = 20_000

ShardColumns: TypeAlias = Sequence[Sequence[Any]]
"""Five columns, each with a value per shard: urls, versions, sizes, samples and tokens.

Sizes are in bytes; samples and tokens are numbers of them. A value that is not known is None.
"""


@dataclass(frozen=True, slots=True)
class Texts:
    """A sequence of texts, as one string of bytes. An empty text stands for a missing one.

    Attributes:
        ends: offset in bytes of each text's end, after a 0 for the start of the first text.
        text: all texts, one after another, in UTF-8.
    """

    ends: "array[int]"
    text: bytes

    def __getitem__(self, number: int) -> str:
        return self.text[self.ends[number] : self.ends[number + 1]].decode()

    def __iter__(self) -> Iterator[str]:
        return (self.text[start:stop].decode() for start, stop in pairwise(self.ends))

    @classmethod
    def of(cls, lengths: Iterable[int], text: bytes) -> Self:
        """Build from the texts' lengths in bytes and all their bytes.

        Raises ValueError if the lengths do not fit the bytes, or the bytes are not UTF-8.
        """
        texts = cls(array("Q", accumulate(lengths, initial=0)), text)
        if texts.ends[-1] != len(text):
            raise ValueError("the lengths of texts do not fit their bytes")
        if not text.isascii():
            list(texts)  # decodes each text, and raises an error if one ends within a character
        return texts

    @classmethod
    def joined(cls, sequences: Sequence[Self]) -> Self:
        """Return the texts of several sequences, one after another."""
        lengths = chain.from_iterable(texts.lengths for texts in sequences)
        return cls.of(lengths, b"".join(texts.text for texts in sequences))

    def cut(self, numbers: slice) -> "Texts":
        """Return the texts with the numbers of a slice, which has a start and a stop."""
        ends = self.ends[numbers.start : numbers.stop + 1]
        start = ends[0]
        text = self.text[start : ends[-1]]
        return Texts(array("Q", (end - start for end in ends)), text)

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
    """An immutable list of shards; numbers that are not known are -1.

    Attributes:
        urls: url of each shard.
        versions: version of each shard in the object store; empty if it is not known.
        sizes: size of each shard in bytes, in the object store.
        samples: number of samples in each shard.
        tokens: number of tokens in each shard.
    """

    urls: Texts
    versions: Texts
    sizes: "array[int]"
    samples: "array[int]"
    tokens: "array[int]"

    @classmethod
    def of(cls, refs: Iterable[ShardRef]) -> Self:
        """Build from shards."""
        return cls.of_columns(_columns_of(refs))

    @classmethod
    def of_columns(cls, columns: Iterable[ShardColumns]) -> Self:
        """Build from the columns of the first shards, then those of the next, and so on."""
        urls = _GrowingTexts()
        versions = _GrowingTexts()
        numbers = [array("q"), array("q"), array("q")]
        for more_urls, more_versions, *more_numbers in columns:
            urls.extend(more_urls)
            versions.extend(more_versions)
            for column, values in zip(numbers, more_numbers, strict=True):
                column.extend(-1 if value is None else value for value in values)
        return cls(urls.texts(), versions.texts(), *numbers)

    @classmethod
    def joined(cls, lists: Sequence["Shards"]) -> "Shards":
        """Return the shards of several lists, one after another."""
        if len(lists) == 1:
            return lists[0]
        return cls(
            Texts.joined([each.urls for each in lists]),
            Texts.joined([each.versions for each in lists]),
            _joined([each.sizes for each in lists]),
            _joined([each.samples for each in lists]),
            _joined([each.tokens for each in lists]),
        )

    def with_samples(self, counts: Iterable[int]) -> Self:
        """Return the same shards with other numbers of samples, and without numbers of tokens."""
        return replace(self, samples=array("q", counts), tokens=array("q", [-1]) * len(self))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> ShardRef:  # type: ignore[override]  # no slices
        # The range counts a negative index from the end, and raises IndexError beyond the ends.
        number = range(len(self))[index]
        return ShardRef(
            self.urls[number],
            self.versions[number] or None,
            _none_if_unknown(self.sizes[number]),
            _none_if_unknown(self.samples[number]),
            _none_if_unknown(self.tokens[number]),
        )

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that two lists share if and only if their shards are equal.

        They are a BLAKE2b hash (RFC 7693) of the columns.
        """
        return digest(self._packed_columns())

    @cached_property
    def packed(self) -> bytes:
        """The list in the form that messages carry: its columns, compressed. Blocks."""
        packer = zlib.compressobj(1)  # the fastest level
        pieces = [packer.compress(column) for column in self._packed_columns()]
        pieces.append(packer.flush())
        return b"".join(pieces)

    def pieces(self) -> Iterator["Shards"]:
        """Yield the list in pieces, each small enough for a request."""
        # An empty list has one piece, which is empty.
        for first in range(0, max(1, len(self)), _PIECE_SHARDS):
            numbers = slice(first, first + _PIECE_SHARDS)
            yield Shards(
                self.urls.cut(numbers),
                self.versions.cut(numbers),
                self.sizes[numbers],
                self.samples[numbers],
                self.tokens[numbers],
            )

    @classmethod
    def unpack(cls, packed: bytes, max_bytes: int = MAX_MESSAGE_BYTES) -> Self:
        """Build from the output of `packed`. Blocks.

        Raises ProtocolError if the bytes are not a list of shards, or if the list would take more
        than `max_bytes` when it is decompressed.
        """
        unpacker = _Unpacker(packed)
        try:
            head = unpacker.take(_HEAD.size)
            count, urls_bytes, versions_bytes = _HEAD.unpack(head)
            if urls_bytes + versions_bytes + _ROW_BYTES * count > max_bytes:
                raise ValueError("it is too large")
            urls = unpacker.take_texts(count, urls_bytes)
            versions = unpacker.take_texts(count, versions_bytes)
            sizes = unpacker.take_numbers(count)
            samples = unpacker.take_numbers(count)
            tokens = unpacker.take_numbers(count)
            for column in (sizes, samples, tokens):
                # -1 stands for a number that is not known.
                if not column or len(column) != count or min(column) < -1:
                    raise ValueError("it is empty or cut off, or has negative numbers")
        except (ValueError, struct.error, zlib.error) as exn:
            raise ProtocolError(f"not a list of shards: {exn}") from None
        return cls(urls, versions, sizes, samples, tokens)

    def _packed_columns(self) -> Iterator[bytes]:
        """Yield the list's head and columns as bytes, which are then compressed or hashed."""
        yield _HEAD.pack(len(self), len(self.urls.text), len(self.versions.text))
        for texts in (self.urls, self.versions):
            yield texts.lengths.tobytes()
            yield texts.text
        for numbers in (self.sizes, self.samples, self.tokens):
            yield bytes(numbers)


class _Unpacker:
    """Decompresses a packed list, column by column."""

    def __init__(self, packed: bytes) -> None:
        self._decompressor = zlib.decompressobj()
        self._compressed = packed  # the part that is not decompressed yet

    def take(self, size_bytes: int) -> bytes:
        """Return the next bytes, fewer at the end. Raises zlib.error."""
        if size_bytes == 0:  # to zlib, 0 means no limit
            return b""
        data = self._decompressor.decompress(self._compressed, size_bytes)
        self._compressed = self._decompressor.unconsumed_tail
        return data

    def take_texts(self, count: int, text_bytes: int) -> Texts:
        """Return the next column as texts of this total size. Raises ValueError, zlib.error."""
        lengths = array("I", self.take(_LENGTH_BYTES * count))
        return Texts.of(lengths, self.take(text_bytes))

    def take_numbers(self, count: int) -> "array[int]":
        """Return the next column as numbers. Raises ValueError, zlib.error."""
        return array("q", self.take(_NUMBER_BYTES * count))


class _GrowingTexts:
    """Builder of `Texts`, to which texts are added in several calls."""

    def __init__(self) -> None:
        self._ends = array("Q", [0])
        self._text = bytearray()

    def extend(self, texts: Sequence[str | None]) -> None:
        """Add texts; None is added as an empty text."""
        encoded = [(text or "").encode() for text in texts]
        ends = accumulate(map(len, encoded), initial=len(self._text))
        self._ends.extend(islice(ends, 1, None))
        self._text += b"".join(encoded)

    def texts(self) -> Texts:
        """Return the texts so far."""
        return Texts(self._ends, bytes(self._text))


def _columns_of(refs: Iterable[ShardRef]) -> Iterator[ShardColumns]:
    """Yield the columns of shards, for up to `_CHUNK_SHARDS` shards at a time."""
    remaining = iter(refs)
    while chunk := list(islice(remaining, _CHUNK_SHARDS)):
        # A list does not have the last field of a `ShardRef`.
        *columns, _is_file = zip(*chunk, strict=True)
        yield columns


def _none_if_unknown(value: int) -> int | None:
    """Return a number in a column as a `ShardRef` has it."""
    return None if value < 0 else value


def _joined(columns: Sequence["array[int]"]) -> "array[int]":
    """Return one column that has the numbers of all columns, one column after another."""
    return array("q", b"".join(map(bytes, columns)))


def digest(pieces: Iterable[bytes]) -> str:
    """Return 32 hexadecimal digits (BLAKE2b, RFC 7693) of pieces put end to end."""
    hasher = blake2b(digest_size=16)
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()
