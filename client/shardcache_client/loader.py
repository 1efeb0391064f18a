"""`ShardLoader`: a dataset's batches, with its epochs and an exact state; the process of a DataLoader's worker."""

import ctypes
import inspect
import logging
import os
import platform
import select
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import cache
from itertools import count, islice
from multiprocessing import parent_process
from multiprocessing.sharedctypes import RawValue
from threading import Thread
from time import monotonic
from typing import Any, Generic, Self
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert

from shardcache.errors import ConfigError, MissingMemberError
from shardcache_client.arguments import B_co
from shardcache_client.decoding import ENDS
from shardcache_client.order.rounds import Topology
from shardcache_client.position.bookmark import Iteration, RankPosition
from shardcache_client.position.state import ReaderState
from shardcache_client.ranks.torch_group import in_worker
from shardcache_client.reader import ShardReader
from shardcache_client.reading.epoch_times import EpochTimes, Made
from shardcache_client.reading.stream import EpochStream

log = logging.getLogger("shardcache")

Collate = Callable[[Any], Any]

_MAX_WORKERS = 8
# Reading the clock twice takes 0.1 us. Where decoding a sample takes less than this, one batch in so many is timed.
_CHEAP_S, _TIMED_EVERY = 20e-6, 16
OF_ORDER = ("sampler", "batch_sampler", "shuffle")
_PROPERTIES = inspect.signature(DataLoader).parameters.keys() - {*OF_ORDER}
"""Attributes of the DataLoader that frameworks look at."""


class ShardLoader(Generic[B_co]):
    """The batches of a ShardDataset. Made by `ShardDataset.loader`, which describes the arguments.

    Each iteration reads one epoch: the one set by `set_epoch`, or else the next. An iterator counts as one from its
    second batch on, or from its last if that is the first; before that (`next(iter(loader))`), it is a look, and
    changes nothing. If an older iterator is read
    on, those begun since were nested in it, and count no longer. State and epoch are those of the iterator that took
    the last batch: dropping a nested one gives the position back. Each has workers of its own, while those of the
    others persist. An iterator under which a state is loaded raises a ConfigError at its next batch.

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
        self.collate_fn = collate_fn or (default_convert if self.batch_size is None else default_collate)
        self._reader = reader  # a copy, of this batch size
        self._options = dict(options)  # of a DataLoader
        for name, default in (
            ("num_workers", _default_workers),
            ("pin_memory", torch.cuda.is_available),
            ("persistent_workers", lambda: bool(self._options["num_workers"])),
        ):
            if self._options[name] is None:
                self._options[name] = default()
        self._times = EpochTimes(0)
        self._owner: Iteration | None = None
        try:
            batches = self._new_batches()
        except (TypeError, ValueError) as exn:  # DataLoader's own checks of its arguments
            raise ConfigError(f"the DataLoader refuses its arguments: {exn}") from exn
        self._keep(batches, None)

    def __repr__(self) -> str:
        return f"ShardLoader({self._source!r}, batch_size={self.batch_size}, num_workers={self.num_workers})"

    def __getattr__(self, name: str) -> Any:
        if name in _PROPERTIES:
            return getattr(self._batches, name)
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
        chosen = bookmark.notes.read().get("set")
        self._reader.load_state_dict(position)
        if chosen is not None:
            self._reader.set_epoch(chosen)

    def __copy__(self) -> Self:
        """Return a loader that shares the reader, and so its position."""
        made = type(self).__new__(type(self))
        made._take_over(self._shared())
        return made

    def _shared(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_batches", "_owner")}

    def _take_over(self, attributes: dict[str, Any]) -> None:
        self.__dict__ |= attributes
        self._owner = None
        self._keep(self._new_batches(), None)

    def __len__(self) -> int:
        """Return the number of batches in an epoch of this rank. Raises TypeError while it is unknown."""
        samples, size = len(self._reader), self.batch_size or 1
        return samples // size if self._batches.drop_last else -(-samples // size)

    def __iter__(self) -> Iterator[B_co]:
        iteration = Iteration()
        batches = self._read(iteration)
        iteration.read_by(batches)
        return batches

    def _read(self, iteration: Iteration) -> Generator[B_co]:
        bookmark = self._follow()._bookmark
        self._reader._group.refuse_resharding()
        bookmark.begin(iteration)
        iteration.place = position = self._position_of(iteration)
        times = EpochTimes(iteration.epoch)
        loader, batches = self._loader_for(iteration), None
        try:
            batches = loader.begin(iteration)
            for taken, (batch, state, made) in enumerate(batches):
                if taken == 1:
                    self._count(iteration, loader)
                bookmark.take(iteration)
                position.note(ReaderState.from_json(state))
                if position.is_read:
                    self._finish(iteration, loader)
                times.received(made)
                if iteration.counted:
                    self._times = times
                yield batch
                times.stepped()
                self._follow()
        except GeneratorExit:
            bookmark.leave(iteration)
            raise
        except BaseException:
            loader.end(batches)
            raise
        position.end()
        self._finish(iteration, loader)
        iteration.ended = True
        if not iteration.looks:
            self._times = times
            log.info("%s", times)

    def _loader_for(self, iteration: Iteration) -> "_Batches":
        """Return batches that no other iteration is reading; the next one may have their workers."""
        is_taken = self._owner is not None and self._owner.live
        batches = self._new_batches() if is_taken or self._batches.bound_to_others(iteration) else self._batches
        self._keep(batches, iteration)
        return batches

    def _count(self, iteration: Iteration, batches: "_Batches") -> None:
        self._reader._bookmark.count(iteration)
        self._keep(batches, iteration)

    def _finish(self, iteration: Iteration, batches: "_Batches") -> None:
        self._reader._bookmark.finish(iteration)
        self._keep(batches, iteration)

    def _keep(self, batches: "_Batches", owner: Iteration | None) -> None:
        """Keep batches for the next iteration, unless others that are kept are being read."""
        if self._owner is None or not self._owner.live:
            self._batches, self._owner = batches, owner

    def _new_batches(self) -> "_Batches":
        return _Batches(self._reader, self.collate_fn, self._options)

    def _follow(self) -> ShardReader[Any]:
        """Have the copy continue where the dataset does, if its epoch or state were set since; return it."""
        if self._reader._bookmark.follow(self._source._bookmark):
            self._reader._take_seeds(self._source._settings.seeds)
        return self._reader

    def _position_of(self, begun: Iteration | None) -> RankPosition:
        """Return the position of this rank at the start of an iteration, or else of the next one."""
        reader, workers, bookmark = self._reader, max(1, self._batches.num_workers), self._reader._bookmark
        epoch = bookmark.next_epoch if begun is None else begun.epoch
        states, turn = bookmark.next_states() if begun is None else (begun.states, begun.turn)
        ranks = reader._group.ranks
        crew = [Topology(ranks.rank, ranks.world_size, worker, workers) for worker in range(workers)]
        streams = [reader._stream_of(epoch, topology, states) for topology in crew]
        return RankPosition(
            [stream.state() for stream in streams],
            lambda state: streams[state.reader % workers].left_after(state.position),
            streams[0].ranks_end_together,
            turn if states and states[0].cut.workers == workers else 0,
            (self.batch_size or 1, self._batches.drop_last),
            in_order=self._batches.in_order,
        )

    @property
    def _position(self) -> RankPosition:
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
        """Return the position after the last batch taken: a few numbers per worker.

        One rank's state suffices to resume all ranks, on any number of ranks and workers; see
        `ShardDataset.load_state_dict`.
        """
        return self._position.to_json()

    def load_state_dict(self, state: object) -> None:
        """Resume from a state at the next iteration: with exactly the next batch, if ranks and workers are the same.

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


