"""The form in which samples are read: some of their members, or blocks of their tokens.

A dataset makes one `View` of its arguments, and the readers of its shards follow it. A sample is
joined if it gets members of samples with the same key in other shards.
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
        blocks: the blocks of tokens that are the samples; None for the samples of the tars.
        prefix: prefix of the members' names, for samples that are joined to others; "" otherwise.
        decodes: returns True for members that the user's own decoder decodes. This decoder gets the
            bytes, even if the format stores values. None if there is no such decoder.
        keeps_values: True if `decodes` goes by extension. Such a decoder gets files: members of
            bytes, and image files. Values of other types stay as the format's decoder returns them.
        unmatched: treatment of samples that have no partner among the joined samples: an error, to
            skip the sample, or to fill its members in.
    """

    reads: Reads | None = None
    blocks: TokenBlocks | None = None
    prefix: str = ""
    decodes: Reads | None = None
    keeps_values: bool = False
    unmatched: Literal["error", "skip", "fill"] = "error"

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
