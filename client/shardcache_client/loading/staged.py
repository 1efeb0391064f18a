"""Batches for a training loop, of samples that a filter may drop or a stage regroups.

It is not known in advance which samples such a batch will have. So workers make chunks, each with
the good samples at some places of the epoch. This process runs the stage over the chunks' samples,
and puts the stage's items together to batches. `ShardLoader` reads them.

- A stage, such as packing, makes items from groups of samples. Without a stage, each sample is an
  item.
- A place is the number of a sample in the rank's epoch, before any filter or stage.
- Shards are uncounted if their numbers of samples are unknown. They are read in shares and steps:
  see `rank_chunks`.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

from shardcache_client.batches.maker import MadePart, collated
from shardcache_client.batches.rank_chunks import Chunk, RankChunks, SharePlace
from shardcache_client.batches.rank_work import BatchForm
from shardcache_client.batches.sample_run import report_skipped
from shardcache_client.batches.staged_epoch import StagedEpoch, StagedForm
from shardcache_client.batches.threads import Check, made_by_threads, nothing_to_check
from shardcache_client.loading.tasks import ChunkTask
from shardcache_client.loading.workers import Workers
from shardcache_client.order.dealing.deal import Deal
from shardcache_client.position.staged_state import Reached
from shardcache_client.reading.epochs.epoch_times import BatchTimes
from shardcache_client.stages.stage import Placed

STAGED_CHUNK = 16
"""Number of places of a chunk whose samples a stage regroups.

Larger chunks need fewer messages. The samples in them take memory, but a stage keeps many samples
anyway.
"""

# Number of batches that are put together before they are asked for. Workers make chunks for further
# batches.
_BATCHES_AHEAD = 2

BatchEnd: TypeAlias = tuple[Reached, bool]
"""Position at the end of a batch, and True if the batch is known to be the epoch's last."""

StagedBatch: TypeAlias = tuple[Any, BatchEnd, BatchTimes]
"""A collated batch, with its end and the times of making it."""


class StagedWork(NamedTuple):
    """One rank's epoch, or the rest of it, to be made into batches.

    Attributes:
        staged_epoch: makes the items, and the rank's states.
        chunks: the chunks of samples that workers make.
        task: describes the same chunks to worker processes.
    """

    staged_epoch: StagedEpoch
    chunks: RankChunks
    task: ChunkTask

    @property
    def resumes_at(self) -> Reached:
        """Position of the rank at which the work begins."""
        return self.task.resume.reached


class StagedPosition:
    """A rank's position among the batches of an epoch.

    Args:
        work: the epoch from this position on.
        staged_form: facts about the dataset's staged epochs.
        batch_form: the form of the batches.
        is_read: True if there are no batches left.
    """

    def __init__(
        self, work: StagedWork, staged_form: StagedForm, batch_form: BatchForm, *, is_read: bool
    ) -> None:
        self.work = work
        self._staged_form = staged_form
        self._batch_form = batch_form
        self._reached = work.resumes_at
        self._is_read = is_read

    def __repr__(self) -> str:
        return f"StagedPosition({self._reached!r}, is_read={self._is_read})"

    @property
    def epoch(self) -> int:
        """The epoch that is being read."""
        return self.work.staged_epoch.epoch

    @property
    def deal(self) -> Deal:
        """Division of the samples among the ranks."""
        return self._staged_form.deal

    @property
    def is_read(self) -> bool:
        """True if there are known to be no more batches."""
        return self._is_read

    @property
    def batches_left(self) -> int:
        """Number of batches that are left; 0 if the number of samples that are left is unknown.

        The number is a maximum if samples may be left out.
        """
        samples = self.work.staged_epoch.samples_left(self._reached)
        if samples is None:
            return 0
        size = self._batch_form.places_per_batch
        if self._batch_form.drop_last:
            return samples // size
        return math.ceil(samples / size)

    @property
    def may_wait_for_ranks(self) -> bool:
        """True if the stage waits for other ranks, so that no thread may run it ahead."""
        rank = self.work.task.rank
        return self._staged_form.stage is not None and rank.world_size > 1

    def move_to(self, end: BatchEnd) -> None:
        """Set the position to the end of a batch that was taken."""
        self._reached, self._is_read = end

    def end(self) -> None:
        """Note that there are no more batches."""
        self._is_read = True

    def to_json(self) -> dict[str, Any]:
        """Return the rank's state as a JSON object."""
        is_over_for_all = self._is_read and self._staged_form.ends_together(self.work.task.rank)
        state = self.work.staged_epoch.state(
            self._reached, ended=self._is_read, over=is_over_for_all
        )
        return state.to_json()


