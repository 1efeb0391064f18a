"""The samples of one reader, read into buffers in which they wait for their batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shardcache.errors import ConfigError, SampleError
from shardcache_client.handlers import Handler
from shardcache_client.topology import Topology

State = dict[str, Any]

_END = object()


class BatchableDataset(Protocol):
    """Interface of a dataset that can be batched by length, such as `ShardDataset`."""

    @property
    def seed(self) -> int:
        """Seed of the shuffle, the same on all ranks."""

    @property
    def epoch(self) -> int:
        """Epoch of the current iteration; before one, the epoch that it will read."""

    @property
    def position(self) -> int:
        """Number of samples of the epoch that this reader has passed, yielded or skipped."""

    def topology(self) -> Topology:
        """Return the place of this reader in the job."""

    def __iter__(self) -> Iterator[Any]: ...

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""

    def state_dict(self) -> State:
        """Return the position after the last sample yielded."""

    def load_state_dict(self, state: Any) -> None:
        """Resume the next iteration from a state.

        If the readers are not those that took the state, samples marked in "beyond", a `Buffer.beyond`, are left out.
        """


@dataclass(slots=True)
class SampleBuffer:
    """Consecutive samples of one reader.

    Attributes:
        number: number of buffers before this one.
        start: the dataset's state before the first sample.
        first: the dataset's position before the first sample.
        samples: the samples; None in place of those already yielded.
        lengths: length of each sample.
        positions: the dataset's position at each sample.
        refused: number of samples that were too long to be added.
    """

    number: int
    start: State
    first: int
    samples: list[Any] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    refused: int = 0
    _shortest: int = 0
    _given: set[int] = field(default_factory=set)
    _passed: int = 0  # bit n: the sample at position `first + n` was yielded or refused

    def __len__(self) -> int:
        return len(self.samples) + self.refused

    def add(self, sample: Any, length: int, position: int) -> None:
        """Append a sample."""
        self.samples.append(sample)
        self.lengths.append(length)
        self.positions.append(position)
        if length <= self.lengths[self._shortest]:
            self._shortest = len(self.lengths) - 1

    def refuse(self, position: int) -> None:
        """Note that the sample at this position is too long."""
        self.refused += 1
        self._pass(position)

    def borrow(self, before: SampleBuffer | None) -> None:
        """Take over the shortest sample of the previous buffer, to be repeated.

        Raises ConfigError if there is no previous buffer.
        """
        if before is None:
            raise ConfigError(
                "this reader has no sample for a batch, but the same worker of another rank does",
                remedy="let all ranks read the same number of samples: even='pad' or even='drop'",
            )
        shortest = before._shortest
        self.add(before.samples[shortest], before.lengths[shortest], before.positions[shortest])

    def take(self, numbers: Sequence[int]) -> list[Any]:
        """Return samples by number, and keep none of them except the one that may be repeated."""
        taken = [self.samples[number] for number in numbers]
        self._given.update(numbers)
        for number in numbers:
            self._pass(self.positions[number])
            if number != self._shortest:  # the last of the shortest: the one that `buckets.batches` repeats
                self.samples[number] = None
        return taken

    @property
    def gone(self) -> int:
        """Number of samples that were yielded or refused."""
        return len(self._given) + self.refused

    @property
    def beyond(self) -> str:
        """Bits of the samples yielded or refused, in hexadecimal: bit n for position `first + n`."""
        return hex(self._passed)

    def _pass(self, position: int) -> None:
        # A position before the first belongs to a repeated sample, read in place of a bad one.
        if position >= self.first:
            self._passed |= 1 << position - self.first


class Gatherer:
    """One pass over a dataset, buffer by buffer.

    Samples longer than `max_tokens` go to `on_error` as SampleError and are counted in `refused`.
    """

    def __init__(
        self, dataset: BatchableDataset, length: Callable[[Any], int], max_tokens: int, on_error: Handler
    ) -> None:
        self._dataset = dataset
        self._samples = iter(dataset)
        self._length = length
        self._max_tokens = max_tokens
        self._on_error = on_error
        self._over = False
        self.refused = 0

    def fill(self, buffer: SampleBuffer, size: int) -> None:
        """Read on until the buffer has received `size` samples, or the dataset ends."""
        while len(buffer) < size and not self._over:
            sample = next(self._samples, _END)
            if sample is _END:
                self._over = True
            else:
                self._sort_in(sample, buffer)

    def _sort_in(self, sample: Any, buffer: SampleBuffer) -> None:
        length, position = max(1, self._length(sample)), self._dataset.position - 1
        if length <= self._max_tokens:
            buffer.add(sample, length, position)
            return
        buffer.refuse(position)
        self.refused += 1
        self._over = not self._on_error(self._too_long(sample, length))

    def _too_long(self, sample: Any, length: int) -> SampleError:
        told = sample if isinstance(sample, dict) else {}
        return SampleError(
            f"sample {told.get('__key__', '')!r} has length {length}, more than max_tokens={self._max_tokens}",
            url=told.get("__url__"),
            remedy="raise max_tokens, or skip such samples with on_error=warn_and_continue",
        )
