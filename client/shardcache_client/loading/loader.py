"""`ShardLoader`: a dataset's batches, with its epochs and an exact state.

- An iteration is one pass over the loader by one iterator. The main iteration is the one that
  counts as the reading of its epoch. The dataset's bookmark records which one it is. An iteration
  is overtaken if a later epoch has been read since it began.
- A source makes the batches of an iteration, with workers. It is kept for the next iteration.
- Batches have numbers if the dataset's samples are counted in advance, and nothing drops or
  regroups them. Otherwise batches are staged: a filter or a stage (such as packing) decides which
  samples they get.
"""

import logging
import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Generic, Self, TypeAlias

import torch
from torch.utils.data import default_collate, default_convert

from shardcache.shared.exceptions import ConfigError
from shardcache_client.arguments.values import B_co, checked, whole
from shardcache_client.batches.rank_chunks import RankChunks
from shardcache_client.batches.rank_work import BatchForm
from shardcache_client.batches.staged_epoch import StagedEpoch
from shardcache_client.loading.as_dataloader import (
    DATALOADER_ATTRIBUTES,
    LoadedDataset,
    new_template,
    refuse_order_options,
)
from shardcache_client.loading.numbered import BatchPosition, NumberedBatches
from shardcache_client.loading.staged import (
    STAGED_CHUNK,
    StagedBatches,
    StagedPosition,
    StagedWork,
)
from shardcache_client.loading.tasks import ChunkTask
from shardcache_client.loading.worker_choice import StepWatch, WorkerChoice
from shardcache_client.loading.workers import Workers
from shardcache_client.parts.dataset_epochs import are_over
from shardcache_client.parts.epoch_reader import EpochReader
from shardcache_client.position.iterations import Iteration
from shardcache_client.position.staged_state import has_reader_ended
from shardcache_client.position.state import SavedState
from shardcache_client.reader import ShardReader
from shardcache_client.reading.epochs.epoch_times import EpochTimes

log = logging.getLogger("shardcache")

_MAX_DEFAULT_WORKERS = 8

# Both come in two forms: for batches that have numbers, and for batches of a stage or a filter.
Position: TypeAlias = BatchPosition | StagedPosition
Source: TypeAlias = NumberedBatches | StagedBatches


