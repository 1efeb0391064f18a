"""A dataset whose shards have uneven numbers of samples, and the type of functions that make it anew."""

from __future__ import annotations

from collections.abc import Callable

from shardcache_client import ShardDataset

COUNTS = (5, 11, 3, 8, 1, 13, 6)
KEYS = [f"{number:06d}" for number in range(sum(COUNTS))]
BATCH = 4

Make = Callable[..., ShardDataset]
"""Makes the dataset, with more options."""
