"""The samples of one reader, gathered a buffer at a time, in which they wait for their batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shardcache.errors import ConfigError, SampleError
from shardcache_client.handlers import Handler
from shardcache_client.topology import Topology

State = dict[str, Any]

_END = object()


class Source(Protocol):
    """What is asked of a dataset whose samples are gathered; `ShardDataset` is one."""

    @property
    def seed(self) -> int:
        """The same on all ranks."""

    @property
    def epoch(self) -> int:
        """That of the iteration under way; before one, that which it will read."""

    @property
    def position(self) -> int:
        """How many of this reader's samples of the epoch have been passed, whether given or skipped."""

    def topology(self) -> Topology:
        """Return which reader this is."""

    def __iter__(self) -> Iterator[Any]: ...

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""

    def state_dict(self) -> State:
        """Return where the iteration stands, behind the sample given last."""

    def load_state_dict(self, state: Any) -> None:
        """Have the next iteration go on from there.

        By other readers than took the state, without the samples marked by "beyond", which is a `Buffer.beyond`.
        """


@dataclass(slots=True)
class Buffer:
    """Consecutive samples of one reader.

    Attributes:
        number: how many buffers came before.
        start: the dataset's state before the first sample.
        first: the dataset's position then.
        samples: None in place of those that were given.
        lengths: of each sample.
        positions: the dataset's, at each sample.
        refused: how many samples were too long to be added.
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
    _passed: int = 0  # bit n: the n-th position behind the first was given or refused

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
        """Note that the sample there was too long."""
        self.refused += 1
        self._pass(position)

    def borrow(self, before: Buffer | None) -> None:
        """Take over a sample that the buffer before has given.

        Raises ConfigError when there is none.
        """
        if before is None:
            raise ConfigError(
                "this reader has no sample left for a batch, while the same worker of another rank has",
                remedy="let all ranks read equally many samples: even='pad' or even='drop'",
            )
        shortest = before._shortest
        self.add(before.samples[shortest], before.lengths[shortest], before.positions[shortest])

    def take(self, numbers: Sequence[int]) -> list[Any]:
        """Return samples by their numbers, and keep none of them but the one that may be given again."""
        taken = [self.samples[number] for number in numbers]
        self._given.update(numbers)
        for number in numbers:
            self._pass(self.positions[number])
            if number != self._shortest:  # `buckets.batches` repeats the last of the shortest, which this is
                self.samples[number] = None
        return taken

    @property
    def gone(self) -> int:
        """How many of its samples it no longer holds."""
        return len(self._given) + self.refused

    @property
    def beyond(self) -> str:
        """Which samples it no longer holds: bits, in hexadecimal, with bit n for the n-th position behind `first`."""
        return hex(self._passed)

    def _pass(self, position: int) -> None:
        # A position before the first belongs to a sample that was read before, and makes up for one that is bad.
        if position >= self.first:
            self._passed |= 1 << position - self.first


class Gatherer:
    """One pass over a dataset, from buffer to buffer.

    Samples longer than `max_tokens` go to `on_error` as SampleError; `refused` counts them.
    """

    def __init__(self, dataset: Source, length: Callable[[Any], int], max_tokens: int, on_error: Handler) -> None:
        self._dataset = dataset
        self._samples = iter(dataset)
        self._length = length
        self._max_tokens = max_tokens
        self._on_error = on_error
        self._over = False
        self.refused = 0

    def fill(self, buffer: Buffer, size: int) -> None:
        """Read on until the buffer has had so many samples, or there are no more."""
        while len(buffer) < size and not self._over:
            sample = next(self._samples, _END)
            if sample is _END:
                self._over = True
            else:
                self._sort_in(sample, buffer)

    def _sort_in(self, sample: Any, buffer: Buffer) -> None:
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
            f"sample {told.get('__key__', '')!r} is {length} long, more than the {self._max_tokens} of a whole batch",
            url=told.get("__url__"),
            remedy="raise max_tokens, or leave such samples out by on_error=warn_and_continue",
        )