# Of a cycle such as a trainer and its loader, Python may close the queues before torch tells the workers over them to
# end: each would be waited for until it looks by itself, which is 5 s. Held here, they are no part of the cycle.
_queues_of_workers: WeakKeyDictionary[Iterator[Any], Any] = WeakKeyDictionary()


class _Batches(DataLoader[Any]):
    """Batches of one iteration after another, each with the reader's state after it."""

    def __init__(self, reader: ShardReader[Any], collate: Collate, options: Mapping[str, Any]) -> None:
        self._pid = os.getpid()
        self._share = _WorkerSamples(reader, collate, options["batch_size"])
        super().__init__(self._share, collate_fn=self._share.collated, **options)

    def begin(self, iteration: Iteration) -> Iterator[Any]:
        """Begin an iteration."""
        self._share.begin(iteration)
        batches = iter(self)
        if (queues := getattr(batches, "_index_queues", None)) is not None:  # else they are made in this process
            _queues_of_workers[batches] = queues
        return batches

    def bound_to_others(self, iteration: Iteration) -> bool:
        """Return True if they belong to the process that forked this one, or have workers that cannot take states."""
        return self._pid != os.getpid() or (self._iterator is not None and bool(iteration.states))

    def end(self, batches: Iterator[Any] | None) -> None:
        """End the workers of an iteration that failed: its error holds them, and a collector would wait for each."""
        self._iterator = None  # of persistent workers, which a DataLoader keeps for its next iteration
        if (shut_down := getattr(batches, "_shutdown_workers", None)) is not None:  # else they are made in this process
            shut_down()


