"""Making of shards, tars of a given size with an index.

The samples come from a program that uses `ShardWriter`, or from files of other formats, which
`shardcache write` converts.
"""

from shardcache.writing.writer import ShardWriter

__all__ = ["ShardWriter"]
