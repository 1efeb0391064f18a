"""`ShardLoader`: a dataset's batches, with its epochs and an exact state."""

import inspect
import logging
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Generic, Self, TypeAlias

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert

from shardcache.errors import ConfigError
from shardcache_client.arguments import B_co, checked, whole
from shardcache_client.batches.rank_chunks import RankChunks
from shardcache_client.batches.rank_work import BatchForm
from shardcache_client.batches.staged_epoch import StagedEpoch
from shardcache_client.loading.numbered import BatchPosition, NumberedBatches
from shardcache_client.loading.staged import STAGED_CHUNK, Staged, StagedBatches, StagedPosition
from shardcache_client.loading.tasks import ChunkTask
from shardcache_client.loading.workers import Workers
from shardcache_client.position.bookmark import Iteration
from shardcache_client.position.staged_state import has_ended
from shardcache_client.reader import ShardReader
from shardcache_client.reading.epoch_times import EpochTimes

log = logging.getLogger("shardcache")

_MAX_WORKERS = 8
OF_ORDER = ("sampler", "batch_sampler", "shuffle")
_PROPERTIES = inspect.signature(DataLoader).parameters.keys() - {*OF_ORDER}
"""Attributes of the DataLoader that frameworks look at."""

_OF_PROCESSES = ("multiprocessing_context", "persistent_workers", "worker_init_fn", "timeout")

Position: TypeAlias = BatchPosition | StagedPosition
Source: TypeAlias = NumberedBatches | StagedBatches


