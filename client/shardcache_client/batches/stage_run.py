"""One reader's items in a staged epoch, for `for sample in dataset`.

An epoch is staged if its samples have no numbers, because at least one of these is true:

- A filter leaves some of them out.
- They are uncounted: nobody knows how many samples each shard has.
- A stage regroups them, for example into blocks of tokens.

An item is what a stage makes of some samples; without a stage, each sample is an item. A place is
the number of a sample in the reader's share of the epoch, before any filter or stage. `sample_run`
is the counterpart for samples that have numbers.
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

    A reader is a rank, or one of its workers in a plain DataLoader. Each worker reads a share of
    its own, as if it were a rank. The workers cannot divide a rank's batches: which samples are in
    a batch depends on those that are left out, and this is known only once they are read.

    Args:
        reading: means of reading the dataset.
        form: what all staged epochs of the dataset have in common.
        resume: position from which the epoch is read.
        reader: the rank, or its worker.
        quota: number of samples that the reader gets; None for all samples of its share.
        was_read: True if this reader had read its share of the epoch before this run.
    """

    def __init__(
        self,
        reading: Reading,
        form: StagedForm,
        resume: Resume,
        reader: Topology,
        quota: int | None,
        *,
        was_read: bool = False,
    ) -> None:
        # True once nothing is left to read. The last item may still have to be yielded.
        self._is_read = False
        self._was_read = was_read
        self._form = form
        self._reader = reader
        self._bad = BadCounts()
        # `placed_items` reads sample by sample, whatever the size of a chunk is.
        self._chunks = RankChunks(reading, resume, reader.as_rank(), size=1)
        # States name the worker, so the epoch has the reader itself, and not the reader as a rank.
        self._epoch = StagedEpoch(form, resume, reader, self._chunks.places, quota)

    def __repr__(self) -> str:
        return f"StageRun({self._epoch!r})"

    @property
    def counted(self) -> bool:
        """True if samples are dealt to readers, False if whole shards are."""
        return self._form.deal.counted

    @property
    def places_passed(self) -> int:
        """Number of places of the share that the reader has passed."""
        reached = self._epoch.reached
        return reached.mark.place

    @property
    def samples_left(self) -> int | None:
        """Number of samples still to be yielded; None if it is unknown.

        The number is a maximum if samples may be left out.
        """
        if self._was_read:
            return 0
        reached = self._epoch.reached
        return self._epoch.samples_left(reached)

    def items(self, when_read: Callable[[], object] = lambda: None) -> Generator[Any]:
        """Yield the items.

        Args:
            when_read: called as soon as it is known that nothing is left to read: with a quota,
                before the last item is yielded; otherwise after it.
        """
        try:
            if not self._was_read:
                yield from self._items_left(when_read)
            if not self._is_read:
                self._end(when_read)
        finally:  # The report is also logged if the user leaves the epoch early.
            report_skipped(
                self._epoch.epoch,
                samples=self._bad.samples,
                lost_shards=self._bad.lost,
                has_substitutes=False,
            )

    def _items_left(self, when_read: Callable[[], object]) -> Generator[Any]:
        """Yield the items; call `when_read` before an item that is known to be the last."""
        epoch = self._epoch
        samples = self._chunks.placed_items(self._bad, epoch.begun_steps)
        with closing(samples):
            for item in epoch.items(samples):
                if epoch.is_read:
                    self._end(when_read)
                yield item

    def _end(self, when_read: Callable[[], object]) -> None:
        """Record that nothing is left to read, and call `when_read`."""
        self._is_read = True
        when_read()

    # State.

    def state(self, *, over: bool = False) -> StagedState:
        """Return the reader's state.

        Args:
            over: True if no reader has anything left of the epoch.
        """
        ended = self._is_read or self._was_read
        return self._epoch.state(self._epoch.reached, ended=ended, over=over)

    @property
    def is_over(self) -> bool:
        """True if this run has read its share, and no other reader has anything left either."""
        return self._is_read and self._form.ends_together(self._reader)
