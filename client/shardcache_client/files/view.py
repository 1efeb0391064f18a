"""The form in which readers see the samples of shards."""

from __future__ import annotations

from dataclasses import dataclass

from shardcache_client.files.blocks import TokenBlocks
from shardcache_client.files.slicing import Reads


@dataclass(frozen=True, slots=True)
class View:
    """Samples as the tar has them, or blocks of their tokens.

    Attributes:
        reads: chooses the members of samples; None for all.
        blocks: the blocks that are samples in place of the tar's; None for none.
    """

    reads: Reads | None = None
    blocks: TokenBlocks | None = None


WHOLE = View()
"""Samples with all members."""