class ShardLoader(Generic[B_co]):
    """The batches of a ShardDataset. Made by `ShardDataset.loader`, which describes the arguments.

    Each iteration reads one epoch: the one set by `set_epoch`, or else the next. An iterator counts as one from its
    second batch on, or from its last if that is the first; before that (`next(iter(loader))`), it is a look, and
    changes nothing. If an older iterator is read on, those begun since were nested in it, and count no longer. State
    and epoch are those of the iterator that took the last batch: dropping a nested one gives the position back. Each
    has workers of its own, while those of the others persist. An iterator under which a state is loaded raises a
    ConfigError at its next batch.

    It is not a torch DataLoader but has some, so that frameworks which would shard a DataLoader's samples a second time
    take it as it is.

    Attributes:
        dataset: the dataset, without its class of torch's.
        batch_size: number of samples in a batch; None if samples come one by one.
        collate_fn: makes a batch of samples.
    """

    def __init__(
        self,
        dataset: ShardReader[Any],
        reader: ShardReader[Any],
        collate_fn: Callable[[Any], B_co] | None,
        options: Mapping[str, Any],
    ) -> None:
        _refuse(options)
        self.dataset = _LoadedDataset(dataset)
        self._source = dataset
        self.batch_size: int | None = options["batch_size"]
        # Groups of samples, such as blocks, have different shapes.
        is_listed = self.batch_size is None or reader._settings.stage is not None
        self.collate_fn = collate_fn or (default_convert if is_listed else default_collate)
        self._reader = reader  # a copy, of this batch size
        self._options = dict(options)  # of a DataLoader
        for name, default in (
            ("num_workers", _default_workers),
            ("pin_memory", torch.cuda.is_available),
            ("persistent_workers", self._has_processes),
        ):
            if self._options[name] is None:
                self._options[name] = default()
        self._times = EpochTimes(0)
        self._owner: Iteration | None = None
        try:
            self._template = self._new_template()
        except (TypeError, ValueError) as exn:  # DataLoader's own checks of its arguments
            raise ConfigError(f"the DataLoader refuses its arguments: {exn}") from exn
        self._kept: Source | None = None

    def __repr__(self) -> str:
        return f"ShardLoader({self._source!r}, batch_size={self.batch_size}, num_workers={self.num_workers})"

    def __getattr__(self, name: str) -> Any:
        if name in _PROPERTIES:
            return self._options[name] if name == "num_workers" else getattr(self._template, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getstate__(self) -> dict[str, Any]:
        # Workers, and iterations that were begun, stay with this process; a copy is where this loader is.
        is_begun = self._follow()._bookmark.current is not None
        return self._shared() | {"copied_from": self.state_dict() if is_begun else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        position = state.pop("copied_from")
        self._take_over(state)
        if position is None:
            return
        bookmark = self._reader._bookmark
        chosen = bookmark.chosen
        self._reader.load_state_dict(position)
        if chosen is not None:
            self._reader.set_epoch(chosen)

    def __copy__(self) -> Self:
        """Return a loader that shares the reader, and so its position."""
        made = type(self).__new__(type(self))
        made._take_over(self._shared())
        return made

    def _shared(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_template", "_kept", "_owner")}

    def _take_over(self, attributes: dict[str, Any]) -> None:
        self.__dict__ |= attributes
        self._owner = None
        self._kept = None
        self._template = self._new_template()

    def _has_processes(self) -> bool:
        return bool(self._options["num_workers"]) and self._options["workers"] == "processes"

    def __len__(self) -> int:
        """Return the number of batches in an epoch of this rank. Raises TypeError while it is unknown."""
        samples, size = len(self._reader), self.batch_size or 1
        return samples // size if self._template.drop_last else -(-samples // size)

    def __iter__(self) -> Iterator[B_co]:
        iteration = Iteration()
        batches = self._read(iteration)
        iteration.read_by(batches)
        return batches

    def _read(self, iteration: Iteration) -> Generator[B_co]:
        bookmark = self._follow()._bookmark
        self._reader._group.refuse_resharding()
        bookmark.begin(iteration)
        self._reader._check()
        iteration.place = position = self._position_of(iteration)
        times = EpochTimes(iteration.epoch)
        source = self._source_for(iteration)
        try:
            for taken, (batch, mark, made) in enumerate(source.read(iteration.place)):
                if taken == 1:
                    self._count(iteration, source)
                bookmark.take(iteration)
                position.note(mark)  # type: ignore[arg-type]  # the source is of the position's kind
                if position.is_read:
                    self._finish(iteration, source)
                times.received(made)
                if iteration.counted:
                    self._times = times
                yield batch
                times.stepped()
                self._follow()
        except GeneratorExit:
            bookmark.leave(iteration)
            raise
        position.end()
        self._finish(iteration, source)
        iteration.ended = True
        if not iteration.looks:
            self._times = times
            log.info("%s", times)

    def _source_for(self, iteration: Iteration) -> Source:
        """Return a source of batches that no other iteration is reading; the next one may have its workers."""
        position: Position = iteration.place
        is_taken = self._owner is not None and self._owner.live
        source = self._kept
        if is_taken or source is None or not self._is_usable(source, position):
            source = self._new_source(position)
        self._keep(source, iteration)
        return source

    def _count(self, iteration: Iteration, source: Source) -> None:
        self._reader._bookmark.count(iteration)
        self._keep(source, iteration)

    def _finish(self, iteration: Iteration, source: Source) -> None:
        self._reader._bookmark.finish(iteration)
        self._keep(source, iteration)

    def _keep(self, source: Source, owner: Iteration) -> None:
        """Keep a source of batches for the next iteration, unless another that is kept is being read."""
        if self._owner is None or not self._owner.live:
            self._kept = source
            self._owner = owner

    def _form(self) -> BatchForm:
        return BatchForm(self.batch_size, self._template.drop_last, self.collate_fn)

    def _is_usable(self, source: Source, position: Position) -> bool:
        """Return True if an iteration can have its batches from a source that another one has read."""
        if isinstance(position, BatchPosition):
            return isinstance(source, NumberedBatches) and source.is_usable(self._reader._deal())
        return isinstance(source, StagedBatches) and source.is_usable(position.deal)

    def _new_source(self, position: Position) -> Source:
        name = f"{os.getpid()}-{id(self)}"
        form = self._form()
        rank = self._reader._group.ranks
        if isinstance(position, BatchPosition):
            reading = self._reader._reading(rank, self._reader._deal())
            return NumberedBatches(Workers(reading, form, name, self._options))
        reading = self._reader._reading(rank, position.deal)
        return StagedBatches(Workers(reading, form, name, self._options), form)

    def _new_template(self) -> DataLoader[Any]:
        """Return a DataLoader of the same options: it checks them, and has the attributes that frameworks look at."""
        options = {name: value for name, value in self._options.items() if name != "workers"}
        if self._options["workers"] == "threads":
            given = [name for name in _OF_PROCESSES if options.get(name)]
            if given:
                raise ConfigError(
                    f"{given[0]} is of worker processes, and the loader's workers are threads",
                    remedy='omit it; or write workers="processes"',
                )
            options["num_workers"] = 0
            options.pop("prefetch_factor", None)
        return DataLoader(_Unread(), collate_fn=self.collate_fn, **options)

    def _follow(self) -> ShardReader[Any]:
        """Have the copy continue where the dataset does, if its epoch or state were set since; return it."""
        self._reader.follow(self._source)
        return self._reader

    def _position_of(self, begun: Iteration | None) -> Position:
        """Return the position of this rank at the start of an iteration, or else of the next one."""
        reader, bookmark = self._reader, self._reader._bookmark
        epoch = bookmark.next_epoch if begun is None else begun.epoch
        states = bookmark.next_states() if begun is None else begun.states
        states = states if states and states[0].epoch == epoch else ()
        rank = reader._group.ranks
        form = self._form()
        if reader._is_numbered(states):
            batches = reader._rank_batches(epoch, states, form)
            state_form = reader._state_form(form.places, drop_last=form.drop_last)
            return BatchPosition(batches, rank, form.places, state_form)
        staged_form = reader._staged_form(states)
        deal = staged_form.deal
        resume = reader._resume(epoch, rank, states, deal)
        size = form.places if staged_form.stage is None else max(form.places, STAGED_CHUNK)
        chunks = RankChunks(reader._reading(rank, deal), resume, rank, size)
        staged_epoch = StagedEpoch(staged_form, resume, rank, chunks.places, reader._quota(rank, deal))
        staged = Staged(staged_epoch, chunks, ChunkTask(resume, rank, size))
        is_over = bool(states) and all(state.over for state in states)
        is_over = is_over or has_ended(states, rank)
        return StagedPosition(staged, staged_form, form, is_over=is_over)

    @property
    def _position(self) -> Position:
        current = self._follow()._bookmark.current
        return self._position_of(None) if current is None else current.place

    @property
    def epoch(self) -> int:
        """The epoch of the last batch taken, while its iterator is held or has batches left; or else the next one."""
        position = self._position
        return self._reader._bookmark.next_epoch if self._is_over else position.epoch

    @property
    def remaining(self) -> int:
        """Number of batches left of `epoch`: fewer than `len(loader)` if it is being read or resumed.

        Raises TypeError while it is unknown.
        """
        whole = len(self)
        position = self._position
        return whole if self._is_over else position.batches_left

    @property
    def _is_over(self) -> bool:
        """True if the last iteration was read to its end, so that the position is the start of the next one."""
        current = self._reader._bookmark.current
        return current is not None and current.place.is_read and not current.live

    def stats(self) -> dict[str, Any]:
        """Return where the time of this rank's latest epoch went, so far; at its end, the same is logged as info.

        `shares` add up to 1: "step" is the loop's own time; in the others it waited: for "shards", "reading" of their
        samples, "decoding" by the dataset's functions, "collating", and "handover" by workers, with their start.
        `ideal_samples_per_s` is what `samples_per_s` would be if data came for free.
        """
        return self._times.to_json()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that every iteration begun from now on reads; one that is held keeps the position."""
        self._follow().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch taken: a few numbers, however many workers there are.

        One rank's state suffices to resume all ranks, on any number of ranks and workers; see
        `ShardDataset.load_state_dict`.
        """
        return self._position.to_json()

    @checked(batches=whole(0))
    def skip(self, batches: int) -> None:
        """Leave out the next batches, up to the end of the epoch: they are not read, and count as taken in the state.

        In a loop, these are those after the last batch taken; before one, the first that it would read.

        Raises ConfigError if batches have no numbers, as those of uncounted shards or of a filtered dataset.
        """
        position = self._position
        if not isinstance(position, BatchPosition):
            raise ConfigError(
                "skip() needs batches that have numbers, and this dataset is filtered, or its shards are not counted",
                remedy="count them with `shardcache index`; filter when shards are written",
            )
        current = self._reader._bookmark.current
        if current is not None and current.live:
            position.skip(batches)
            return
        if self._is_over:
            position = self._position_of(None)
        assert isinstance(position, BatchPosition)
        position.skip(batches)
        self._reader.load_state_dict(position.to_json())

    def load_state_dict(self, state: object) -> None:
        """Resume from a state at the next iteration, with exactly the next batch, on any number of ranks and workers.

        Raises what `ShardDataset.load_state_dict` raises.
        """
        self._follow().load_state_dict(state)


class _LoadedDataset:
    """A loader's dataset as frameworks see it: all that it has, but not an IterableDataset.

    Lightning takes the length of a loader over an IterableDataset for a DataLoader's, which is wrong unless the dataset
    divides its samples among the workers, and warns of it. A ShardLoader's length is exact.
    """

    def __init__(self, dataset: ShardReader[Any]) -> None:
        self._dataset = dataset

    def __repr__(self) -> str:
        return repr(self._dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while it is unpickled, before it has a dataset
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._dataset, name)


class _Unread(IterableDataset[Any]):
    """A dataset that nobody reads."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def _refuse(options: Mapping[str, Any]) -> None:
    for name in OF_ORDER:
        if options.get(name):
            raise ConfigError(
                f"loader() does not take {name}: the dataset determines the order of its samples",
                remedy="pass shuffle, shuffle_window and seed to the ShardDataset",
            )


def _default_workers() -> int:
    """Return this process's share of the CPUs that the ranks on its node may use."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    share = len(os.sched_getaffinity(0)) // max(1, int(ranks) if ranks.isdecimal() else 1)
    return max(1, min(_MAX_WORKERS, share))
