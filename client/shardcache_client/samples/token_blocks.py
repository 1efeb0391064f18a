"""Blocks of tokens, cut from the documents of a shard.

A document is a sample of the shard; one of its members has the tokens. The documents are put end to
end and cut into blocks of equal length, which are the samples of the dataset.
"""

from array import array
from bisect import bisect_right
from dataclasses import dataclass
from operator import add

from shardcache.shared.exceptions import ConfigError
from shardcache.shared.tarindex.named_members import DTYPES, TokenMember
from shardcache.shared.tarindex.tables import Tables, TarBytes, key_of
from shardcache.shared.tarindex.token_runs import find_tokens
from shardcache_client.arguments.values import TEXT, converted_argument, flag, whole
from shardcache_client.samples.slicing import Sample

# For each argument, the values that it accepts. For `whole`, the number is the least of them.
_RULES = {
    "length": whole(1),
    "member": TEXT,
    "dtype": TEXT.or_none(),
    "overlap": whole(0),
    "end": whole(0).or_none(),
    "documents": flag(),
}


@dataclass(frozen=True, slots=True)
class TokenBlocks:
    """Samples that are blocks of `length` tokens, not documents, for training language models.

    The documents of each shard are put end to end in their order, and cut into blocks across their
    borders. Blocks are then divided among ranks, shuffled, counted and resumed as samples are.
    Tokens at a shard's end that do not fill a block are dropped.

    A sample has `__key__`, `__url__` and `tokens`. The key "cats/7:512" means that the block begins
    in the document with the key "cats/7", at token number 512 of this document, counted from 0. The
    tokens are a numpy array, which is a writable copy and not a view of the mapped shard.

    Attributes:
        length: number of tokens in a block.
        member: extension of the member with the tokens of a document: an array of integers with one
            dimension.
        dtype: type of the tokens, such as "uint16", if members are plain little-endian arrays; None
            for `.npy` files.
        overlap: number of tokens that a block repeats from the end of the previous block. A model
            that predicts the next token uses an overlap of 1, with a length of its context plus 1:
            the inputs are all tokens but the last, and the targets are all tokens but the first.
        end: token to add after each document; None if documents end with such a token already, or
            need none.
        documents: True to give samples `documents` as well: the number of each token's document, as
            int32, from 0 in each block, for attention within documents.

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
        for name, rule in _RULES.items():
            value = converted_argument(name, getattr(self, name), rule)
            object.__setattr__(self, name, value)
        if self.overlap >= self.length:
            raise ConfigError(
                f"blocks of {self.length} tokens cannot overlap by {self.overlap}",
                remedy="give an overlap below the length",
            )
        member = TokenMember(self.member, self.dtype)
        if member.dtype is not None and not fits(self.end, member.dtype):
            raise ConfigError(
                f"the end token {self.end} is too large for {member.dtype}",
                remedy="choose a smaller one",
            )
        try:
            import numpy  # noqa: F401
        except ImportError as exn:
            raise ConfigError("blocks of tokens need numpy", remedy="pip install numpy") from exn

    def count(self, tokens: int, documents: int) -> int:
        """Return the number of blocks in a shard, given the tokens and documents in it."""
        end_tokens = 0 if self.end is None else documents
        step = self.length - self.overlap
        return max(0, (tokens + end_tokens - self.overlap) // step)


def fits(end: int | None, dtype: str) -> bool:
    """Return True if a type of tokens can hold the end token, or if there is no end token."""
    if end is None:
        return True
    bits = 8 * DTYPES[dtype]
    # One bit of a signed integer is its sign.
    if dtype.startswith("i"):
        bits -= 1
    return end < 1 << bits


class BlockCutter:
    """The blocks of one shard, by number.

    Args:
        blocks: form of the blocks.
        index: index of the shard, which must stay open as long as this object.
        tar: the shard's bytes, which must stay open as long as this object.
        url: url of the shard.

    Raises:
        TokensError: the shard has no tokens of this kind.
        ConfigError: the type of the shard's tokens cannot hold the end token.
    """

    def __init__(self, blocks: TokenBlocks, index: Tables, tar: TarBytes, url: str) -> None:
        import numpy as np

        runs = find_tokens(index, tar, TokenMember(blocks.member, blocks.dtype), url)
        if not fits(blocks.end, runs.dtype):
            raise ConfigError(f"the end token {blocks.end} is too large for {runs.dtype}", url=url)
        self._blocks = blocks
        self._index = index
        self._tar = tar
        self._url = url
        # The position of a token is its number in all documents of the shard, including end tokens.
        # For each document: the offset of its first token in the tar, in bytes; and the position
        # after its last token.
        self._tar_offsets = runs.tar_offsets
        self._ends = runs.token_ends
        self._token_bytes = DTYPES[runs.dtype]  # size of a token
        self._dtype = np.dtype(runs.dtype).newbyteorder("<")
        self._end_token = b""
        if blocks.end is not None:
            self._end_token = blocks.end.to_bytes(self._token_bytes, "little")
            # The tar has no end tokens. So each document's end is moved by one token for the
            # document's own end token, and by one for each document before it.
            end_tokens = range(1, len(runs.token_ends) + 1)
            self._ends = array("Q", map(add, runs.token_ends, end_tokens))
        self._count = blocks.count(runs.tokens, documents=len(runs.token_ends))

    def __len__(self) -> int:
        return self._count

    def __call__(self, number: int) -> Sample:
        """Return a block by its number."""
        import numpy as np

        length = self._blocks.length
        first = number * (length - self._blocks.overlap)
        stop = first + length
        document = bisect_right(self._ends, first)
        sample: Sample = {
            "__key__": f"{key_of(self._index, document)}:{first - self._start_of(document)}",
            "__url__": self._url,
        }
        parts, borders = self._parts_of_block(document, first, stop)

        # An array over `bytes` would be read-only; over a `bytearray` it is writable.
        sample["tokens"] = np.frombuffer(bytearray().join(parts), self._dtype)
        if self._blocks.documents:
            # The number of a token's document is the number of borders up to the token.
            is_border = np.zeros(length, np.int32)
            is_border[borders] = 1
            sample["documents"] = np.cumsum(is_border, dtype=np.int32)
        return sample

    def _start_of(self, document: int) -> int:
        """Return the position of a document's first token."""
        return self._ends[document - 1] if document else 0

    def _parts_of_block(
        self, document: int, first: int, stop: int
    ) -> tuple[list[bytes], list[int]]:
        """Return a block's bytes in parts, and the borders of its documents.

        A border is the offset in the block, in tokens, at which a document begins, other than the
        block's first one.

        Args:
            document: number of the document in which the block begins.
            first: position of the block's first token.
            stop: position after its last token.
        """
        # This loop runs for each document of each block. So it has local names, and calls nothing.
        ends = self._ends
        token_bytes = self._token_bytes
        parts = []
        borders = []
        position = first
        document_start = self._start_of(document)
        while position < stop:
            if position > first:
                borders.append(position - first)
            document_end = ends[document]
            # If there is an end token, it has the last position of its document, `content_end`.
            content_end = document_end - 1 if self._end_token else document_end
            if position < content_end:
                content_stop = min(content_end, stop)
                tar_offset = self._tar_offsets[document]  # of the token at `document_start`
                first_byte = tar_offset + (position - document_start) * token_bytes
                end_byte = tar_offset + (content_stop - document_start) * token_bytes
                parts.append(self._tar[first_byte:end_byte])
            if content_end < document_end <= stop:
                parts.append(self._end_token)
            position = document_end
            document_start = document_end
            document += 1
        return parts, borders
