"""`ShardLoader`: a dataset's batches, with the dataset's epochs and an exact state."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol
from weakref import ReferenceType, ref

import torch
from torch.utils.data import DataLoader, default_collate, default_convert

from shardcache.errors import ConfigError, MissingMemberError
from shardcache_client.order.state import ReaderState
from shardcache_client.reading.rank_position import RankPosition
from shardcache_client.reading.stream import EpochStream
from shardcache_client.typed import B_co

Collate = Callable[[Any], Any]

_MOST_WORKERS = 8
_PROPERTIES = (
    "drop_last",
    "generator",
    "in_order",
    "multiprocessing_context",
    "num_workers",
    "persistent_workers",
    "pin_memory",
    "pin_memory_device",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)
"""Attributes of the DataLoader that frameworks look at."""


class Batched(Protocol):
    """A dataset that a `ShardLoader` can read, as ShardDataset describes it."""

    @property
    def epoch(self) -> int:
        """The epoch that is being read, or else the next one."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that every iteration reads from now on."""

    def load_state_dict(self, state: object) -> None:
        """Resume from a state at the next iteration."""

    def rank_position(self, workers: int, *, batch_size: int, drop_last: bool, in_order: bool) -> RankPosition:
        """Return the position of this rank at the start of the next iteration."""

    def ranks_end_together(self, stream: EpochStream) -> bool:
        """Return True if the epoch ends after the same number of batches on all ranks."""

    def reader_state(self) -> ReaderState:
        """Return the state of the reader of this process after its last sample."""


class ShardLoader(Generic[B_co]):
    """The batches of a ShardDataset. Made by `ShardDataset.loader`, which describes the arguments.

    Each iteration reads one epoch: the one set by `set_epoch`, or else the next. It is not a torch DataLoader but has
    one, so that frameworks which would shard a DataLoader's samples a second time take it as it is.

    Attributes:
        dataset: the dataset.
        batch_size: number of samples in a batch; None if samples come one by one.
        collate_fn: makes a batch of samples.
    """

    def __init__(
        self,
        dataset: Batched,
        *,
        batch_size: int | None,
        num_workers: int | None = None,
        collate_fn: Callable[[Any], B_co] | None = None,
        pin_memory: bool | None = None,
        persistent_workers: bool | None = None,
        **options: Any,
    ) -> None:
        _refuse(options)
        self.dataset = dataset
        self.batch_size = batch_size
        self.collate_fn = collate_fn or (default_convert if batch_size is None else default_collate)
        workers = _default_workers() if num_workers is None else num_workers
        self._batches: DataLoader[Any] = DataLoader(
            dataset,  # type: ignore[arg-type]  # an IterableDataset
            batch_size=batch_size,
            num_workers=workers,
            collate_fn=_Reporting(dataset, self.collate_fn),
            pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
            persistent_workers=bool(workers) if persistent_workers is None else persistent_workers,
            **options,
        )
        self._position: RankPosition | None = None
        self._begun: Generator[B_co] | None = None  # of which no batch has been asked for
        # The last iteration, if it was not read to its end. Weak, as in a cycle its workers would end late.
        self._last: ReferenceType[Generator[B_co]] | None = None

    def __repr__(self) -> str:
        return f"ShardLoader({self.dataset!r}, batch_size={self.batch_size}, num_workers={self.num_workers})"

    def __getattr__(self, name: str) -> Any:
        if name in _PROPERTIES:
            return getattr(self._batches, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __len__(self) -> int:
        """Return the number of batches in an epoch of this rank. Raises TypeError while it is unknown."""
        samples, size = len(self.dataset), self.batch_size or 1
        return samples // size if self._batches.drop_last else -(-samples // size)

    def __iter__(self) -> Iterator[B_co]:
        # Lightning begins an iteration twice. An epoch that was begun but not read is not left for the next one.
        if self._begun is None:
            self._position = position = self._at_start()  # before the workers take the states to resume from
            self._begun = self._follow(iter(self._batches), position)
            self._last = ref(self._begun)
        return self._begun

    def _at_start(self) -> RankPosition:
        return self.dataset.rank_position(
            self.num_workers,
            batch_size=self.batch_size or 1,
            drop_last=self._batches.drop_last,
            in_order=self._batches.in_order,
        )

    def _follow(self, batches: Iterator[Any], position: RankPosition) -> Generator[B_co]:
        self._begun = None
        try:
            for batch, state in batches:
                position.note(ReaderState.from_json(state))
                yield batch
        except GeneratorExit:
            raise
        except BaseException:
            self._end_workers()  # one may have been killed
            raise
        position.end()
        if self._position is position:
            self._last = None

    def _give_up(self) -> None:
        """End the last iteration and its workers, of which one that is slow could take a state loaded from now on."""
        if self._last is not None:
            batches = self._last()
            if batches is not None:
                batches.close()
            self._end_workers()
        self._begun = self._last = None

    def _end_workers(self) -> None:
        self._batches._iterator = None  # of persistent workers, which a DataLoader keeps for its next iteration

    @property
    def epoch(self) -> int:
        """The epoch that is being read, or else the next one."""
        return self.dataset.epoch if self._position is None else self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that every iteration reads from now on."""
        self.dataset.set_epoch(epoch)
        self._position = self._begun = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch taken: a few numbers per worker.

        One rank's state suffices to resume all ranks, on any number of ranks and workers; see
        `ShardDataset.load_state_dict`.
        """
        return (self._position or self._at_start()).states(self.dataset.ranks_end_together)

    def load_state_dict(self, state: object) -> None:
        """Resume from a state at the next iteration: with exactly the next batch, if ranks and workers are the same.

        Raises what `ShardDataset.load_state_dict` raises.
        """
        self._give_up()
        self.dataset.load_state_dict(state)
        self._position = None


class _Reporting:
    """A collate function that returns each batch with the reader's state after it."""

    def __init__(self, dataset: Batched, collate: Collate) -> None:
        self._dataset = dataset
        self._collate = collate

    def __call__(self, samples: Any) -> tuple[Any, dict[str, Any]]:
        try:
            batch = self._collate(samples)
        except KeyError as exn:
            raise _missing(samples, exn) or exn from None
        return batch, self._dataset.reader_state().to_json()


def _missing(samples: Any, exn: KeyError) -> MissingMemberError | None:
    """Return the error that names the first sample without the key that others have, if that is what is wrong."""
    if not isinstance(samples, Sequence) or not exn.args:
        return None
    for sample in samples:
        if isinstance(sample, Mapping) and "__key__" in sample and exn.args[0] not in sample:
            return MissingMemberError.of(str(exn.args[0]), sample)
    return None


def _refuse(options: Mapping[str, Any]) -> None:
    for name in ("sampler", "batch_sampler", "shuffle"):
        if options.get(name):
            raise ConfigError(
                f"loader() does not take {name}: the dataset determines the order of its samples",
                remedy="pass shuffle, shuffle_window and seed to the ShardDataset",
            )


def _default_workers() -> int:
    """Return this process's share of the CPUs that the ranks on its node may use."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return max(1, min(_MOST_WORKERS, len(os.sched_getaffinity(0)) // ranks))
