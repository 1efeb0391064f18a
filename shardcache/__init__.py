"""shardcache: a per-node daemon that keeps the tar shards which training will read next on local disk."""

__version__ = "0.1.0"
