"""Batches for a training loop, of samples that are counted in advance.

Each batch has a number, and its samples are known before it is made. So reading can begin with any
batch. This thread, other threads or processes make the batches; see `Workers`. `ShardLoader` reads
them.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from shardcache_client.batches.maker import BadCounts
from shardcache_client.batches.rank_batches import RankBatches
from shardcache_client.batches.sample_run import report_skipped
from shardcache_client.loading.tasks import BatchTask
from shardcache_client.loading.workers import Workers
from shardcache_client.order.dealing.deal import Deal
from shardcache_client.order.topology import Topology
from shardcache_client.position.rank_state import StateForm
from shardcache_client.reading.epochs.epoch_times import BatchTimes


@dataclass(eq=False, repr=False)
class BatchPosition:
    """Position of a rank among its batches of an epoch.

    Attributes:
        batches: the batches of the epoch, or of the rest of an epoch.
        rank: the rank.
        size: number of samples in a batch.
        state_form: facts for the rank's states.
        next: number of the next batch.
        has_gaps: True if a batch had no good sample, and was left out. This rank may then be ahead
            of others.
    """

    batches: RankBatches
    rank: Topology
    size: int
    state_form: StateForm
    next: int = 0
    has_gaps: bool = False
    _has_ended: bool = field(default=False, init=False)

    def __repr__(self) -> str:
        return f"BatchPosition({self.batches!r}, next={self.next})"

    @property
    def epoch(self) -> int:
        """The epoch that is being read."""
        return self.batches.progress.epoch

    @property
    def is_read(self) -> bool:
        """True if there are known to be no more batches."""
        return self._has_ended or self.next >= self.batches.count

    @property
    def batches_left(self) -> int:
        """Number of batches that are left."""
        return max(0, self.batches.count - self.next)

    def move_to(self, number: int) -> None:
        """Set the next batch, by its number: the batches before it were taken or left out."""
        self.next = number

    def end(self) -> None:
        """Note that there are no more batches."""
        self._has_ended = True

    def skip(self, batches: int) -> None:
        """Leave out the next batches."""
        self.next = min(self.batches.count, self.next + batches)

    def to_json(self) -> dict[str, Any]:
        """Return the rank's state as a JSON object."""
        is_over_for_all = self._is_over_for_all()
        state = self.state_form.state(
            self.batches.after(self.next),
            self.rank,
            ended=self.is_read,
            over=is_over_for_all,
            left=max(0, self.batches.samples - self.next * self.size),
        )
        # The state of a rank that may be ahead must not stand for all ranks. A state that names no
        # rank is left as it is: the ranks then have equal numbers of samples, and none is ahead.
        if self.has_gaps and not is_over_for_all and state.rank is not None:
            state = replace(state, in_step=False)
        return state.to_json()

    def _is_over_for_all(self) -> bool:
        """Return True if no rank has a further batch in the epoch."""
        if not self.is_read:
            return False
        # This rank may be ahead of others, which then have batches left.
        if self.has_gaps and self.rank.world_size > 1:
            return False
        return self.state_form.ends_together(self.batches.progress, self.rank)


class NumberedBatches:
    """Reads the batches of one iteration after another.

    Args:
        workers: makes the batches; its workers may persist between iterations.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def is_usable(self, deal: Deal) -> bool:
        """Return True if these workers can make the batches of an iteration in this process.

        Args:
            deal: division of the samples among the ranks in the iteration.
        """
        # Loading a state with another seed replaces the dataset's deal.
        return self._workers.are_of_this_process and self._workers.deal is deal

    def read(self, position: BatchPosition) -> Generator[tuple[Any, int, BatchTimes]]:
        """Yield each batch with the number of the next one, and the times of making it.

        Batches that the position skips in the meantime are left out. Raises any error of making the
        batches.
        """
        bad = BadCounts()
        try:
            yield from self._read(position, bad)
        finally:  # an epoch that is left early is reported as well
            has_substitutes = position.state_form.deal.even is not None
            report_skipped(
                position.epoch,
                samples=bad.samples,
                lost_shards=bad.lost,
                has_substitutes=has_substitutes,
            )

    def _read(
        self, position: BatchPosition, bad: BadCounts
    ) -> Generator[tuple[Any, int, BatchTimes]]:
        """Yield the same as `read`, and count the bad samples in `bad`."""
        is_over = False
        # This loop turns once, and once more whenever the user skips batches.
        while not is_over and not position.is_read:
            start = position.next
            task = BatchTask(position.batches.progress, position.rank)
            with closing(self._workers.parts(task, position.batches, start)) as batches:
                for number, made in enumerate(batches, start):
                    bad.samples += made.skipped
                    bad.lost |= made.lost
                    if made.content is None:
                        position.move_to(number + 1)
                        position.has_gaps = True
                    else:
                        yield made.content, number + 1, made.times
                    is_over = made.is_last
                    # The loader has moved the position past this batch. So the next batch is due,
                    # unless the user has skipped batches.
                    if is_over or position.next != number + 1:
                        break
