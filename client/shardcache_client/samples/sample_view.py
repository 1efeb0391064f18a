"""The form in which samples are read: which of their members, or blocks of their tokens."""

from dataclasses import dataclass
from typing import Literal

from shardcache_client.samples.slicing import Reads
from shardcache_client.samples.token_blocks import TokenBlocks


@dataclass(frozen=True, slots=True)
class View:
    """The form in which samples are read.

    Attributes:
        reads: chooses the members that samples have; None for all.
        blocks: the blocks of tokens that are samples; None for the samples of the tars.
        prefix: of the extensions of members.
        decodes: returns True for members that the user's own decoder decodes: it gets their bytes,
            also if the format stores values; None if there is no such decoder.
        unmatched: treatment of samples without a partner among the joined ones of this view.
    """

    reads: Reads | None = None
    blocks: TokenBlocks | None = None
    prefix: str = ""
    decodes: Reads | None = None
    unmatched: Literal["error", "skip", "fill"] = "error"

    def takes_bytes(self, name: str) -> bool:
        """Return True if the bytes of a member are wanted, not the value that they store."""
        return self.blocks is not None or (self.decodes is not None and self.decodes(name))


WHOLE = View()