class _WorkerSamples(IterableDataset[Any]):
    """The samples of the worker that this is a copy for."""

    def __init__(self, reader: ShardReader[Any], collate: Collate, size: int | None) -> None:
        self._reader = reader
        self._collate = collate
        self._size = size  # of batches; None for samples one by one
        self._begun = (0.0, 0.0, 0.0)  # the present batch: the time, and what had been waited and decoded by then
        self._decoding_s = 0.0  # per sample, as timed last
        self._start: tuple[int, Sequence[ReaderState], int] = (0, (), 0)
        self._stream: EpochStream | None = None
        self._epoch = RawValue("q")  # for workers that persist

    def begin(self, iteration: Iteration) -> None:
        """Set what is read next: by workers that have yet to be started, and, without states, by others."""
        self._start = iteration.epoch, iteration.states, iteration.turn
        self._epoch.value = iteration.epoch

    def __iter__(self) -> Iterator[Any]:
        if self._stream is not None and in_worker():
            self._start = self._epoch.value, (), 0
        self._stream = self._reader._stream(*self._start)
        return self._batchwise(self._stream)

    def _batchwise(self, stream: EpochStream) -> Iterator[Any]:
        samples = stream.samples()
        for number in count():
            if stream.read:
                break
            stream.is_timed = self._decoding_s > _CHEAP_S or number % _TIMED_EVERY == 0
            self._begun = (monotonic(), stream.waited_s, stream.decoding_s)
            yield from islice(samples, self._size or 1)
        yield from samples  # none, but its end

    def collated(self, samples: Any) -> tuple[Any, dict[str, Any], Made]:
        """Return a batch of samples with the reader's state after it, and the times of its making."""
        assert self._stream is not None
        stream, (begun_s, waited_s, decoding_s), decoded_s = self._stream, self._begun, monotonic()
        try:
            batch = self._collate(samples)
        except KeyError as exn:
            raise _missing(samples, exn) or exn from None
        except ENDS as exn:
            raise RuntimeError(f"collate_fn raised {type(exn).__name__}") from exn
        ended_s, size, waited_s = monotonic(), 1 if self._size is None else len(samples), stream.waited_s - waited_s
        if stream.is_timed:
            self._decoding_s = (stream.decoding_s - decoding_s) / size
        decoding_s = min(size * self._decoding_s, decoded_s - begun_s - waited_s)
        made = Made(size, begun_s, ended_s, waited_s, decoding_s, ended_s - decoded_s)
        return batch, stream.state_in_loader().to_json(), made


def _missing(samples: Any, exn: KeyError) -> MissingMemberError | None:
    """Return the error that names the first sample without the key that others have, if that is what is wrong."""
    if not isinstance(samples, Sequence) or not exn.args:
        return None
    for sample in samples:
        if isinstance(sample, Mapping) and "__key__" in sample and exn.args[0] not in sample:
            return MissingMemberError.of(str(exn.args[0]), sample, is_named=False)
    return None


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


# The process of a worker: its end with the trainer, and the allocator it keeps memory with.

TUNE_MALLOC_ENV = "SHARDCACHE_TUNE_MALLOC"
"""Environment variable; 0 disables tuning of the allocator."""

_MIB = 1024 * 1024

# By default glibc returns the top of the heap to the kernel once 128 KiB of it are free, or twice the largest mapped
# block freed so far. A batch is larger, so all its pages were faulted in again, which took longer than the copy.
_M_TRIM_THRESHOLD, _MAX_KEPT_BYTES = -1, 128 * _MIB
# A trim keeps this much. It must be well below 64 MiB, the size of the segments of other threads' heaps: glibc removes
# a free segment only if this much is free in the previous one, so with 64 MiB such heaps would never shrink.
_M_TOP_PAD, _LEFT_BY_TRIM_BYTES = -2, 16 * _MIB
# Setting either of these stops glibc's own adjustment of the size above which a block is mapped, and so returned,
# separately: it would stay at 128 KiB, or at the largest freed so far. 32 MiB is the adjustment's upper limit.
_M_MMAP_THRESHOLD, _MIN_MAPPED_BYTES = -3, 32 * _MIB

_GLIBCS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


@cache
def end_with_trainer() -> None:
    """End this worker's process as soon as its trainer has ended, even by SIGKILL.

    torch's own check comes between two batches only. A worker whose batches fill the pipe to its dead trainer would
    stay for ever, as would its leases and whatever sockets it has inherited: its siblings hold the pipe's other end.
    """
    trainer = parent_process()
    if trainer is None or trainer.pid is None or not hasattr(os, "pidfd_open"):
        return
    try:
        pidfd = os.pidfd_open(trainer.pid)
    except ProcessLookupError:
        os._exit(1)
    except OSError:
        return  # a kernel or sandbox without pidfds
    Thread(target=_exit_after, args=(pidfd,), name="shardcache-trainer", daemon=True).start()


def _exit_after(pidfd: int) -> None:
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    ended.poll()
    os._exit(1)


@cache
def keep_freed_memory() -> None:
    """Let this process keep up to 128 MiB of freed memory, if its C library is glibc.

    No-op with other C libraries, with SHARDCACHE_TUNE_MALLOC=0, and if the environment sets glibc's parameters.
    """
    if platform.libc_ver()[0] != "glibc" or not is_wanted(os.environ):
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_THRESHOLD, _MIN_MAPPED_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _MAX_KEPT_BYTES)
    mallopt(_M_TOP_PAD, _LEFT_BY_TRIM_BYTES)


def is_wanted(env: Mapping[str, str]) -> bool:
    """Return True unless the environment disables tuning or sets the allocator's parameters itself."""
    tuned = "glibc.malloc." in env.get("GLIBC_TUNABLES", "") or any(name in env for name in _GLIBCS_OWN)
    return env.get(TUNE_MALLOC_ENV) != "0" and not tuned
