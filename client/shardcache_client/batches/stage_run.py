"""One reader's items in an epoch of samples without numbers, for `for sample in dataset`.

Samples have no numbers if they are filtered, uncounted, or regrouped by a stage. An item is what a
stage makes of some samples; without a stage, each sample is an item. `sample_run` is the
counterpart for samples that have numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

from shardcache_client.batches.maker import BadCounts
from shardcache_client.batches.rank_chunks import RankChunks
from shardcache_client.batches.rank_work import Reading
from shardcache_client.batches.sample_run import report_skipped
from shardcache_client.batches.staged_epoch import StagedEpoch, StagedForm
from shardcache_client.order.topology import Topology
from shardcache_client.position.staged_state import Resume, StagedState


class StageRun:
    """The items that one reader yields in an epoch, or in the rest of one. Used once.

    Each worker of a plain DataLoader reads a share of its own, like a rank. The workers cannot
    divide a rank's batches: which samples are in a batch depends on those that are left out, and
    this is known only once they are read.

    Args:
        reading: means of reading the dataset.
        form: facts about the dataset's staged epochs.
        resume: place from which the epoch is read.
        reader: the rank, or its worker.
        quota: number of samples that the reader gets; None for all samples of its share.
        is_over: True if nothing was left of the epoch before this run.
    """

    def __init__(
        self,
        reading: Reading,
        form: StagedForm,
        resume: Resume,
        reader: Topology,
        quota: int | None,
        *,
        is_over: bool = False,
    ) -> None:
        self._is_read = False  # True once the last item has been yielded, or is known to be next
        self._form = form
        self._reader = reader
        self._was_over = is_over
        self._bad = BadCounts()
        # Each worker reads like a rank. So in this topology, every reader of the job is a rank.
        as_rank = Topology(rank=reader.reader, world_size=reader.readers)
        self._chunks = RankChunks(reading, resume, as_rank, size=1)
        self._epoch = StagedEpoch(form, resume, reader, self._chunks.places, quota)

    def __repr__(self) -> str:
        return f"StageRun({self._epoch!r})"

    @property
    def counted(self) -> bool:
        """True if samples are dealt to readers, False if whole shards are."""
        return self._form.deal.counted

    @property
    def taken(self) -> int:
        """Number of places passed."""
        return self._epoch.reached.mark.place

    @property
    def samples_left(self) -> int:
        """Number of samples still to be yielded; 0 if it is unknown.

        The number is a maximum if samples may be left out.
        """
        if self._was_over:
            return 0
        return self._epoch.samples_left(self._epoch.reached)

    def samples(self, when_read: Callable[[], object] = lambda: None) -> Generator[Any]:
        """Yield the items.

        Args:
            when_read: called before the last item is yielded, if it is known to be the last, and
                after it otherwise.
        """
        try:
            if not self._was_over:
                yield from self._items(when_read)
            if not self._is_read:
                self._end(when_read)
        finally:  # The report is also logged if the user leaves the epoch early.
            report_skipped(self._epoch.epoch, self._bad.samples, self._bad.lost, repeated=False)

    def _items(self, when_read: Callable[[], object]) -> Generator[Any]:
        """Yield the items, and call `when_read` before an item that is known to be the last."""
        epoch = self._epoch
        with closing(self._chunks.placed_items(self._bad, epoch.begun_steps)) as samples:
            for item in epoch.items(samples):
                if epoch.is_read:
                    self._end(when_read)
                yield item

    def _end(self, when_read: Callable[[], object]) -> None:
        """Record that the last item has been read, and call `when_read`."""
        self._is_read = True
        when_read()

    # State.

    def state(self, *, over: bool = False) -> StagedState:
        """Return the reader's state.

        Args:
            over: True if no reader has anything left of the epoch.
        """
        ended = self._is_read or self._was_over
        return self._epoch.state(self._epoch.reached, ended=ended, over=over)

    @property
    def is_over(self) -> bool:
        """True if the epoch has nothing left on any rank."""
        return self._is_read and self._form.ends_together(self._reader)