class StagedBatches:
    """Reads the batches of one iteration after another.

    Args:
        workers: makes the chunks.
        form: the form of the batches; its size is None if the stage's items are batches already.
    """

    def __init__(self, workers: Workers, form: BatchForm) -> None:
        self._workers = workers
        self._form = form

    def is_usable(self, deal: Deal) -> bool:
        """Return True if these workers can make the batches of an iteration in this process.

        Args:
            deal: division of the samples among the ranks in the iteration.
        """
        # Each position has a deal of its own. It is equal to the workers' unless a state that was
        # loaded in the meantime has changed it.
        return self._workers.are_of_this_process and self._workers.deal == deal

    def read(self, position: StagedPosition) -> Generator[StagedBatch]:
        """Yield the batches from a position on. Raises any error of making the batches."""
        if position.is_read:
            return
        work = position.work
        samples = _ChunkSamples(work)
        # With workers, a thread of this process puts batches together ahead of the loop. A stage
        # that waits for other ranks may only run in the loop's own thread.
        if self._workers.count > 0 and not position.may_wait_for_ranks:
            batches = made_by_threads(
                partial(self._uncollated_batches, work, samples),
                self._collate,
                threads=1,
                ahead=_BATCHES_AHEAD,
                begin=self._workers.thread_preparation(),
            )
        else:
            batches = self._collate_here(work, samples)
        try:
            with closing(batches):
                yield from batches
        finally:
            # An epoch that is left early is reported as well.
            report_skipped(
                position.epoch,
                samples=samples.skipped,
                lost_shards=samples.lost,
                has_substitutes=False,
            )

    def _uncollated_batches(
        self, work: StagedWork, samples: _ChunkSamples, check: Check
    ) -> Generator[_UncollatedBatch]:
        """Yield the items of each batch.

        Args:
            work: the epoch to make batches of.
            samples: takes the samples from the chunks, and counts bad ones.
            check: called before each chunk; it may raise to end the batches.
        """
        chunks = self._workers.parts(work.task, work.chunks, start=0)
        with closing(chunks):
            items = work.staged_epoch.items(samples.from_chunks(chunks, check))
            size = self._form.places_per_batch
            while batch := list(islice(items, size)):
                if len(batch) < size and self._form.drop_last:
                    return
                end = (work.staged_epoch.reached, work.staged_epoch.is_read)
                yield _UncollatedBatch(batch, end, samples.take_times())

    def _collate_here(self, work: StagedWork, samples: _ChunkSamples) -> Generator[StagedBatch]:
        """Yield the batches, each made by this thread when it is asked for."""
        with closing(self._uncollated_batches(work, samples, nothing_to_check)) as batches:
            for uncollated in batches:
                yield self._collate(uncollated)

    def _collate(self, uncollated: _UncollatedBatch) -> StagedBatch:
        """Collate the items of a batch, and pin its memory if that is wanted."""
        begun_s = monotonic()
        items = uncollated.items
        samples: Any = items
        if self._form.size is None:
            samples = items[0]  # the stage's item is a batch already
        batch = self._workers.pinned(collated(self._form.collate, samples))
        times = uncollated.times.of_batch(len(items), begun_s, monotonic())
        return batch, uncollated.end, times


