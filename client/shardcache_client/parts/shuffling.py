"""The order that a dataset's arguments ask for: the shuffle and the seed.

With `shuffle=True`, the samples of a few shards at a time are mixed. These shards are the window.

With `shuffle="global"`, all samples of the dataset are permuted. Consecutive samples then come from
different shards, so each sample is read by itself, by the range of its bytes in the tar. A table
next to the dataset's index file has these ranges.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from typing import Literal

from shardcache.shared.exceptions import ConfigError
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.reader_sessions import ReaderSessions
from shardcache_client.order.dealing.deal_options import DealOptions
from shardcache_client.order.sequences.permutations import Shuffle
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.parts.dataset_parts import DatasetParts, DealtSamples
from shardcache_client.parts.sample_tables import tables_beside
from shardcache_client.ranks.group import RankGroup
from shardcache_client.reading.single.sample_ranges import SampleRanges
from shardcache_client.reading.single.scattered_ranges import ScatteredRanges, ScatteredSource
from shardcache_client.reading.single.table_rows import NO_TABLES_REMEDY
from shardcache_client.samples.token_blocks import TokenBlocks

log = logging.getLogger("shardcache")

# Number of shards whose samples are mixed, unless the user gives another number.
_DEFAULT_WINDOW = 8


def shuffle_of(
    shuffle: bool | Literal["global"], window: int | None, canonical_nodes: int
) -> Shuffle | None:
    """Return the shuffle that arguments ask for; None for file order.

    The seed is set later, by `deal_samples`, as the ranks may have to draw a common one.

    Args:
        shuffle: "global" permutes all samples, and True mixes the samples of some shards.
        window: number of shards whose samples are mixed; None for the default.
        canonical_nodes: number of fixed groups of shards, see `Shuffle`. On this many nodes, each
            node mostly reads the shards of one group.
    """
    if shuffle == "global":
        return Shuffle(window=None)  # no window: all samples are permuted
    if not shuffle:
        return None
    if window is None:
        window = _DEFAULT_WINDOW
    return Shuffle(window=window, groups=canonical_nodes)


def check_global_shuffle(
    shuffle_window: int | None,
    canonical_nodes: int,
    global_batch_size: int | None,
    tokens: TokenBlocks | None,
    zero_copy: bool | str | Collection[str],
) -> None:
    """Raise ConfigError for an option that `shuffle="global"` rules out."""
    if shuffle_window is not None:
        raise ConfigError(
            'shuffle="global" mixes the samples of all shards, and has no window',
            remedy="omit shuffle_window; or write shuffle=True, which mixes those of some shards",
        )
    # With global batches, `canonical_nodes` has another meaning, which applies here, too: the epoch
    # is cut into this many spans, each of which gives an equal part to every batch.
    if canonical_nodes > 1 and global_batch_size is None:
        raise ConfigError(
            'shuffle="global" mixes the samples of all shards, and has no groups of them',
            remedy="omit canonical_nodes; or write shuffle=True",
        )
    if tokens is not None:
        raise ConfigError(
            'shuffle="global" reads samples by their places in the tars, and blocks of tokens '
            "have none",
            remedy="write shuffle=True",
        )
    if zero_copy:
        raise ConfigError(
            'shuffle="global" reads samples one by one, and zero_copy maps whole shards',
            remedy="omit zero_copy; or write shuffle=True",
        )


def with_sample_ranges(parts: DatasetParts) -> DatasetParts:
    """Return the parts with the ranges of all samples in their tars, for `shuffle="global"`.

    Raises ConfigError if there can be no table of the ranges.
    """
    tables = tables_beside(parts)
    if not tables:
        raise ConfigError(
            'shuffle="global" needs a table of samples next to the index file, which '
            "says where each sample is in its tar",
            url=next(iter(parts.urls), None),
            remedy=NO_TABLES_REMEDY,
        )
    session_pool = parts.sessions
    sessions = ReaderSessions(session_pool, ReaderIdentity(parts.job))
    ranges = SampleRanges(parts.manifest, tables, sessions, parts.pipeline)
    # The first shard is 0, as the manifest has the shards of a single dataset.
    source = ScatteredSource(first_shard=0, ranges=ranges)
    return replace(parts, scattered=ScatteredRanges([source]))


def deal_samples(
    manifest: Manifest, deal_options: DealOptions, seed: int | None, group: RankGroup
) -> DealtSamples:
    """Deal the samples in the order that a seed determines.

    Args:
        manifest: the shards.
        deal_options: the options of the order.
        seed: the seed; None to draw a random one, which is the same on all ranks.
        group: the ranks.
    """
    # Seeds have the names of a mixture's sources. The seed of a single dataset has the name "".
    if seed is not None:
        return DealtSamples.of(manifest, deal_options.reseeded({"": seed}), seed)

    drawn = group.draw_seed()
    if group.ranks.rank == 0:
        log.warning(
            "seed=None: the seed is %d; states keep it, and seed=%d gives the same order again",
            drawn,
            drawn,
        )
    # A drawn seed is saved in states, since a resumed run does not give it.
    drawn_seeds = {"": drawn}
    return DealtSamples.of(
        manifest, deal_options.reseeded(drawn_seeds), drawn, drawn_seeds=drawn_seeds
    )
