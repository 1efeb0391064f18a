"""Description of blocks of tokens, for users."""

from __future__ import annotations

from dataclasses import dataclass

from shardcache.errors import ConfigError
from shardcache.tarindex import TokenMember
from shardcache_client.arguments import converted, flag, whole

_RULES = {"length": whole(1), "overlap": whole(0), "end": whole(0).or_none(), "documents": flag()}


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
        for name, rule in _RULES.items():
            object.__setattr__(self, name, converted(name, getattr(self, name), rule))
        if self.overlap >= self.length:
            raise ConfigError(
                f"blocks of {self.length} tokens that overlap by {self.overlap}",
                remedy="give an overlap below the length",
            )
        TokenMember(self.member, self.dtype)
        try:
            import numpy  # noqa: F401
        except ImportError as exn:
            raise ConfigError("blocks of tokens need numpy", remedy="pip install numpy") from exn

    def count(self, tokens: int, documents: int) -> int:
        """Return the number of blocks in a shard, given the tokens and documents in it."""
        ends = 0 if self.end is None else documents
        return max(0, (tokens + ends - self.overlap) // (self.length - self.overlap))
