"""Batches of samples without numbers for a training loop: workers make chunks, of which this process makes batches."""

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
from shardcache_client.loading.workers import Workers, use_one_core
from shardcache_client.order.deal import Deal
from shardcache_client.position.staged_state import Reached
from shardcache_client.reading.epoch_times import Made
from shardcache_client.stages.stage import Placed

STAGED_CHUNK = 16
"""Places of a chunk whose samples a stage regroups: it keeps many of them anyway, and each chunk costs a message."""

# Batches that are made before they are asked for, beside those that workers' chunks are for.
_AHEAD = 2

Mark: TypeAlias = tuple[Reached, bool]
"""Where a batch ends, and True if it is known to be the last."""


class Staged(NamedTuple):
    """One rank's epoch, or its rest, to be made.

    Attributes:
        epoch: its items, and the states.
        chunks: what workers make.
        task: the same, as worker processes get it.
    """

    epoch: StagedEpoch
    chunks: RankChunks
    task: ChunkTask


class StagedPosition:
    """Where a rank is among the batches of an epoch."""

    def __init__(self, staged: Staged, form: StagedForm, batch_form: BatchForm, *, is_over: bool) -> None:
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
        """Number of batches that are left, if it is known; at most so many if samples may be left out."""
        samples = self.staged.epoch.samples_left(self._reached)
        size = self._batch_form.places
        return samples // size if self._batch_form.drop_last else -(-samples // size)

    @property
    def may_wait_for_ranks(self) -> bool:
        """True if the stage waits for other ranks, which the training loop must not leave behind in a thread."""
        return self._form.stage is not None and self.staged.task.rank.world_size > 1

    def note(self, mark: Mark) -> None:
        """Note where the batch that is taken ends."""
        self._reached, self._ended = mark

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
        form: of the batches; None as its size if the stage's items are batches.
    """

    def __init__(self, workers: Workers, form: BatchForm) -> None:
        self._workers = workers
        self._form = form

    def is_usable(self, deal: Deal) -> bool:
        """Return True if an iteration of this process can have its batches of such a deal from here."""
        return self._workers.are_of_this_process and self._workers.deal == deal

    def read(self, position: StagedPosition) -> Generator[tuple[Any, Mark, Made]]:
        """Yield each batch with where it ends, and the times of its making. Raises what making it raises."""
        if position.is_read:
            return
        staged = position.staged
        chunks = _Chunks(staged)
        read = partial(self._batches_of_items, staged, chunks)
        if self._workers.are_any and not position.may_wait_for_ranks:
            made = made_by_threads(read, self._made, threads=1, ahead=_AHEAD, begin=use_one_core)
        else:
            made = self._made_here(read(nothing_to_check))
        with closing(made):
            yield from made
        report(position.epoch, chunks.skipped, chunks.lost, repeated=False)

    def _batches_of_items(self, staged: Staged, chunks: _Chunks, check: Callable[[], None]) -> Generator[_Items]:
        made = self._workers.made(staged.task, staged.chunks, 0)
        with closing(made):
            items = staged.epoch.items(chunks.samples(made, check))
            size = self._form.places
            while batch := list(islice(items, size)):
                if len(batch) < size and self._form.drop_last:
                    return
                yield _Items(batch, (staged.epoch.reached, staged.epoch.is_read), chunks.times())

    def _made_here(self, batches: Generator[_Items]) -> Generator[tuple[Any, Mark, Made]]:
        with closing(batches):
            for items in batches:
                yield self._made(items)

    def _made(self, read: _Items) -> tuple[Any, Mark, Made]:
        begun_s = monotonic()
        items = read.items
        batch = collated(self._form.collate, items[0] if self._form.size is None else items)
        batch = self._workers.pinned(batch, is_made_here=True)
        return batch, read.mark, read.times.made(len(items), begun_s, monotonic())


class _Times(NamedTuple):
    """The times of making the chunks of a batch."""

    begun_s: float | None
    waited_s: float
    decoding_s: float

    def made(self, samples: int, begun_s: float, ended_s: float) -> Made:
        """Return the times of a batch of so many samples, which was collated from `begun_s` to `ended_s`."""
        first_s = begun_s if self.begun_s is None else min(self.begun_s, begun_s)
        # Workers spend it side by side.
        spent_s = self.waited_s + self.decoding_s
        share = min(1.0, (begun_s - first_s) / spent_s) if spent_s else 0.0
        return Made(samples, first_s, ended_s, share * self.waited_s, share * self.decoding_s, ended_s - begun_s)


class _Items(NamedTuple):
    """The items of a batch, where it ends, and the times of making its chunks."""

    items: list[Any]
    mark: Mark
    times: _Times


class _Chunks:
    """The samples of chunks, one after another, and the times that it took to make these."""

    def __init__(self, staged: Staged) -> None:
        self._staged = staged
        self.skipped = 0
        self.lost: set[str] = set()
        self._times = _Times(None, 0.0, 0.0)

    def samples(self, made: Iterator[Any], check: Callable[[], None]) -> Iterator[Placed]:
        """Yield the samples. Raises ShardError if there has been no good one while all have come.

        Args:
            check: is called before each chunk, and may raise to end it.
        """
        staged = self._staged
        begun = staged.epoch.begun
        last = Spot(staged.task.resume.reached.mark.place, staged.task.resume.reached.step.share)
        for each in made:
            check()
            chunk: Chunk = each.batch
            self.skipped += each.skipped
            self.lost |= each.lost
            self._note(each.times)
            begun.extend(step for step in chunk.steps if not begun or step.before > begun[-1].before)
            share = begun[-1].share if begun else 0
            if chunk.items:
                last = Spot(chunk.items[-1].place, share)
            else:
                staged.chunks.check_progress(last, Spot(chunk.end, share), chunk.first_error)
            yield from chunk.items
            if each.is_last:
                return

    def _note(self, times: Made) -> None:
        begun_s, waited_s, decoding_s = self._times
        first_s = times.begun_s if begun_s is None else begun_s
        self._times = _Times(first_s, waited_s + times.waited_s, decoding_s + times.decoding_s)

    def times(self) -> _Times:
        """Return the times of making the chunks since the last call."""
        times = self._times
        self._times = _Times(None, 0.0, 0.0)
        return times
