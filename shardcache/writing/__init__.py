"""Making of shards, tars of a given size with an index.

Their samples come from a program, or from files of other formats.
"""

from shardcache.writing.writer import ShardWriter

__all__ = ["ShardWriter"]
