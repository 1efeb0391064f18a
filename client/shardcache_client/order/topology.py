"""The place of a reader among the readers of a job."""

from __future__ import annotations

from dataclasses import dataclass

from shardcache.shared.exceptions import ConfigError


@dataclass(frozen=True, slots=True)
class Topology:
    """One reader: a DataLoader worker of a rank, or the rank's own process as its only worker.

    Raises ConfigError if `rank` is out of range.

    Attributes:
        rank: number of the rank across all nodes, from 0 to `world_size` - 1.
        world_size: number of ranks.
        worker: number of the worker in its rank, from 0 to `workers` - 1.
        workers: number of workers of each rank.
    """

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    workers: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank {self.rank} is out of range for world_size {self.world_size}",
                remedy="ranks run from 0 to world_size - 1",
            )

    @property
    def readers(self) -> int:
        """Number of readers in the job, if every rank has as many workers as this one."""
        return self.world_size * self.workers

    @property
    def reader(self) -> int:
        """Number of this reader in the job, from 0."""
        return self.rank * self.workers + self.worker

    def as_rank(self) -> Topology:
        """Return this reader as a rank, where every reader of the job counts as one."""
        return Topology(rank=self.reader, world_size=self.readers)