class _ChunkTimes(NamedTuple):
    """The times of making the chunks of a batch.

    Attributes:
        begun_s: time at which the first chunk was begun; None without chunks.
        waited_s: duration of the waits for shards, summed over all chunks.
        decoding_s: duration of decoding, summed over all chunks.
    """

    begun_s: float | None = None
    waited_s: float = 0.0
    decoding_s: float = 0.0

    def of_batch(self, samples: int, collating_begun_s: float, ended_s: float) -> BatchTimes:
        """Return the times of a batch of these chunks.

        Args:
            samples: number of samples of the batch.
            collating_begun_s: time at which collating the batch began.
            ended_s: time at which the collating ended.
        """
        begun_s = collating_begun_s
        if self.begun_s is not None:
            begun_s = min(self.begun_s, collating_begun_s)
        # Several workers wait and decode at the same time, so the sums may exceed the time that has
        # passed. In that case both sums are scaled down to it.
        passed_s = collating_begun_s - begun_s
        summed_s = self.waited_s + self.decoding_s
        scale = 1.0
        if summed_s > passed_s:
            scale = passed_s / summed_s
        return BatchTimes(
            samples=samples,
            begun_s=begun_s,
            ended_s=ended_s,
            waited_s=scale * self.waited_s,
            decoding_s=scale * self.decoding_s,
            collating_s=ended_s - collating_begun_s,
        )


class _UncollatedBatch(NamedTuple):
    """A batch before collating.

    Attributes:
        items: the items of the batch, in their order.
        end: the position at the end of the batch.
        times: the times of making the chunks of the batch's samples.
    """

    items: list[Any]
    end: BatchEnd
    times: _ChunkTimes


class _ChunkSamples:
    """Takes the samples from chunks, and adds up the times of making the chunks.

    Args:
        work: the epoch that the chunks belong to.

    Attributes:
        skipped: number of bad samples that were skipped.
        lost: urls of the shards that could not be read and were skipped.
    """

    def __init__(self, work: StagedWork) -> None:
        self.skipped = 0
        self.lost: set[str] = set()
        self._work = work
        self._times = _ChunkTimes()

    def from_chunks(self, made_chunks: Iterator[MadePart], check: Check) -> Iterator[Placed]:
        """Yield the samples of chunks.

        Args:
            made_chunks: the parts that the workers have made; each has a chunk as its content.
            check: called before each chunk; it may raise to end the samples.

        Raises ShardError if all samples have been tried, and none of them was good.
        """
        resumed = self._work.resumes_at
        # Position of the last good sample: the start, until there is one.
        last_good = SharePlace(resumed.mark.place, resumed.step.share)
        for made in made_chunks:
            check()
            chunk: Chunk = made.content
            self.skipped += made.skipped
            self.lost |= made.lost
            self._add_times(made.times)
            self._add_steps(chunk)
            share = self._current_share()
            if chunk.items:
                last_good = SharePlace(chunk.items[-1].place, share)
            else:
                end = SharePlace(chunk.end, share)
                self._work.chunks.check_progress(last_good, end, chunk.first_error)
            yield from chunk.items
            if made.is_last:
                return

    def _add_times(self, times: BatchTimes) -> None:
        """Add the times of a chunk."""
        begun_s = self._times.begun_s
        if begun_s is None:
            begun_s = times.begun_s
        self._times = _ChunkTimes(
            begun_s,
            waited_s=self._times.waited_s + times.waited_s,
            decoding_s=self._times.decoding_s + times.decoding_s,
        )

    def _add_steps(self, chunk: Chunk) -> None:
        """Pass the steps of a chunk's uncounted shards to the staged epoch.

        The staged epoch removes each step from the deque once it has passed it.
        """
        begun = self._work.staged_epoch.begun_steps
        for step in chunk.steps:
            # The previous chunk may have had the first of these steps as well. Steps are in order:
            # by share, then by number in the share.
            if not begun or step > begun[-1]:
                begun.append(step)

    def _current_share(self) -> int:
        """Return the number of the share of uncounted shards that is being read."""
        begun = self._work.staged_epoch.begun_steps
        if not begun:
            first_step = self._work.resumes_at.step
            return first_step.share
        return begun[-1].share

    def take_times(self) -> _ChunkTimes:
        """Return the times of making the chunks since the last call."""
        times = self._times
        self._times = _ChunkTimes()
        return times
