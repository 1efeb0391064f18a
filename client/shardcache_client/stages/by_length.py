"""Batches of samples of similar length, the same number on every rank.

A reader's epoch goes in rounds: one buffer of samples per round, and an agreed number of batches for it. Ranks cannot
deadlock. Readers with the same worker id on all ranks agree, round by round, on the greatest number of batches that any
of them needs. Suppose that ranks train in step and all are stuck after the same number of batches. A DataLoader takes
batches from its workers in turn, and the numbers agreed on so far are the same everywhere, so every rank waits for the
same round of the same worker. All batches of that worker's earlier rounds have been taken, so each of these readers has
filled its buffer, which depends on no other rank, and has sent its number. Then they agree, and are not stuck. The
numbers of buffers may differ: a reader without samples keeps agreeing until none needs a batch.

The agreed numbers are determined by manifest, seed, epoch and topology, since a sample always has the same length. A
run resumed from a state therefore reproduces the batches at which it was interrupted.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from shardcache.errors import ConfigError, SampleError
from shardcache_client.handlers import Handler, for_epoch
from shardcache_client.order.rounds import Topology, permutation
from shardcache_client.stages.sample_length import length_of
from shardcache_client.stages.stage import Agree, Mark, Placed, StageRun

log = logging.getLogger("shardcache")

_END = Placed(-1, None)


@dataclass(frozen=True, slots=True)
class ByLength:
    """The stage of `batch_by_length`, which describes the attributes.

    Attributes:
        agreement: returns how a reader agrees with those of the same worker of all other ranks, for one iteration.
    """

    max_tokens: int
    length: Callable[[Any], int]
    sort_buffer: int
    collate: Callable[[list[Any]], Any]
    on_error: Handler
    agreement: Callable[[Topology], Agree]

    is_in_step = True

    @property
    def name(self) -> str:
        """What its groups depend on; see `Stage`."""
        return f"by length {self.max_tokens} {self.sort_buffer}"

    def regrouped(self, samples: Iterator[Placed], run: StageRun) -> Iterator[tuple[Any, Mark]]:
        """Yield each batch with the mark after it; see `Stage`.

        Raises what the agreement raises, and ConfigError if this reader has no sample but others do.
        """
        return iter(_Rounds(self, samples, run, self.agreement(run.reader)))


class _Rounds:
    """The rounds of one reader's epoch. Iterable once."""

    def __init__(self, stage: ByLength, samples: Iterator[Placed], run: StageRun, agree: Agree) -> None:
        self._stage = stage
        self._samples = samples
        self._run = run
        self._agree = agree
        self._is_over = False
        self._refused = 0
        self._repeated = 0
        self._on_error = for_epoch(stage.on_error)
        self._read_until = run.start.first

    def __iter__(self) -> Iterator[tuple[Any, Mark]]:
        start = self._run.start
        skip = start.given
        before = self._before(start)
        buffer = SampleBuffer(start.group, start.first, before.shortest if before else None)
        self._fill(buffer, self._stage.sort_buffer)
        while True:
            need = fewest(buffer.lengths, self._stage.max_tokens)
            count = self._agree(f"epoch {self._run.epoch}, round {buffer.number}", need)
            if not count:
                break
            self._repeated += max(0, count - len(buffer.samples))
            if not buffer.samples:
                buffer.borrow(before)
            following = SampleBuffer(buffer.number + 1, self._read_until, buffer.shortest)
            yield from self._round(buffer, count, following, skip)
            skip = 0
            before = buffer
            buffer = following
        self._report()

    def _before(self, start: Mark) -> SampleBuffer | None:
        """Return what was given before the first group and is read again, as some of it may be repeated."""
        if not start.again:
            return None
        before = SampleBuffer(start.group - 1, start.place)
        for placed in self._samples:
            if placed.place >= start.first:
                self._samples = chain([placed], self._samples)
                break
            self._put(placed, before)
        return before if before.samples else None

    def _round(
        self, buffer: SampleBuffer, count: int, following: SampleBuffer, skip: int
    ) -> Iterator[tuple[Any, Mark]]:
        """Yield the batches of a buffer but the first `skip`, while the following one fills up."""
        made = batches(buffer.lengths, self._stage.max_tokens, count)
        run = self._run
        # The same on all ranks, so that they get batches of similar length at the same time.
        order = permutation(count, f"{run.seed}/{run.epoch}/{run.reader.worker}/{buffer.number}")
        for given, which in enumerate(order, 1):
            batch = buffer.take(made[which])
            if given > skip:
                mark = buffer.mark(given) if given < count else following.mark(0)
                yield self._stage.collate(batch), mark
            # As many as were yielded, so that no batch waits for a whole buffer, and memory never holds two.
            self._fill(following, min(buffer.gone, self._stage.sort_buffer))

    def _fill(self, buffer: SampleBuffer, size: int) -> None:
        """Read on until the buffer has received `size` samples, or the epoch ends.

        One that has refused all of them reads on until it has a sample: an empty buffer means the end of the epoch.
        """
        while not self._is_over:
            is_only_refused = buffer.refused > 0 and not buffer.samples
            if len(buffer.samples) + buffer.refused >= size and not is_only_refused:
                return
            placed = next(self._samples, _END)
            if placed.place < 0:
                self._is_over = True
                return
            self._read_until = placed.place + 1
            self._put(placed, buffer)

    def _put(self, placed: Placed, buffer: SampleBuffer) -> None:
        """Add a sample to a buffer, unless it is too long, as `on_error` decides."""
        place, sample = placed
        try:
            length = length_of(sample, self._stage.length(sample), self._stage.max_tokens)
        except SampleError as exn:
            buffer.refuse(place)
            self._refused += 1
            self._is_over = not self._on_error(exn)
        else:
            buffer.add(sample, max(1, length), place)

    def _report(self) -> None:
        if self._refused:
            text = "epoch %d: skipped %d samples longer than max_tokens, or of no length, as on_error decided"
            log.warning(text, self._run.epoch, self._refused)
        if self._repeated:
            text = "epoch %d: repeated %d samples to make as many batches as other ranks"
            log.warning(text, self._run.epoch, self._repeated)


