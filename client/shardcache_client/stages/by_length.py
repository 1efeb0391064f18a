"""Batches of samples of similar length, the same number on every rank.

A reader (a rank, or one of its DataLoader workers) makes its epoch's batches in rounds: each round
has one buffer of samples, and an agreed number of batches. In each round, the readers with the same
worker id on all ranks agree on the greatest number of batches that any of them needs. A reader
without samples keeps agreeing until no reader needs a batch, so readers may have different numbers
of buffers.

Ranks cannot deadlock. Suppose that ranks train in step, and all are stuck after the same number of
batches. A DataLoader takes batches from its workers in turn, and the numbers agreed on so far are
the same everywhere. So every rank waits for the same round of the same worker, after taking all
batches of that worker's earlier rounds. Each of these readers can fill its buffer without any other
rank, and then sends its number. So they agree, and are not stuck.

The agreed numbers are determined by manifest, seed, epoch and topology, since a sample always has
the same length. A run that resumes from a state therefore makes the same batches as the run that
was interrupted.

A place is a position in the reader's order of samples. A mark is a reader's position between two
batches. Its group is the round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from shardcache.shared.exceptions import SampleError
from shardcache_client.handlers import Handler, for_epoch
from shardcache_client.order.sequences.permutations import permutation
from shardcache_client.order.topology import Topology
from shardcache_client.stages.length_batches import batches_of, min_batch_count
from shardcache_client.stages.sample_buffer import SampleBuffer
from shardcache_client.stages.sample_length import length_of, warn_of_refused
from shardcache_client.stages.stage import Agree, EpochFacts, Mark, Placed

log = logging.getLogger("shardcache")

_END = Placed(-1, None)  # stands for the end of the samples


@dataclass(frozen=True, slots=True)
class ByLength:
    """The stage of `batch_by_length`, which describes the attributes in full.

    Attributes:
        max_tokens: maximum padded size of a batch.
        length: returns the length of a sample.
        sort_buffer: number of samples that are sorted together.
        collate: makes a batch of a list of samples.
        on_error: called with the error of a sample that is too long for any batch.
        agreement: returns the function by which a reader agrees with the same worker of all other
            ranks, for one iteration.
    """

    max_tokens: int
    length: Callable[[Any], int]
    sort_buffer: int
    collate: Callable[[list[Any]], Any]
    on_error: Handler
    agreement: Callable[[Topology], Agree]

    # In each round, all ranks read the same number of samples, and make the same number of batches.
    is_in_step = True

    @property
    def name(self) -> str:
        """Identifier of the way in which samples are grouped; see `Stage`."""
        return f"by length {self.max_tokens} {self.sort_buffer}"

    def regrouped(self, samples: Iterator[Placed], facts: EpochFacts) -> Iterator[tuple[Any, Mark]]:
        """Yield each batch with the mark after it; see `Stage`.

        Raises any error of the agreement, and ConfigError if this reader has no sample but the same
        worker of another rank has one.
        """
        return iter(_Rounds(self, samples, facts, self.agreement(facts.reader)))


class _Rounds:
    """The batches of one reader's epoch, made round by round. Iterable once.

    Args:
        stage: the options of the stage.
        samples: the samples from the start in `facts` on.
        facts: facts about the epoch, and the reader's position at the start.
        agree: agrees with the same worker of all other ranks on the greatest of their numbers.
    """

    def __init__(
        self,
        stage: ByLength,
        samples: Iterator[Placed],
        facts: EpochFacts,
        agree: Agree,
    ) -> None:
        self._stage = stage
        self._samples = samples
        self._facts = facts
        self._agree = agree
        self._is_over = False
        self._refused = 0  # number of samples that were skipped for their lengths
        self._repeated = 0  # number of times that a sample was repeated
        self._on_error = for_epoch(stage.on_error)
        self._read_until = facts.start.first  # place of the next sample to be read

    def __iter__(self) -> Iterator[tuple[Any, Mark]]:
        try:
            yield from self._rounds()
        finally:  # an epoch that is left early is reported as well
            self._report()

    def _rounds(self) -> Iterator[tuple[Any, Mark]]:
        """Yield each batch with the mark after it, round by round, until no rank needs more."""
        start = self._facts.start
        given_before = start.given  # batches of the first round given before the state was taken
        previous = self._read_previous(start)
        buffer = SampleBuffer(start.group, start.first)
        if previous is not None:
            buffer.place_to_repeat = previous.shortest_place
        self._fill(buffer, self._stage.sort_buffer)
        while True:
            needed = min_batch_count(buffer.lengths, self._stage.max_tokens)
            count = self._agree(f"epoch {self._facts.epoch}, round {buffer.number}", needed)
            if not count:
                break

            # Each batch has at least one sample. So this reader repeats a sample for each batch for
            # which it has none.
            self._repeated += max(0, count - len(buffer.samples))
            if not buffer.samples:
                buffer.borrow(previous)
            following = SampleBuffer(buffer.number + 1, self._read_until, buffer.shortest_place)
            yield from self._batches_of(buffer, count, following, given_before)
            given_before = 0
            previous = buffer
            buffer = following

    def _read_previous(self, start: Mark) -> SampleBuffer | None:
        """Read again the samples given before the first group, as one of them may be repeated.

        Returns None if the start is a mark without such samples, or if all of them are refused.
        """
        if not start.again:
            return None
        previous = SampleBuffer(start.group - 1, start.place)
        for placed in self._samples:
            if placed.place >= start.first:
                # This sample belongs to the first group, so it is put back.
                self._samples = chain([placed], self._samples)
                break
            self._add_or_refuse(placed, previous)
        return previous if previous.samples else None

    def _batches_of(
        self,
        buffer: SampleBuffer,
        count: int,
        following: SampleBuffer,
        given_before: int,
    ) -> Iterator[tuple[Any, Mark]]:
        """Yield the batches of a buffer, without the first `given_before`.

        Fills the following buffer in the meantime.

        Args:
            buffer: has the samples.
            count: the agreed number of batches.
            following: the buffer of the next round.
            given_before: number of batches that were given before the run was interrupted.
        """
        batches = batches_of(buffer.lengths, self._stage.max_tokens, count)
        facts = self._facts
        # The key, and so the order, is the same on all ranks: they get batches of similar length at
        # the same time.
        key = f"{facts.seed}/{facts.epoch}/{facts.reader.worker}/{buffer.number}"
        order = permutation(count, key)
        for given, batch_number in enumerate(order, 1):
            batch = buffer.take(batches[batch_number])
            if given > given_before:
                mark = buffer.mark(given)
                if given == count:  # the mark after the last batch is the start of the next round
                    mark = following.mark(0)
                yield self._stage.collate(batch), mark
            # As many samples are read as this buffer has given away. So no batch waits for a whole
            # buffer to be read, and memory never holds two full buffers.
            self._fill(following, min(buffer.gone, self._stage.sort_buffer))

    def _fill(self, buffer: SampleBuffer, size: int) -> None:
        """Read samples until the buffer has received `size` samples, or the epoch ends.

        Refused samples count as received. If all were refused, read on until the buffer has one
        sample, because an empty buffer means the end of the epoch.
        """
        while not self._is_over:
            received = len(buffer.samples) + buffer.refused
            has_only_refused = buffer.refused > 0 and not buffer.samples
            if received >= size and not has_only_refused:
                return
            placed = next(self._samples, _END)
            if placed is _END:
                self._is_over = True
                return
            self._read_until = placed.place + 1
            self._add_or_refuse(placed, buffer)

    def _add_or_refuse(self, placed: Placed, buffer: SampleBuffer) -> None:
        """Add a sample to a buffer, or skip it if it is too long.

        The handler, `on_error`, may also raise an error or end the epoch.
        """
        place, sample = placed
        try:
            length = length_of(sample, self._stage.length(sample), self._stage.max_tokens)
        except SampleError as exn:
            buffer.refuse(place)
            self._refused += 1
            self._is_over = not self._on_error(exn)
        else:
            # An empty sample counts as one token, because it takes a row of a batch, too.
            buffer.add(sample, max(1, length), place)

    def _report(self) -> None:
        """Log how many samples were refused, and how many were repeated."""
        warn_of_refused(self._facts.epoch, self._refused)
        if self._repeated:
            text = "epoch %d: repeated %d samples to make as many batches as other ranks"
            log.warning(text, self._facts.epoch, self._repeated)
