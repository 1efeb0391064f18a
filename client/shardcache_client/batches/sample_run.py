"""One reader's samples of an epoch, one by one, for `for sample in dataset`.

The reader is a rank, or a worker of a plain DataLoader, which yields the samples of the batches
that the DataLoader asks it for. A place is the number of a sample in the rank's epoch: the order of
the samples is known before they are read. Where it is not, `stage_run` is used instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Set
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

from shardcache.shared.exceptions import ConfigError
from shardcache_client.batches.maker import BadCounts
from shardcache_client.batches.rank_batches import RankBatches
from shardcache_client.batches.rank_work import BatchForm, Reading
from shardcache_client.order.topology import Topology
from shardcache_client.position.progress import Progress
from shardcache_client.position.rank_state import RankState, StateForm, WorkerPart

log = logging.getLogger("shardcache")


class RunStart(NamedTuple):
    """Position from which a reader resumes an epoch.

    Attributes:
        progress: progress of all ranks in the epoch so far.
        part: samples that this worker has given after `progress`; None if there are none, or if
            the reader is a rank.
        is_read: True if nothing is left of the epoch, even if the progress shows that some is.
    """

    progress: Progress
    part: WorkerPart | None = None
    is_read: bool = False


class SampleRun:
    """The samples that one reader reads in an epoch, or in the rest of one. Used once.

    Worker w of n reads the batches w, w + n, w + 2n and so on, since a DataLoader asks its workers
    for batches in turn. So the loader yields the rank's samples in the same order with any number
    of workers.

    Args:
        reading: means of reading the dataset.
        reader: the rank, and its worker if there are several.
        form: what the states of all ranks and epochs have in common.
        asked_size: given the dataset's batch size, returns the batch size of the DataLoader that
            asks for samples; returns the argument if no DataLoader asks. It is called when the
            first sample is asked for, since the DataLoader is known only then.
        start: position from which the reader resumes.
    """

    counted = True  # samples are dealt to readers, never whole shards; see `StageRun`

    def __init__(
        self,
        reading: Reading,
        reader: Topology,
        form: StateForm,
        asked_size: Callable[[int], int],
        start: RunStart,
    ) -> None:
        part = start.part
        self._reader = reader
        # True once nothing is left to read. The last sample may still have to be yielded.
        self._is_read = False
        self._reading = reading
        self._progress = start.progress
        self._rank = Topology(reader.rank, reader.world_size)
        self._form = form
        self._asked_size = asked_size
        self._was_read = start.is_read
        self._bad = BadCounts()
        # With `even=None`, ranks may have different numbers of samples. Bad samples are then left
        # out. Otherwise each is replaced by a substitute, and none is left out.
        self._has_substitutes = reading.deal.even is not None
        self._left_out = self._bad
        if self._has_substitutes:
            self._left_out = BadCounts()  # stays empty
        self._yielded = 0
        self._passed_before = 0  # places after the progress that were passed before this run
        self._batch_size = form.batch_size
        if part is not None:
            self._passed_before = part.samples
            self._batch_size = part.batch_size
        self._set_batches()

    def __repr__(self) -> str:
        return f"SampleRun({self._progress!r}, places_passed={self.places_passed})"

    def _set_batches(self) -> None:
        """Divide the rank's samples into batches of the present size."""
        form = BatchForm(self._batch_size, drop_last=False, collate=list)
        self._batches = RankBatches(
            self._reading, self._progress, self._rank, form, is_read=self._was_read
        )
        self._total = self._batches.samples  # number of samples of this reader after the progress
        if not self._is_whole_rank:
            worker = self._reader.worker
            workers = self._reader.workers
            self._total = samples_of_worker(self._total, self._batch_size, worker, workers)

    @property
    def _is_whole_rank(self) -> bool:
        """True if the reader is a rank, or a rank's only worker."""
        return self._reader.workers == 1

    @property
    def places_passed(self) -> int:
        """Number of places passed since the progress, including those of bad samples."""
        return self._passed_before + self._yielded + self._left_out.places

    @property
    def samples_left(self) -> int:
        """Number of samples still to be yielded."""
        return self._total - self.places_passed

    def items(self, when_read: Callable[[], object] = lambda: None) -> Generator[Any]:
        """Yield the items, which are what the samples have become in the dataset's pipeline.

        Args:
            when_read: called before the last sample is yielded, or at once if no samples are left.
        """
        if self._reading.deal.has_source_batches:
            self._check_size(self._asked_size(self._batch_size))
        # A DataLoader takes whole batches from its workers in turn, so the batches that they divide
        # must have its size. A worker that resumes goes on with the size that it began with.
        if not self._is_whole_rank and not self._passed_before:
            self._batch_size = self._asked_size(self._batch_size)
            self._set_batches()
        if self.samples_left <= 0:
            self._end(when_read)
            return
        left_out = self._left_out  # a local variable, as the loop below runs for each sample
        places_to_pass = self._total - self._passed_before
        try:
            with closing(self._items_left()) as items:
                for yielded, item in enumerate(items, 1):
                    self._yielded = yielded
                    if yielded + left_out.places == places_to_pass:
                        # The run ends before it yields the last sample, since a loop that knows the
                        # number of samples does not ask for a further sample.
                        self._end(when_read)
                    yield item
            if not self._is_read:  # the last samples were left out
                self._end(when_read)
        finally:  # The report is also logged if the user leaves the epoch early.
            report_skipped(
                self._progress.epoch,
                samples=self._bad.samples,
                lost_shards=self._bad.lost,
                has_substitutes=self._has_substitutes,
            )

    def _check_size(self, asked_size: int) -> None:
        """Raise ConfigError if a loader's batches would have samples of several sources.

        Args:
            asked_size: number of samples in a batch of the loader.
        """
        if self._batch_size % asked_size:
            raise ConfigError(
                f"the mixture has batches of {self._batch_size} samples of one source, and the "
                f"DataLoader makes batches of {asked_size}",
                remedy=f"give it batch_size={self._batch_size}; or the mixture's sources "
                f"batch_size={asked_size}",
            )

    def _items_left(self) -> Generator[Any]:
        """Yield the items at the places to read."""
        is_shared = not self._is_whole_rank
        return self._batches.items(self._runs(), self._bad, is_shared=is_shared)

    def _runs(self) -> Iterable[tuple[int, int]]:
        """Yield the runs of places to read: the first place of each, and the place after its last.

        A whole rank has one run, and a worker has one run for each batch.
        """
        if self._is_whole_rank:
            first = self._batches.place_of_sample(self._passed_before)
            end = self._batches.place_of_sample(self._total)
            yield first, end
            return
        batches_passed, places_passed = divmod(self._passed_before, self._batch_size)
        workers = self._reader.workers
        next_batch = self._reader.worker + batches_passed * workers
        for number in range(next_batch, self._batches.count, workers):
            first, end = self._batches.places_of(number)
            yield first + places_passed, end
            places_passed = 0  # only the first of these batches was begun before

    def _end(self, when_read: Callable[[], object]) -> None:
        """Record that the last sample has been read, and call `when_read`."""
        self._is_read = True
        when_read()

    # State.

    def state(self, *, over: bool = False) -> RankState:
        """Return the reader's state.

        Args:
            over: True if no rank has anything left of the epoch.
        """
        ended = self._has_ended()
        left = self.samples_left
        if self._is_whole_rank:
            progress = self._batches.after_samples(self.places_passed, self._form.batch_size)
            return self._form.state(progress, self._rank, ended=ended, over=over, left=left)

        part = WorkerPart(
            self._reader.worker, self._reader.workers, self._batch_size, self.places_passed
        )
        form = replace(self._form, batch_size=self._batch_size)
        return form.state(self._progress, self._rank, ended=ended, over=over, left=left, part=part)

    @property
    def is_over(self) -> bool:
        """True if the epoch has no more batches on any rank."""
        if not self._is_whole_rank or not self._has_ended():
            return False
        return self._form.ends_together(self._progress, self._rank)

    def _has_ended(self) -> bool:
        """Return True if this reader has nothing left of the epoch."""
        return self._is_read or self.samples_left < 1


