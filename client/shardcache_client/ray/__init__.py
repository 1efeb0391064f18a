"""shardcache on a Ray cluster: a daemon on each node, and the shards as a Ray Data dataset.

    import ray
    from shardcache_client.ray import read_shards, start_daemons

    ray.init()
    start_daemons(cache_dir="/mnt/nvme/shardcache", capacity="500GB")
    dataset = read_shards("s3://bucket/train-{000000..000999}.tar")

Importing this package alone does not import ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardcache_client.ray.daemons import Daemons, start_daemons
    from shardcache_client.ray.node_daemon import node_socket
    from shardcache_client.ray.shards import read_shards

__all__ = ["Daemons", "node_socket", "read_shards", "start_daemons"]


_MODULES = {"Daemons": "daemons", "node_socket": "node_daemon", "read_shards": "shards", "start_daemons": "daemons"}


def __getattr__(name: str) -> Any:
    # `tether` runs where starting a daemon must not take as long as importing ray.
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
