"""Blocks of tokens: samples of one length, cut from a shard's documents put end to end."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from shardcache.errors import ConfigError
from shardcache.tarindex import Tables, TokenMember, find_tokens, key_of
from shardcache.tarindex.tokens import DTYPES, Tar
from shardcache_client.files.slicing import Sample


@dataclass(frozen=True, slots=True)
class TokenBlocks:
    """Samples that are blocks of `length` tokens, in place of documents, for training language models.

    The documents of each shard are put end to end in their order, and cut into blocks across their borders; blocks are
    then what is dealt, shuffled, counted and resumed. Fewer than `length` tokens at the end of each shard are left out.
    A sample has `__key__` (that of the document in which the block begins, ":", and the number of its first token in
    it), `__url__`, and `tokens`, a numpy array of its own.

    Attributes:
        length: number of tokens in a block.
        member: extension of the member with the tokens of a document: an array of integers with one dimension.
        dtype: type of the tokens, such as "uint16", if members are plain little-endian arrays; None for `.npy` files.
        overlap: number of tokens that a block repeats from the end of the one before; 1 for blocks of inputs whose
            targets are the next tokens, with a length of one more than the context.
        end: token to add after each document; None for documents that end with one, or need none.
        documents: True for samples with `documents`, too: the number of each token's document, as int32, from 0 in each
            block, for attention within documents.

    Raises ConfigError if an argument is invalid.
    """

    length: int
    member: str = "npy"
    dtype: str | None = None
    overlap: int = 0
    end: int | None = None
    documents: bool = False

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.length < 1 or not 0 <= self.overlap < self.length:
            raise ConfigError(
                f"blocks of {self.length} tokens that overlap by {self.overlap}",
                remedy="give a length of 1 or more, and an overlap below it",
            )
        if self.end is not None and self.end < 0:
            raise ConfigError(f"end is {self.end}", remedy="give the number of a token")
        TokenMember(self.member, self.dtype)
        try:
            import numpy  # noqa: F401
        except ImportError as exn:
            raise ConfigError("blocks of tokens need numpy", remedy="pip install numpy") from exn

    def count(self, tokens: int, documents: int) -> int:
        """Return the number of blocks in a shard, given the tokens and documents in it."""
        ends = 0 if self.end is None else documents
        return max(0, (tokens + ends - self.overlap) // (self.length - self.overlap))


class BlockCutter:
    """The blocks of one shard, by number. Refers to the index and the tar, which must stay open.

    Raises TokensError for a shard that has no tokens of this kind, ConfigError if its type cannot have the end token.
    """

    def __init__(self, blocks: TokenBlocks, index: Tables, tar: Tar, url: str) -> None:
        runs = find_tokens(index, tar, TokenMember(blocks.member, blocks.dtype), url)
        if blocks.end is not None and blocks.end >> (8 * DTYPES[runs.dtype] - runs.dtype.startswith("i")):
            raise ConfigError(f"the end token {blocks.end} is too large for {runs.dtype}", url=url)
        self._blocks = blocks
        self._index = index
        self._tar = tar
        self._url = url
        self._dtype = runs.dtype
        self._starts = runs.starts
        self._ends, self._extra = runs.ends, 0
        if blocks.end is not None:  # the tar has none: a place is kept for one after each document
            self._ends, self._extra = array("Q", (end + number for number, end in enumerate(runs.ends, 1))), 1
        self._count = blocks.count(runs.tokens, len(runs.ends))

    def __repr__(self) -> str:
        return f"BlockCutter({self._url!r}, {self._blocks!r}, count={self._count})"

    def __len__(self) -> int:
        return self._count

    def __call__(self, number: int) -> Sample:
        """Return a block by its number."""
        import numpy as np

        blocks, ends = self._blocks, self._ends
        first = number * (blocks.length - blocks.overlap)
        document = bisect_right(ends, first)
        begun = ends[document - 1] if document else 0
        sample: Sample = {"__key__": f"{key_of(self._index, document)}:{first - begun}", "__url__": self._url}
        tokens = np.empty(blocks.length, self._dtype)
        at, stop, borders = first, first + blocks.length, []
        while True:
            end = min(ends[document], stop)
            self._fill(tokens[at - first : end - first], document, at - begun, end - begun)
            if end == stop:
                break
            borders.append(end - first)
            at, begun, document = end, ends[document], document + 1
        sample["tokens"] = tokens
        if blocks.documents:
            marks = np.zeros(blocks.length, np.int32)
            marks[borders] = 1
            sample["documents"] = np.cumsum(marks, dtype=np.int32)
        return sample

    def _fill(self, tokens: Any, document: int, start: int, stop: int) -> None:
        """Copy the tokens from `start` to `stop` of a document, with its end token as the last."""
        import numpy as np

        size_bytes, offset = DTYPES[self._dtype], self._starts[document]
        before = self._ends[document - 1] if document else 0
        last = min(stop, self._ends[document] - before - self._extra)
        if start < last:
            run = self._tar[offset + start * size_bytes : offset + last * size_bytes]
            tokens[: last - start] = np.frombuffer(run, f"<{np.dtype(self._dtype).str[1:]}")
        if last < stop:
            tokens[-1] = self._blocks.end
