"""Tasks of a loader's workers in one iteration: to make a rank's batches, or its chunks of samples.

A task is small and can be pickled. It is sent to worker processes, each of which turns it into the
work that it describes. A chunk is a run of samples for a stage, which makes batches of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardcache_client.batches.rank_batches import RankBatches
from shardcache_client.batches.rank_chunks import RankChunks
from shardcache_client.batches.rank_work import BatchForm, RankWork, Reading
from shardcache_client.order.topology import Topology
from shardcache_client.position.progress import Progress
from shardcache_client.position.staged_state import Resume


@dataclass(frozen=True, slots=True)
class BatchTask:
    """The batches of a rank.

    Attributes:
        progress: the epoch, and the epoch's samples that have been read already.
        rank: the rank.
    """

    progress: Progress
    rank: Topology

    def work(self, reading: Reading, form: BatchForm) -> RankWork:
        """Return the batches, as work for this process."""
        return RankBatches(reading, self.progress, self.rank, form)


@dataclass(frozen=True, slots=True)
class ChunkTask:
    """The chunks of a rank.

    Attributes:
        resume: the epoch, and the position in it at which the chunks begin.
        rank: the rank.
        size: number of places (positions in the epoch's order of samples) of a chunk.
    """

    resume: Resume
    rank: Topology
    size: int

    def work(self, reading: Reading, form: BatchForm) -> RankWork:
        """Return the chunks, as work for this process."""
        return RankChunks(reading, self.resume, self.rank, self.size)


Task = BatchTask | ChunkTask
