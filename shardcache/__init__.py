"""shardcache: a per-node daemon that prefetches the tar shards your training reads next onto local disk."""

__version__ = "0.2.0"
