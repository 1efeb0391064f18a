"""Cutting of blocks of tokens from the documents of a mapped shard. Needs numpy."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import count
from operator import add

import numpy as np
from numpy.typing import NDArray

from shardcache.errors import ConfigError
from shardcache.tarindex import Tables, TokenMember, find_tokens, key_of
from shardcache.tarindex.tables import TarBytes
from shardcache.tarindex.tokens import DTYPES
from shardcache_client.files.blocks import TokenBlocks
from shardcache_client.files.slicing import Sample


class BlockCutter:
    """The blocks of one shard, by number. Refers to the index and the tar, which must stay open.

    Raises TokensError for a shard that has no tokens of this kind, ConfigError if its type cannot have the end token.
    """

    def __init__(self, blocks: TokenBlocks, index: Tables, tar: TarBytes, url: str) -> None:
        runs = find_tokens(index, tar, TokenMember(blocks.member, blocks.dtype), url)
        if blocks.end is not None and blocks.end >> (8 * DTYPES[runs.dtype] - runs.dtype.startswith("i")):
            raise ConfigError(f"the end token {blocks.end} is too large for {runs.dtype}", url=url)
        self._blocks = blocks
        self._index = index
        self._tar = tar
        self._url = url
        self._starts = runs.starts
        self._size_bytes = DTYPES[runs.dtype]  # of a token
        self._dtype = np.dtype(runs.dtype).newbyteorder("<")
        # The tar has no end tokens: a place is kept for one after each document.
        self._end = b"" if blocks.end is None else blocks.end.to_bytes(self._size_bytes, "little")
        self._ends = array("Q", map(add, runs.ends, count(1))) if self._end else runs.ends
        self._count = blocks.count(runs.tokens, len(runs.ends))

    def __repr__(self) -> str:
        return f"BlockCutter({self._url!r}, {self._blocks!r}, count={self._count})"

    def __len__(self) -> int:
        return self._count

    def __call__(self, number: int) -> Sample:
        """Return a block by its number."""
        length, ends, size_bytes = self._blocks.length, self._ends, self._size_bytes
        first = at = number * (length - self._blocks.overlap)
        stop = first + length
        document = bisect_right(ends, first)
        begun = ends[document - 1] if document else 0
        sample: Sample = {"__key__": f"{key_of(self._index, document)}:{first - begun}", "__url__": self._url}
        runs, borders = [], []
        while True:
            offset, document_end = self._starts[document] - begun * size_bytes, ends[document]
            own_end = document_end - 1 if self._end else document_end
            if at < own_end:
                runs.append(self._tar[offset + at * size_bytes : offset + min(own_end, stop) * size_bytes])
            if own_end < document_end <= stop:
                runs.append(self._end)
            if document_end >= stop:
                break
            borders.append(document_end - first)
            at = begun = document_end
            document += 1
        sample["tokens"] = np.frombuffer(bytearray().join(runs), self._dtype)
        if self._blocks.documents:
            sample["documents"] = _numbers(borders, length)
        return sample


def _numbers(borders: Sequence[int], length: int) -> NDArray[np.int32]:
    """Return the number of the part of each place, given where parts after the first begin; some may be empty."""
    begins = np.zeros(length, np.int32)
    begins[borders] = 1
    return np.cumsum(begins, dtype=np.int32)
