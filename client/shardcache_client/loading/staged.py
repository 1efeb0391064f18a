"""Batches of samples without numbers for a training loop.

Workers make chunks, of which this process makes batches.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

from shardcache_client.batches.maker import collated
from shardcache_client.batches.rank_chunks import Chunk, RankChunks, Spot
from shardcache_client.batches.rank_work import BatchForm, nothing_to_check
from shardcache_client.batches.sample_run import report
from shardcache_client.batches.staged_epoch import StagedEpoch, StagedForm
from shardcache_client.batches.threads import made_by_threads
from shardcache_client.loading.tasks import ChunkTask
from shardcache_client.loading.workers import Workers
from shardcache_client.order.dealing.deal import Deal
from shardcache_client.position.staged_state import Reached
from shardcache_client.reading.epochs.epoch_times import Made
from shardcache_client.stages.stage import Placed

STAGED_CHUNK = 16
"""Number of places of a chunk whose samples a stage regroups.

Each chunk costs a message, and a stage keeps many samples anyway: a few more do not matter.
"""

# Batches that are put together before they are asked for. Workers make chunks for further ones.
_AHEAD = 2

BatchEnd: TypeAlias = tuple[Reached, bool]
"""End of a batch, and True if it is known to be the last."""


class Staged(NamedTuple):
    """One rank's epoch, or its rest, to be made.

    Attributes:
        epoch: its items, and the states.
        chunks: of its samples, which workers make.
        task: the work of making these, for worker processes.
    """

    epoch: StagedEpoch
    chunks: RankChunks
    task: ChunkTask


class StagedPosition:
    """A rank's position among the batches of an epoch."""

    def __init__(
        self, staged: Staged, form: StagedForm, batch_form: BatchForm, *, is_over: bool
    ) -> None:
        self.staged = staged
        self._form = form
        self._batch_form = batch_form
        self._reached = staged.task.resume.reached
        self._ended = is_over

    def __repr__(self) -> str:
        return f"StagedPosition({self._reached!r}, ended={self._ended})"

    @property
    def epoch(self) -> int:
        """The epoch that is being read."""
        return self.staged.epoch.epoch

    @property
    def deal(self) -> Deal:
        """The deal of the samples."""
        return self._form.deal

    @property
    def is_read(self) -> bool:
        """True if there are known to be no more batches."""
        return self._ended

    @property
    def batches_left(self) -> int:
        """Number of batches that are left, if it is known.

        It is a maximum if samples may be left out.
        """
        samples = self.staged.epoch.samples_left(self._reached)
        size = self._batch_form.places
        if self._batch_form.drop_last:
            return samples // size
        return -(-samples // size)

    @property
    def may_wait_for_ranks(self) -> bool:
        """True if the stage waits for other ranks.

        The training loop must not leave these behind in a thread.
        """
        return self._form.stage is not None and self.staged.task.rank.world_size > 1

    def note(self, end: BatchEnd) -> None:
        """Note where the batch that is taken ends."""
        self._reached, self._ended = end

    def end(self) -> None:
        """Note that there are no more batches."""
        self._ended = True

    def to_json(self) -> dict[str, Any]:
        """Return the rank's state as a JSON object."""
        over = self._ended and self._form.ends_together(self.staged.task.rank)
        return self.staged.epoch.state(self._reached, ended=self._ended, over=over).to_json()


class StagedBatches:
    """The batches of one iteration after another.

    Args:
        workers: make the chunks.
        form: of the batches; its size is None if the stage's items are batches already.
    """

    def __init__(self, workers: Workers, form: BatchForm) -> None:
        self._workers = workers
        self._form = form

    def is_usable(self, deal: Deal) -> bool:
        """Return True if an iteration of this process can have its batches from here."""
        return self._workers.are_of_this_process and self._workers.deal == deal

    def read(self, position: StagedPosition) -> Generator[tuple[Any, BatchEnd, Made]]:
        """Yield each batch with its end, and the times of its making.

        Raises what making it raises.
        """
        if position.is_read:
            return
        staged = position.staged
        chunks = _Chunks(staged)
        read = partial(self._batches_of_items, staged, chunks)
        if self._workers.are_any and not position.may_wait_for_ranks:
            begin = self._workers.preparation()
            made = made_by_threads(read, self._made, threads=1, ahead=_AHEAD, begin=begin)
        else:
            made = self._made_here(read(nothing_to_check))
        try:
            with closing(made):
                yield from made
        finally:  # also of an epoch that is left early
            report(position.epoch, chunks.skipped, chunks.lost, repeated=False)

    def _batches_of_items(
        self, staged: Staged, chunks: _Chunks, check: Callable[[], None]
    ) -> Generator[_Items]:
        """Yield the items of each batch, which are not put together yet."""
        made = self._workers.made(staged.task, staged.chunks, 0)
        with closing(made):
            items = staged.epoch.items(chunks.samples(made, check))
            size = self._form.places
            while batch := list(islice(items, size)):
                if len(batch) < size and self._form.drop_last:
                    return
                end = (staged.epoch.reached, staged.epoch.is_read)
                yield _Items(batch, end, chunks.times())

    def _made_here(self, batches: Generator[_Items]) -> Generator[tuple[Any, BatchEnd, Made]]:
        """Yield the batches, each put together by this thread when it is asked for."""
        with closing(batches):
            for items in batches:
                yield self._made(items)

    def _made(self, read: _Items) -> tuple[Any, BatchEnd, Made]:
        """Put a batch together."""
        begun_s = monotonic()
        items = read.items
        samples = items[0] if self._form.size is None else items
        batch = self._workers.pinned(collated(self._form.collate, samples))
        return batch, read.end, read.times.made(len(items), begun_s, monotonic())


class _Times(NamedTuple):
    """The times of making the chunks of a batch."""

    begun_s: float | None
    waited_s: float
    decoding_s: float

    def made(self, samples: int, begun_s: float, ended_s: float) -> Made:
        """Return the times of a batch of these chunks.

        Args:
            samples: number of samples of the batch.
            begun_s: when its collating began.
            ended_s: when that ended.
        """
        first_s = begun_s if self.begun_s is None else min(self.begun_s, begun_s)
        # Workers wait and decode side by side, so their seconds may add up to more than have
        # passed: each sum gets its share of these.
        spent_s = self.waited_s + self.decoding_s
        share = min(1.0, (begun_s - first_s) / spent_s) if spent_s else 0.0
        return Made(
            samples=samples,
            begun_s=first_s,
            ended_s=ended_s,
            waited_s=share * self.waited_s,
            decoding_s=share * self.decoding_s,
            collating_s=ended_s - begun_s,
        )


class _Items(NamedTuple):
    """The items of a batch, its end, and the times of making its chunks."""

    items: list[Any]
    end: BatchEnd
    times: _Times


class _Chunks:
    """The samples of chunks, one after another, and the times that it took to make these."""

    def __init__(self, staged: Staged) -> None:
        self._staged = staged
        self.skipped = 0
        self.lost: set[str] = set()
        self._times = _Times(None, 0.0, 0.0)

    def samples(self, made: Iterator[Any], check: Callable[[], None]) -> Iterator[Placed]:
        """Yield the samples. Raises ShardError if all have come, and none of them was good.

        Args:
            check: is called before each chunk, and may raise to end it.
        """
        staged = self._staged
        begun = staged.epoch.begun
        reached = staged.task.resume.reached
        last = Spot(reached.mark.place, reached.step.share)
        for each in made:
            check()
            chunk: Chunk = each.batch
            self.skipped += each.skipped
            self.lost |= each.lost
            self._note(each.times)
            for step in chunk.steps:
                if not begun or step.before > begun[-1].before:
                    begun.append(step)
            share = begun[-1].share if begun else 0
            if chunk.items:
                last = Spot(chunk.items[-1].place, share)
            else:
                staged.chunks.check_progress(last, Spot(chunk.end, share), chunk.first_error)
            yield from chunk.items
            if each.is_last:
                return

    def _note(self, times: Made) -> None:
        """Add the times of a chunk."""
        begun_s, waited_s, decoding_s = self._times
        first_s = times.begun_s if begun_s is None else begun_s
        self._times = _Times(first_s, waited_s + times.waited_s, decoding_s + times.decoding_s)

    def times(self) -> _Times:
        """Return the times of making the chunks since the last call."""
        times = self._times
        self._times = _Times(None, 0.0, 0.0)
        return times
