"""Division of a sequence of samples into equal spans, for ranks and for the workers of each rank. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardcache_client.topology import Topology

Even = Literal["pad", "drop"] | None
"""Policy for a number of samples not divisible by the ranks: "pad" repeats at most `world_size - 1` samples, as
PyTorch's DistributedSampler does; "drop" leaves out at most as many; None gives some ranks one sample more."""


@dataclass(frozen=True, slots=True)
class Partition:
    """Division of a sequence among the readers of a job: consecutive spans, rank by rank and worker by worker.

    Attributes:
        even: see `Even`.
        batch_size: workers' spans are whole batches of this size, except for the rank's last batch.
    """

    world_size: int
    workers: int
    even: Even = "pad"
    batch_size: int = 1

    @classmethod
    def of(cls, topology: Topology, even: Even, batch_size: int) -> Partition:
        """Build for the job that a reader belongs to."""
        return cls(topology.world_size, topology.workers, even, batch_size)

    @property
    def readers(self) -> int:
        """Number of spans, one per reader."""
        return self.world_size * self.workers

    def rank_size(self, samples: int, rank: int) -> int:
        """Return the number of samples that a rank gets of a sequence of `samples`."""
        start, stop = self._rank_span(samples, rank)
        return stop - start

    def span(self, samples: int, reader: int) -> tuple[int, int]:
        """Return start and stop of a reader's span in a sequence of `samples`.

        A span that reaches beyond the end continues at the beginning: those samples are the padding.

        Args:
            reader: `rank * workers + worker`.
        """
        rank, worker = divmod(reader, self.workers)
        start, stop = self._rank_span(samples, rank)
        batches = -((start - stop) // self.batch_size)
        begin = start + batches * worker // self.workers * self.batch_size
        end = start + batches * (worker + 1) // self.workers * self.batch_size
        return min(begin, stop), min(end, stop)

    def worker_sizes(self, samples: int, rank: int) -> list[int]:
        """Return the number of samples that each worker of a rank gets of a sequence of `samples`."""
        spans = (self.span(samples, rank * self.workers + worker) for worker in range(self.workers))
        return [stop - start for start, stop in spans]

    def batches(self, samples: int, rank: int, *, drop_last: bool = False) -> int:
        """Return the number of batches that a rank makes of a sequence, with the short one unless it is dropped."""
        size = self.rank_size(samples, rank)
        return size // self.batch_size if drop_last else -(-size // self.batch_size)

    def _rank_span(self, samples: int, rank: int) -> tuple[int, int]:
        if self.even is None:
            return samples * rank // self.world_size, samples * (rank + 1) // self.world_size
        whole, rest = divmod(samples, self.world_size)
        each = whole + (1 if rest and self.even == "pad" else 0)
        return rank * each, (rank + 1) * each


def taken_in_turns(sizes: Sequence[int], batch_size: int, batches: int) -> list[int]:
    """Return the number of samples that each worker of a rank has yielded after `batches` batches of the rank.

    A DataLoader takes a batch from each worker in turn, skipping those that have no more.

    Args:
        sizes: number of samples in each worker's share.
    """
    most = [-(-size // batch_size) for size in sizes]
    turns = bisect_right(range(max(most) + 1), batches, key=lambda turn: sum(min(each, turn) for each in most)) - 1
    given = [min(each, turns) for each in most]
    for worker in [worker for worker, each in enumerate(most) if each > turns][: max(0, batches - sum(given))]:
        given[worker] += 1
    return [min(size, count * batch_size) for size, count in zip(sizes, given, strict=True)]