def samples_of_worker(samples: int, batch_size: int, worker: int, workers: int) -> int:
    """Return the number of samples in a worker's batches, which are every `workers`-th batch.

    Args:
        samples: number of samples of the rank.
        batch_size: number of samples in a batch.
        worker: number of the worker, and of its first batch.
        workers: number of workers of the rank.
    """
    batches_of_rank = -(-samples // batch_size)  # rounded up
    batches = range(worker, batches_of_rank, workers)
    if not batches:
        return 0
    size_of_last = min(batch_size, samples - batches[-1] * batch_size)
    return (len(batches) - 1) * batch_size + size_of_last


def report_skipped(
    epoch: int, *, samples: int, lost_shards: Set[str], has_substitutes: bool
) -> None:
    """Log how many samples and shards of an epoch were skipped, if any.

    Args:
        epoch: number of the epoch.
        samples: number of skipped samples of shards that could be read.
        lost_shards: urls of shards that could not be read.
        has_substitutes: True if other samples took the place of the skipped ones.
    """
    if not samples and not lost_shards:
        return
    note = "; other samples were repeated in their place" if has_substitutes else ""
    log.warning(
        "epoch %d: skipped %d shards, and %d samples of other shards, as on_error decided%s",
        epoch,
        len(lost_shards),
        samples,
        note,
    )
