"""The index of a tar shard: which samples it holds, and where each of their members lies.

Made once, while the shard arrives: `index_tar` walks the tar's headers and groups its members into samples by
WebDataset's rules, `write` puts the result into a sidecar file. A reader opens the sidecar as a `TarIndex` and cuts
samples out of the shard without parsing tar.
"""

from shardcache.tarindex.samples import Fault, Samples, index_tar
from shardcache.tarindex.sidecar import TarIndex, read_header, write

__all__ = ["Fault", "Samples", "TarIndex", "index_tar", "read_header", "write"]
