"""The index of a tar shard: which samples it holds, and where each of their members lies.

Made once, while the shard arrives: `index_tar` walks the tar's headers and groups its members into samples by
WebDataset's rules, `write` puts the result into a sidecar file. A reader opens the sidecar as a `TarIndex` and cuts
samples out of the shard without parsing tar. Of a shard that is still arriving, `Tar` and `Grouping` give the samples
whose bytes are there.
"""

from shardcache.tarindex.members import Tar
from shardcache.tarindex.samples import Grouping, index_tar
from shardcache.tarindex.sidecar import TarIndex, read_header, write
from shardcache.tarindex.tables import Fault, Samples, Tables, fault_of, key_of

__all__ = [
    "Fault",
    "Grouping",
    "Samples",
    "Tables",
    "Tar",
    "TarIndex",
    "fault_of",
    "index_tar",
    "key_of",
    "read_header",
    "write",
]