class ShardLoader(Generic[B_co]):
    """The batches of a ShardDataset. Made by `ShardDataset.loader`, which describes the arguments.

    Each iteration reads one epoch: the epoch set by `set_epoch`, or the next. An epoch counts as
    begun from the iterator's second batch on, or from its last batch if it has only one. Until
    then, the iterator is only a look at the data (`next(iter(loader))`), and changes nothing.

    Iterators may be nested. State and epoch belong to the iterator that took the last batch: when a
    nested iterator is dropped, the outer one has the position again. If you read on from an older
    iterator, the iterators begun since no longer count. Each iterator has workers of its own.

    If a state is loaded while an iterator is read, the iterator raises a ConfigError at its next
    batch.

    The loader is not a torch DataLoader, but uses DataLoaders inside. So frameworks that would
    shard a DataLoader's samples a second time take the loader as it is.

    Args:
        dataset: the dataset.
        reader: reads the dataset's epochs in batches of this loader's size.
        collate_fn: makes a batch of samples; None for torch's default.
        options: arguments of a DataLoader, and `workers`.

    Attributes:
        dataset: the dataset, wrapped so that it is not an IterableDataset.
        batch_size: number of samples in a batch; None if samples come one by one.
        collate_fn: makes a batch of samples.
    """

    def __init__(
        self,
        dataset: ShardReader[Any],
        reader: EpochReader,
        collate_fn: Callable[[Any], B_co] | None,
        options: Mapping[str, Any],
    ) -> None:
        refuse_order_options(options)
        self.dataset = LoadedDataset(dataset)
        self._dataset = dataset
        self.batch_size: int | None = options["batch_size"]
        if collate_fn is None:
            # Single samples are not stacked. Neither are groups of samples that a stage makes, such
            # as blocks, because their shapes differ.
            are_stacked = self.batch_size is not None and reader.parts.stage is None
            collate_fn = default_collate if are_stacked else default_convert
        self.collate_fn = collate_fn
        self._reader = reader  # derived from the dataset's reader, with this batch size
        self._options = dict(options)  # the user's options, with defaults filled in below
        if self._options["num_workers"] is None:
            self._options["num_workers"] = _default_workers()
        # This comes before the default of persistent_workers is filled in: if the user has given
        # the option, processes are chosen.
        self._choice = WorkerChoice.of(self._options)
        if self._options["pin_memory"] is None:
            self._options["pin_memory"] = torch.cuda.is_available()
        if self._options["persistent_workers"] is None:
            self._options["persistent_workers"] = self._has_processes()
        self._times = EpochTimes(0)  # times of the latest epoch; empty before the first
        try:
            self._template = new_template(self._options, self.collate_fn)
        except (TypeError, ValueError) as exn:  # raised by DataLoader's checks of its arguments
            raise ConfigError(f"the DataLoader refuses its arguments: {exn}") from exn
        # A source whose workers the next iteration may use.
        self._kept_source: Source | None = None
        # The iteration that reads the kept source now, or read it last.
        self._source_user: Iteration | None = None

    def __repr__(self) -> str:
        options = f"batch_size={self.batch_size}, num_workers={self.num_workers}"
        return f"ShardLoader({self._dataset!r}, {options})"

    def __getattr__(self, name: str) -> Any:
        if name in DATALOADER_ATTRIBUTES:
            if name == "num_workers":
                return self._options[name]  # the template has num_workers=0 for threads
            return getattr(self._template, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getstate__(self) -> dict[str, Any]:
        # Workers and begun iterations stay with this process. The copy begins at their position.
        is_begun = self._follow_dataset().bookmark.current is not None
        position = self.state_dict() if is_begun else None
        return self._copied_attributes() | {"position": position}

    def __setstate__(self, state: dict[str, Any]) -> None:
        position = state.pop("position")
        self._take_over(state)
        if position is not None:
            self._resume_from(position)

    def __copy__(self) -> Self:
        """Return a loader that shares the reader, and so its position."""
        copied = type(self).__new__(type(self))
        copied.__setstate__(self._copied_attributes() | {"position": None})
        return copied

    def _copied_attributes(self) -> dict[str, Any]:
        """Return the attributes for a copy, without those that each loader makes for itself."""
        not_copied = ("_template", "_kept_source", "_source_user")
        return {name: value for name, value in self.__dict__.items() if name not in not_copied}

    def _take_over(self, attributes: dict[str, Any]) -> None:
        """Initialise a copy with these attributes; it has no workers yet."""
        self.__dict__ |= attributes
        self._source_user = None
        self._kept_source = None
        self._template = new_template(self._options, self.collate_fn)

    def _has_processes(self) -> bool:
        """Return True if worker processes make the batches, or the first ones."""
        return bool(self._options["num_workers"]) and self._choice.kind != "threads"

    def __len__(self) -> int:
        """Return the number of batches in an epoch of this rank.

        Raises TypeError while it is unknown.
        """
        samples = self._reader.epochs.rank_samples()
        size = self.batch_size or 1
        if self._template.drop_last:
            return samples // size
        return math.ceil(samples / size)

    def __iter__(self) -> Iterator[B_co]:
        iteration = Iteration()
        batches = self._read(iteration)
        iteration.attach(batches)
        return batches

    def _read(self, iteration: Iteration) -> Generator[B_co]:
        """Yield the batches of an iteration, which begins with the first `next`."""
        reader = self._follow_dataset()
        bookmark = reader.bookmark
        reader.parts.group.refuse_resharding()
        bookmark.begin(iteration)
        reader.epochs.check()
        position = self._start_of_epoch(iteration.epoch, iteration.states)
        iteration.position = position
        times = EpochTimes(iteration.epoch)
        source = self._source_for(iteration)
        watch = StepWatch(self._choice)
        try:
            # No variable holds the source's batches, so they are closed at once if this generator
            # ends early or fails. `iteration.position` is `position` without its type: a type
            # checker cannot see that source and position are of the same form.
            for number, (batch, end, made_times) in enumerate(source.read(iteration.position), 1):
                if number == 2:  # the iterator is more than a look at the data
                    self._make_main(iteration, source)
                bookmark.take(iteration)
                position.move_to(end)  # type: ignore[arg-type]
                # Done before the last batch is yielded: a loop may not ask for another batch.
                if position.is_read:
                    self._finish(iteration, source)
                times.received(made_times)
                if iteration.role == "main":
                    self._times = times
                watch.begin()
                yield batch
                watch.end()
                times.stepped()
                # The loop's body may have set an epoch of the dataset, or loaded a state.
                self._follow_dataset()
        except GeneratorExit:
            bookmark.leave(iteration)
            raise
        finally:
            watch.close()
        position.end()
        # Not done above if the last batch was not known to be the last.
        self._finish(iteration, source)
        iteration.reading = "over"
        if iteration.role != "overtaken":
            self._times = times
            log.info("%s", times)

    def _source_for(self, iteration: Iteration) -> Source:
        """Return a source of batches that no other iteration reads: the kept one, if possible."""
        position: Position = iteration.position
        source: Source | None = None
        if not self._is_kept_source_in_use:
            source = self._kept_source
        if source is None or not self._is_usable(source, position):
            source = self._new_source(position)
        self._keep(source, iteration)
        return source

    @property
    def _is_kept_source_in_use(self) -> bool:
        """True if an iteration that has not ended reads the kept source."""
        return self._source_user is not None and self._source_user.live

    # `_keep` is called when an iteration begins, becomes the main one, or ends: each time, the
    # iteration that has been reading the kept source may be gone.

    def _make_main(self, iteration: Iteration, source: Source) -> None:
        """Make an iteration the main one, unless a later epoch is read."""
        self._reader.bookmark.make_main(iteration)
        self._keep(source, iteration)

    def _finish(self, iteration: Iteration, source: Source) -> None:
        """Note that an iteration has read its epoch to the end."""
        self._reader.bookmark.finish(iteration)
        self._keep(source, iteration)

    def _keep(self, source: Source, iteration: Iteration) -> None:
        """Keep an iteration's source for the next one, unless the kept source is in use."""
        if not self._is_kept_source_in_use:
            self._kept_source = source
            self._source_user = iteration

    def _batch_form(self) -> BatchForm:
        """Return the form of this loader's batches."""
        return BatchForm(self.batch_size, self._template.drop_last, self.collate_fn)

    def _is_usable(self, source: Source, position: Position) -> bool:
        """Return True if a kept source can make the batches from a position on."""
        if isinstance(position, BatchPosition):
            deal = self._reader.epochs.deal
            return isinstance(source, NumberedBatches) and source.is_usable(deal)
        return isinstance(source, StagedBatches) and source.is_usable(position.deal)

    def _new_source(self, position: Position) -> Source:
        """Return a new source, with workers, of the batches from a position on."""
        name = f"{os.getpid()}-{id(self)}"
        form = self._batch_form()
        parts = self._reader.parts
        rank = parts.group.ranks
        epochs = self._reader.epochs
        if isinstance(position, BatchPosition):
            reading = epochs.reading(rank, epochs.deal)
            return NumberedBatches(Workers(reading, form, name, self._options, self._choice))
        reading = epochs.reading(rank, position.deal)
        return StagedBatches(Workers(reading, form, name, self._options, self._choice), form)

    def _follow_dataset(self) -> EpochReader:
        """Set the reader to the epoch or state last set for the dataset, and return it."""
        self._reader.follow(self._dataset.epoch_reader)
        return self._reader

    def _next_position(self) -> Position:
        """Return this rank's position at the start of the next iteration."""
        bookmark = self._reader.bookmark
        return self._start_of_epoch(bookmark.next_epoch, bookmark.next_states())

    def _start_of_epoch(self, epoch: int, states: Sequence[SavedState]) -> Position:
        """Return this rank's position at the start of an epoch, or where its states resume it."""
        if self._reader.epochs.is_numbered(states):
            return self._numbered_position(epoch, states)
        return self._staged_position(epoch, states)

    def _numbered_position(self, epoch: int, states: Sequence[SavedState]) -> BatchPosition:
        """Return the position at the start of an epoch whose batches have numbers."""
        epochs = self._reader.epochs
        parts = self._reader.parts
        rank = parts.group.ranks
        form = self._batch_form()
        batches = epochs.rank_batches(epoch, states, form)
        state_form = epochs.state_form(form.places_per_batch, drop_last=form.drop_last)
        return BatchPosition(batches, rank, form.places_per_batch, state_form)

    def _staged_position(self, epoch: int, states: Sequence[SavedState]) -> StagedPosition:
        """Return the position at the start of an epoch whose batches a stage or a filter makes."""
        epochs = self._reader.epochs
        parts = self._reader.parts
        rank = parts.group.ranks
        form = self._batch_form()
        staged_form = epochs.staged_form(states)
        deal = staged_form.deal
        resume = epochs.resume(epoch, rank, states, deal)
        chunk_size = form.places_per_batch
        if staged_form.stage is not None:
            chunk_size = max(chunk_size, STAGED_CHUNK)
        chunks = RankChunks(epochs.reading(rank, deal), resume, rank, chunk_size)
        staged_epoch = StagedEpoch(
            staged_form,
            resume,
            rank,
            places=chunks.places,
            quota=epochs.quota(rank, deal),
        )
        work = StagedWork(staged_epoch, chunks, ChunkTask(resume, rank, chunk_size))
        is_read = are_over(states) or has_reader_ended(states, rank)
        return StagedPosition(work, staged_form, form, is_read=is_read)

    @property
    def _position(self) -> Position:
        """The current iteration's position; before any, the start of the next iteration."""
        current = self._follow_dataset().bookmark.current
        if current is None:
            return self._next_position()
        position: Position = current.position
        return position

    @property
    def epoch(self) -> int:
        """The epoch of the last batch taken, while its iterator is held or has batches left.

        After that, the epoch that is read next.
        """
        bookmark = self._follow_dataset().bookmark
        if self._is_over:
            return bookmark.next_epoch
        return self._position.epoch

    @property
    def remaining(self) -> int:
        """Number of batches left of `epoch`: fewer than `len(loader)` if it was read in part.

        Raises TypeError while it is unknown.
        """
        batches = len(self)
        self._follow_dataset()
        if self._is_over:
            return batches
        return self._position.batches_left

    @property
    def _is_over(self) -> bool:
        """True if the last iteration has ended after its last batch.

        The loader's position is then the start of the next iteration.
        """
        current = self._reader.bookmark.current
        return current is not None and current.position.is_read and not current.live

    def stats(self) -> dict[str, Any]:
        """Return the rate of this rank's latest epoch so far, and what its time was spent on.

        At the epoch's end, the same is logged as info.

        `shares` of the time add up to 1. "step" is the loop's own time. The other shares are waits:
        for "shards", "reading" of their samples, "decoding" by the dataset's functions,
        "collating", and "handover" by workers, including their start. `ideal_samples_per_s` is the
        rate that the loop would have if data took no time.
        """
        return self._times.to_json()

    @checked(epoch=whole(0))
    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that every iteration begun from now on reads.

        An iterator that is still held keeps its position.
        """
        self._follow_dataset().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch taken: a few numbers, for any number of workers.

        One rank's state suffices to resume all ranks, on any number of ranks and workers; see
        `ShardDataset.load_state_dict`.
        """
        return self._position.to_json()

    @checked(batches=whole(0))
    def skip(self, batches: int) -> None:
        """Leave out the next batches, up to the end of the epoch.

        They are not read, and count as taken in the state.

        In a loop, these are the batches after the last batch taken. Outside a loop, they are the
        first batches that the next iterator would read, even if the last loop was left early. An
        epoch that was set by `set_epoch` stays set.

        Raises ConfigError if batches have no numbers, as with uncounted shards or a filter.
        """
        bookmark = self._follow_dataset().bookmark
        position: Position
        current = bookmark.current
        is_in_loop = current is not None and current.live  # a loop holds the iterator
        if is_in_loop:
            position = self._position
        else:
            bookmark.settle_next_epoch()
            position = self._next_position()

        if not isinstance(position, BatchPosition):
            raise ConfigError(
                "skip() needs batches that have numbers, and this dataset is filtered, or its "
                "shards are not counted",
                remedy="count them with `shardcache index`; filter when shards are written",
            )
        position.skip(batches)
        # In a loop, the iterator itself has the position. Otherwise the next iteration needs it.
        if batches and not is_in_loop:
            self._resume_from(position.to_json())

    def _resume_from(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration resume from a state of this loader.

        An epoch that was set stays set.
        """
        chosen_epoch = self._reader.bookmark.chosen
        self._reader.load_state_dict(state)
        if chosen_epoch is not None:  # loading a state has undone `set_epoch`
            self._reader.set_epoch(chosen_epoch)

    def load_state_dict(self, state: object) -> None:
        """Resume from a state at the next iteration, with exactly the next batch.

        The numbers of ranks and workers may differ from the numbers in the run that took the state.

        Raises any error of `ShardDataset.load_state_dict`.
        """
        self._follow_dataset().load_state_dict(state)


def _default_workers() -> int:
    """Return this process's share of the CPUs that the ranks on its node may use."""
    ranks = 1
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun sets it
    if local_world_size.isdecimal():
        ranks = max(1, int(local_world_size))
    cpus = len(os.sched_getaffinity(0))
    return max(1, min(_MAX_DEFAULT_WORKERS, cpus // ranks))
