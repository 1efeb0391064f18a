"""Batches of samples without numbers, uncounted or filtered ones, by a DataLoader whose workers have shares of them."""

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import count, islice
from multiprocessing.sharedctypes import RawValue
from time import monotonic
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from shardcache_client.batches.maker import Collate, collated
from shardcache_client.loading.worker_process import end_workers, hold_queues
from shardcache_client.position.bookmark import Iteration
from shardcache_client.position.state import ReaderState, Saved
from shardcache_client.ranks.torch_group import in_worker
from shardcache_client.reader import ShardReader
from shardcache_client.reading.epoch_times import Made
from shardcache_client.reading.stream import EpochStream

# Reading the clock twice takes 0.1 us. Where decoding a sample takes less than this, one batch in so many is timed.
_CHEAP_S, _TIMED_EVERY = 20e-6, 16


class StreamedBatches(DataLoader[Any]):
    """Batches of one iteration after another, each with the reader's state after it."""

    def __init__(self, reader: ShardReader[Any], collate: Collate, options: Mapping[str, Any]) -> None:
        self._pid = os.getpid()
        self._share = _WorkerSamples(reader, collate, options["batch_size"])
        super().__init__(self._share, collate_fn=self._share.collated, **options)

    def begin(self, iteration: Iteration) -> Iterator[Any]:
        """Begin an iteration."""
        self._share.begin(iteration)
        batches = iter(self)
        hold_queues(batches)
        return batches

    def read(self, iteration: Iteration) -> Generator[tuple[Any, ReaderState, Made]]:
        """Yield each batch with the state after it, and the times of its making."""
        batches = None
        try:
            batches = self.begin(iteration)
            for batch, state, made in batches:
                yield batch, ReaderState.from_json(state), made
        except GeneratorExit:
            raise
        except BaseException:
            end_workers(self, batches)
            raise

    def bound_to_others(self, iteration: Iteration) -> bool:
        """Return True if they belong to the process that forked this one, or have workers that cannot take states."""
        return self._pid != os.getpid() or (self._iterator is not None and bool(iteration.states))


class _WorkerSamples(IterableDataset[Any]):
    """The samples of the worker that this is a copy for."""

    def __init__(self, reader: ShardReader[Any], collate: Collate, size: int | None) -> None:
        self._reader = reader
        self._collate = collate
        self._size = size  # of batches; None for samples one by one
        self._begun = (0.0, 0.0, 0.0)  # the present batch: the time, and what had been waited and decoded by then
        self._decoding_s = 0.0  # per sample, as timed last
        self._start: tuple[int, Sequence[Saved], int] = (0, (), 0)
        self._stream: EpochStream | None = None
        self._epoch = RawValue("q")  # for workers that persist

    def begin(self, iteration: Iteration) -> None:
        """Set what is read next: by workers that have yet to be started, and, without states, by others."""
        self._start = iteration.epoch, iteration.states, iteration.turn
        self._epoch.value = iteration.epoch

    def __iter__(self) -> Iterator[Any]:
        if self._stream is not None and in_worker():
            self._start = self._epoch.value, (), 0
        stream = self._reader._stream(*self._start)
        assert isinstance(stream, EpochStream)
        self._stream = stream
        return self._batchwise(stream)

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
        batch = collated(self._collate, samples)
        ended_s, size, waited_s = monotonic(), 1 if self._size is None else len(samples), stream.waited_s - waited_s
        if stream.is_timed:
            self._decoding_s = (stream.decoding_s - decoding_s) / size
        decoding_s = min(size * self._decoding_s, decoded_s - begun_s - waited_s)
        made = Made(size, begun_s, ended_s, waited_s, decoding_s, ended_s - decoded_s)
        return batch, stream.state_in_loader().to_json(), made
