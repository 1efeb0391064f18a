"""The training side of shardcache: a PyTorch dataset that reads shards cached on local disk by the node's daemon.

    from shardcache_client import ShardDataset

Importing this package alone does not import torch.
"""

from typing import TYPE_CHECKING, Any

from shardcache_client.handlers import (
    ignore_and_continue,
    ignore_and_stop,
    reraise,
    warn_and_continue,
    warn_and_stop,
)

if TYPE_CHECKING:
    from shardcache_client.dataset import ShardDataset
    from shardcache_client.lengths.batching import batch_by_length

__all__ = [
    "ShardDataset",
    "batch_by_length",
    "ignore_and_continue",
    "ignore_and_stop",
    "reraise",
    "warn_and_continue",
    "warn_and_stop",
]


def __getattr__(name: str) -> Any:
    # Daemon-side tools and tests use the rest of this package where torch is not installed.
    if name == "ShardDataset":
        from shardcache_client.dataset import ShardDataset

        return ShardDataset
    if name == "batch_by_length":
        from shardcache_client.lengths.batching import batch_by_length

        return batch_by_length
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
