"""The training side of shardcache: readers of shards that the node's daemon caches on local disk.

    from shardcache_client import ShardDataset

Importing this package does not import torch; `cached_paths` and the readers (`ShardReader`, …) do
not need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardcache_client.handlers import (
    ignore_and_continue,
    ignore_and_stop,
    reraise,
    warn_and_continue,
    warn_and_stop,
)

if TYPE_CHECKING:
    from shardcache.shared.tarindex.contents import IndexEntry
    from shardcache_client.dataset import Joined, Mixture, ShardDataset
    from shardcache_client.files.paths import cached_paths, open_cached
    from shardcache_client.joining import JoinedReader
    from shardcache_client.lengths import batch_by_length
    from shardcache_client.loading.loader import ShardLoader
    from shardcache_client.mixing import MixtureReader
    from shardcache_client.reader import ShardReader
    from shardcache_client.samples.token_blocks import TokenBlocks
    from shardcache_client.table import Table

__all__ = [
    "IndexEntry",
    "Joined",
    "JoinedReader",
    "Mixture",
    "MixtureReader",
    "ShardDataset",
    "ShardLoader",
    "ShardReader",
    "Table",
    "TokenBlocks",
    "batch_by_length",
    "cached_paths",
    "ignore_and_continue",
    "ignore_and_stop",
    "open_cached",
    "reraise",
    "warn_and_continue",
    "warn_and_stop",
]

# The module of each public name. It is imported when the name is first used: some modules need
# torch, and the others must work without it.
_MODULES = {
    "IndexEntry": "shardcache.shared.tarindex.contents",
    "Joined": ".dataset",
    "JoinedReader": ".joining",
    "Mixture": ".dataset",
    "MixtureReader": ".mixing",
    "ShardDataset": ".dataset",
    "ShardLoader": ".loading.loader",
    "ShardReader": ".reader",
    "Table": ".table",
    "TokenBlocks": ".samples.token_blocks",
    "batch_by_length": ".lengths",
    "cached_paths": ".files.paths",
    "open_cached": ".files.paths",
}

# For names that need torch: the class that does the same without it.
_WITHOUT_TORCH = {
    "ShardDataset": "ShardReader",
    "Mixture": "MixtureReader",
    "Joined": "JoinedReader",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_MODULES[name], __name__), name)
    except ModuleNotFoundError as exn:
        if exn.name != "torch":
            raise
        message = f"{name} needs torch: pip install torch"
        if name in _WITHOUT_TORCH:
            message += f"; without torch, use {_WITHOUT_TORCH[name]}"
        raise ImportError(message, name="torch") from exn


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
