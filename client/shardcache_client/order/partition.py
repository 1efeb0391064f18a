"""Cutting a sequence of samples into equal spans: for the ranks, and for the workers of each rank. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardcache_client.topology import Topology

Even = Literal["pad", "drop"] | None
"""What is done where samples do not divide by ranks: "pad" repeats at most `world_size - 1` of them, as PyTorch's
DistributedSampler does; "drop" leaves out as many; None gives some ranks one sample more than others."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a sequence is cut for the readers of a job: spans that follow each other, rank by rank, worker by worker.

    Attributes:
        even: see `Even`.
        batch_size: workers' spans are whole batches of so many samples, but for the rank's last batch.
    """

    world_size: int
    workers: int
    even: Even = "pad"
    batch_size: int = 1

    @classmethod
    def of(cls, topology: Topology, even: Even, batch_size: int) -> Cut:
        """Build for the job that a reader belongs to."""
        return cls(topology.world_size, topology.workers, even, batch_size)

    @property
    def readers(self) -> int:
        """How many spans there are."""
        return self.world_size * self.workers

    def rank_size(self, samples: int, rank: int) -> int:
        """Return how many of the sequence's samples one rank gets."""
        start, stop = self._rank_span(samples, rank)
        return stop - start

    def span(self, samples: int, reader: int) -> tuple[int, int]:
        """Return where a reader's span begins and ends in a sequence of so many samples.

        A span that reaches beyond the end goes on at the beginning: those samples are the padding.

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
        """Return how many of the sequence's samples each worker of a rank gets."""
        spans = (self.span(samples, rank * self.workers + worker) for worker in range(self.workers))
        return [stop - start for start, stop in spans]

    def batches(self, samples: int, rank: int, *, drop_last: bool = False) -> int:
        """Return how many batches one rank makes of the sequence, the short one included unless it is dropped."""
        size = self.rank_size(samples, rank)
        return size // self.batch_size if drop_last else -(-size // self.batch_size)

    def _rank_span(self, samples: int, rank: int) -> tuple[int, int]:
        if self.even is None:
            return samples * rank // self.world_size, samples * (rank + 1) // self.world_size
        whole, rest = divmod(samples, self.world_size)
        each = whole + (1 if rest and self.even == "pad" else 0)
        return rank * each, (rank + 1) * each


def taken_in_turns(sizes: Sequence[int], batch_size: int, batches: int) -> list[int]:
    """Return how many samples each worker of a rank has given when the rank has had so many batches.

    A DataLoader takes a batch from each worker in turn, leaving out those that have no more.

    Args:
        sizes: how many samples each worker had to give.
    """
    most = [-(-size // batch_size) for size in sizes]
    turns = bisect_right(range(max(most) + 1), batches, key=lambda turn: sum(min(each, turn) for each in most)) - 1
    given = [min(each, turns) for each in most]
    for worker in [worker for worker, each in enumerate(most) if each > turns][: max(0, batches - sum(given))]:
        given[worker] += 1
    return [min(size, count * batch_size) for size, count in zip(sizes, given, strict=True)]
