"""shardcache: a per-node daemon that prefetches the tar shards your training reads next."""

__version__ = "0.2.0"
