"""Making of shards: samples from a program, or files of other formats, to tars of a given size with an index."""

from shardcache.writing.writer import ShardWriter

__all__ = ["ShardWriter"]