@dataclass(slots=True)
class SampleBuffer:
    """Consecutive samples of one reader."""

    number: int  # number of buffers before this one
    first: int  # place from which they were read
    spare: int | None = None  # place of the sample, given before, that is repeated if this buffer has none
    samples: list[Any] = field(default_factory=list)  # None in place of those already yielded
    lengths: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    refused: int = 0  # number of samples that were too long to be added
    _shortest: int = 0  # the last of the shortest: the one that `batches` repeats
    _passed: int = 0  # bit n: the sample at place `first + n` was yielded or refused

    def add(self, sample: Any, length: int, place: int) -> None:
        """Append a sample."""
        self.samples.append(sample)
        self.lengths.append(length)
        self.places.append(place)
        if length <= self.lengths[self._shortest]:
            self._shortest = len(self.lengths) - 1

    def refuse(self, place: int) -> None:
        """Note that the sample at this place is too long."""
        self.refused += 1
        self._pass(place)

    def borrow(self, before: SampleBuffer | None) -> None:
        """Take over the shortest sample of the previous buffer, to be repeated. Raises ConfigError without one."""
        if before is None:
            raise ConfigError(
                "this reader has no sample for a batch, but the same worker of another rank does",
                remedy="give each worker of each rank a sample at least: use fewer of them",
            )
        shortest = before._shortest
        self.add(before.samples[shortest], before.lengths[shortest], before.places[shortest])

    def take(self, numbers: Sequence[int]) -> list[Any]:
        """Return samples by number, and keep none of them except the one that may be repeated."""
        taken = [self.samples[number] for number in numbers]
        for number in numbers:
            self._pass(self.places[number])
            if number != self._shortest:
                self.samples[number] = None
        return taken

    @property
    def shortest(self) -> int | None:
        """Place of the sample that is repeated, perhaps one given before; None if there is none."""
        return self.places[self._shortest] if self.places else self.spare

    @property
    def gone(self) -> int:
        """Number of samples that were yielded or refused."""
        return self._passed.bit_count()

    def _pass(self, place: int) -> None:
        # A place before the first is that of a sample that was borrowed.
        if place >= self.first:
            self._passed |= 1 << place - self.first

    def mark(self, given: int) -> Mark:
        """Return where a reader is that has yielded `given` batches of this buffer."""
        passed = self._passed if given else 0
        has_own = bool(self.places) and self.places[-1] >= self.first
        if has_own or self.spare is None:
            return Mark(self.first, self.number, given, passed)
        # It may turn out to have no sample: then the one to be repeated must be read again.
        again = self.first - self.spare
        return Mark(self.spare, self.number, given, passed << again | (1 << again) - 1, again)


# Every batch is padded to its longest sample, so samples of similar length belong together: batches are runs of the
# samples in order of length. No other division needs fewer batches: the batch with the longest sample holds at most
# `max_tokens // longest` samples; filling it with the next longest keeps the shortest possible samples for the rest,
# and the same argument applies to those.


def fewest(lengths: Sequence[int], max_tokens: int) -> int:
    """Return the minimum number of batches for samples of these lengths, each from 1 to `max_tokens`."""
    return len(_runs(sorted(lengths, reverse=True), max_tokens))


def batches(lengths: Sequence[int], max_tokens: int, count: int) -> list[list[int]]:
    """Return exactly `count` batches of sample numbers, those with the longest samples first.

    The padded size of a batch is at most `max_tokens`, and at most what `count` batches need, so that the work is
    spread over all of them. Each sample is in one batch. If there are fewer samples than batches, the shortest sample
    is repeated as additional batches of one. `count` is `fewest(lengths, max_tokens)` or more.
    """
    numbers = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    longest_first = [lengths[number] for number in numbers]
    # The smallest padded size with which at most `count` batches are needed; larger sizes need no more.
    bound = bisect_left(
        range(max_tokens), True, lo=longest_first[0], key=lambda bound: len(_runs(longest_first, bound)) <= count
    )
    runs = _runs(longest_first, bound)
    while len(runs) < min(count, len(lengths)):
        at = max(range(len(runs)), key=lambda at: (len(runs[at]) > 1, len(runs[at]) * longest_first[runs[at].start]))
        half = len(runs[at]) // 2
        runs[at : at + 1] = [runs[at][:half], runs[at][half:]]
    repeats = [range(len(lengths) - 1, len(lengths))] * (count - len(runs))
    return [[numbers[place] for place in run] for run in runs + repeats]


def _runs(longest_first: Sequence[int], bound: int) -> list[range]:
    runs, start = [], 0
    while start < len(longest_first):
        stop = min(start + bound // longest_first[start], len(longest_first))
        runs.append(range(start, stop))
        start = stop
    return runs
