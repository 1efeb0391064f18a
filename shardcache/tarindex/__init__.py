"""The index of a tar shard: its samples and the offsets of their members.

Built once, when the shard arrives: `index_tar` walks the tar's headers and groups its members into samples by
WebDataset's rules, `write` saves the result to a sidecar file. A reader opens the sidecar as a `TarIndex` and slices
samples out of the shard without parsing tar. For a shard that is still arriving, `Tar` and `Grouping` give the samples
fetched so far.
"""

from shardcache.tarindex.contents import (
    IndexEntry,
    MetadataMember,
    Row,
    TokenMember,
    entries_of,
    find_tokens,
    read_metadata,
    rows_of,
)
from shardcache.tarindex.grouping import Grouping, index_tar, split_lines
from shardcache.tarindex.members import Tar
from shardcache.tarindex.tables import Fault, Samples, Tables, TarIndex, fault_of, key_of, read_header, write

__all__ = [
    "Fault",
    "Grouping",
    "IndexEntry",
    "MetadataMember",
    "Row",
    "Samples",
    "Tables",
    "Tar",
    "TarIndex",
    "TokenMember",
    "entries_of",
    "fault_of",
    "find_tokens",
    "index_tar",
    "key_of",
    "read_header",
    "read_metadata",
    "rows_of",
    "split_lines",
    "write",
]
