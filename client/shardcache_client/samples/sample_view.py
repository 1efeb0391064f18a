"""The form in which samples are read: some of their members, or blocks of their tokens.

A dataset makes one `View` from its arguments, and the readers of its shards follow it. A joined
sample also has members of other shards' samples with the same key, its partners.
"""

from dataclasses import dataclass
from typing import Literal

from shardcache_client.samples.slicing import Reads
from shardcache_client.samples.token_blocks import TokenBlocks


@dataclass(frozen=True, slots=True)
class View:
    """The form in which samples are read.

    Attributes:
        reads: returns True for the members that samples get; None if they get all members.
        blocks: form of the blocks of tokens that are the samples; None for the shard's own samples.
        prefix: prefix of the members' names, for samples that are joined to others; "" otherwise.
        decodes: returns True for the members that the user's decoder decodes. It gets their bytes,
            even if the format stores values. None if the user has given no decoder.
        keeps_values: True if the user's decoder is chosen by extension. It then decodes only files,
            which are members of bytes and image files. Other values are decoded by the format.
        unmatched: what to do with a sample that has no partner: raise an error, skip the sample, or
            fill the missing members in.
    """

    reads: Reads | None = None
    blocks: TokenBlocks | None = None
    prefix: str = ""
    decodes: Reads | None = None
    keeps_values: bool = False
    unmatched: Literal["error", "skip", "fill"] = "error"

    def includes(self, name: str) -> bool:
        """Return True if samples get a member, given its name with the prefix."""
        return self.reads is None or self.reads(name)

    def takes_bytes(self, name: str, is_image_file: bool = False) -> bool:
        """Return True if the bytes of a member are wanted instead of the value that they store.

        Args:
            name: name of the member, with the prefix.
            is_image_file: True if the bytes are an image file.
        """
        if self.blocks is not None:
            return True
        if self.decodes is None or (self.keeps_values and not is_image_file):
            return False
        return self.decodes(name)


# The form of samples that are read with all of their members.
WHOLE = View()
