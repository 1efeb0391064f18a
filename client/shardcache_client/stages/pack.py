"""Whole samples packed into blocks of at most `max_tokens`, the same number on every rank.

A reader's epoch goes in groups of blocks; see `order.packing`, which also tells how many blocks ranks agree on. Ranks
cannot deadlock, for the reason that `by_length` gives: a reader agrees on a group when it has `window` samples waiting,
or all that are left, and these depend on no other rank.

The samples of a group are a run of places, without those that were left out. So a reader resumes from its own mark
alone: it reads on from the first place of a group, packs it again, and passes over the blocks that it has given. Ranks
are at different places, as those with short samples get ahead; so it takes the marks of all ranks to resume them.

A rank that has given all of its samples, while others need more blocks, repeats its last one, in a block of its own.
For this, its mark stays at that sample, which is read again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, NotRequired, TypedDict, TypeVar

from shardcache.errors import ConfigError, SampleError
from shardcache_client.handlers import Handler, for_epoch
from shardcache_client.order.packing import Blocks, cu_seqlens, next_group, positions
from shardcache_client.order.rounds import Topology
from shardcache_client.stages.sample_length import length_of, unfit
from shardcache_client.stages.stage import Agree, Mark, Placed, StageRun

log = logging.getLogger("shardcache")

T = TypeVar("T")

_END = Placed(-1, None)

# Of samples whose number nobody knows. More than any rank has left, so that no rank waits for this one.
_MANY = 2**40


class Block(TypedDict, Generic[T]):
    """A block of whole samples, one after another.

    The arrays are int32 tensors; numpy arrays in a dataset without torch. Attention kernels for sequences of different
    lengths take them as they are.

    Attributes:
        samples: in order, as the dataset yields them.
        cu_seqlens: (samples + 1,): where each sample begins in the block, from 0, and where the last one ends.
        positions: (tokens,): the position of each token in its sample, from 0.
        max_seqlen: number of tokens of the longest sample.
        tokens: (tokens,): those of all samples, as `tokens=` of `pack` returns them; absent if it gives lengths.
    """

    samples: list[T]
    cu_seqlens: Any
    positions: Any
    max_seqlen: int
    tokens: NotRequired[Any]


class Fitted(NamedTuple):
    """A sample that fits into a block.

    Attributes:
        place: among those of the epoch.
        length: number of tokens, 1 or more.
        tokens: themselves, an array of this length; None if they are not known.
    """

    place: int
    item: Any
    length: int
    tokens: Any = None


Making = Callable[[Sequence[Fitted]], "Block[Any]"]
"""Makes a block of its samples."""


def numpy_block(samples: Sequence[Fitted]) -> Block[Any]:
    """Return a block of numpy arrays."""
    import numpy

    lengths = [sample.length for sample in samples]
    block: Block[Any] = {
        "samples": [sample.item for sample in samples],
        "cu_seqlens": numpy.asarray(cu_seqlens(lengths)),
        "positions": numpy.asarray(positions(lengths)),
        "max_seqlen": max(lengths),
    }
    if samples[0].tokens is not None:
        block["tokens"] = numpy.concatenate([sample.tokens for sample in samples])
    return block


@dataclass(frozen=True, slots=True)
class Pack:
    """The stage of `ShardReader.pack`, which describes the attributes; `length` or `tokens` is None.

    Attributes:
        block_of: makes a block of its samples.
        agreement: returns how a reader agrees with those of the same worker of all other ranks, for one iteration.
    """

    max_tokens: int
    window: int
    length: Callable[[Any], Any] | None
    tokens: Callable[[Any], Any] | None
    on_error: Handler
    block_of: Making
    agreement: Callable[[Topology], Agree]

    is_in_step = False

    @property
    def name(self) -> str:
        """What its groups depend on; see `Stage`."""
        return f"pack {self.max_tokens} {self.window}"

    def fitted(self, placed: Placed) -> Fitted:
        """Return a sample with its length. Raises SampleError if it fits into no block."""
        place, item = placed
        tokens = None
        if self.tokens is not None:
            tokens = self.tokens(item)
            given: Any = len(tokens)
        else:
            assert self.length is not None
            given = self.length(item)

        length = length_of(item, given, self.max_tokens)
        if length < 1:
            remedy = "leave it out by filter(), or let on_error skip it"
            raise unfit(item, f"length {length}, and a block needs tokens", remedy)
        return Fitted(place, item, length, tokens)

    def regrouped(self, samples: Iterator[Placed], run: StageRun) -> Iterator[tuple[Any, Mark]]:
        """Yield each block with the mark after it; see `Stage`.

        Raises what the agreement raises, and ConfigError if this reader has no sample but others do.
        """
        return iter(_Groups(self, samples, run, self.agreement(run.reader)))


class _Groups:
    """The groups of one reader's epoch, or of its rest. Iterable once."""

    def __init__(self, stage: Pack, samples: Iterator[Placed], run: StageRun, agree: Agree) -> None:
        self._stage = stage
        self._samples = samples
        self._run = run
        self._agree = agree
        self._on_error = for_epoch(stage.on_error)
        self._waiting: list[Fitted] = []
        self._last_given: Fitted | None = None
        self._read_until = run.start.place
        self._is_over = False
        self._refused = 0
        self._repeated = 0

    def __iter__(self) -> Iterator[tuple[Block[Any], Mark]]:
        number = self._run.start.group
        given_before = self._run.start.given
        self._read_again()
        self._read(self._stage.window)
        while blocks := self._next_blocks(number):
            yield from self._group(number, blocks, given_before)
            number += 1
            given_before = 0
        self._report()

    def _read(self, size: int) -> None:
        """Read on until so many samples wait, or the epoch ends."""
        while len(self._waiting) < size and not self._is_over:
            placed = next(self._samples, _END)
            if placed is _END:
                self._is_over = True
                return
            self._read_until = placed.place + 1
            try:
                fitted = self._stage.fitted(placed)
            except SampleError as exn:
                self._refused += 1
                self._is_over = not self._on_error(exn)
            else:
                self._waiting.append(fitted)

    def _read_again(self) -> None:
        """Read the last sample of the epoch, if it was given before the run was interrupted, and may be repeated."""
        if not self._run.start.again:
            return
        self._read(1)
        if self._waiting:
            self._last_given = self._waiting.pop()

    def _next_blocks(self, number: int) -> Blocks:
        """Return the blocks of a group, of waiting samples by number; none if no rank has samples left."""
        run = self._run
        name = f"epoch {run.epoch}, group {number}"
        return next_group(
            [sample.length for sample in self._waiting],
            self._unread(),
            self._stage.max_tokens,
            f"{run.seed}/{run.epoch}/{run.reader.worker}/{number}",
            lambda value: self._agree(name, value),
        )

    def _unread(self) -> int:
        """Return the number of samples that are to be read, if it is known, or more."""
        if self._is_over:
            return 0
        if self._run.places is None:
            return _MANY
        return self._run.places - self._read_until

    def _group(self, number: int, blocks: Blocks, given_before: int) -> Iterator[tuple[Block[Any], Mark]]:
        """Yield the blocks of a group but those given before, while samples of the next one are read."""
        first, _, _, beyond, again = self._mark_before(number)
        samples = self._take(sum(map(len, blocks)))
        left = len(samples)
        for given, block in enumerate(blocks, 1):
            left -= len(block)
            chosen = [samples[at] for at in block] or self._repeatable()
            for sample in chosen:
                beyond |= 1 << sample.place - first
            if given <= given_before:
                continue

            # As many as were given, so that no block waits for a whole window. Before the last block, this shows
            # whether the epoch has more.
            self._read(self._stage.window - left)
            made = self._stage.block_of(chosen)
            self._repeated += not block
            if given < len(blocks):
                yield made, Mark(first, number, given, beyond, again)
            else:
                yield made, self._mark_before(number + 1)

    def _take(self, count: int) -> list[Fitted]:
        taken = self._waiting[:count]
        del self._waiting[:count]
        if taken:
            self._last_given = taken[-1]
        return taken

    def _repeatable(self) -> list[Fitted]:
        """Return the last sample given, for a block of its own."""
        if self._last_given is None:
            raise ConfigError(
                "this reader has no sample for a block, but the same worker of another rank does",
                remedy="give each worker of each rank a sample at least: use fewer of them; or begin the next epoch",
            )
        return [self._last_given]

    def _mark_before(self, number: int) -> Mark:
        """Return where the reader is before a group."""
        if self._waiting:
            return Mark(self._waiting[0].place, number)
        is_alone = self._run.reader.world_size == 1
        if is_alone or not self._is_over or self._last_given is None:
            return Mark(self._read_until, number)
        # Other ranks may need more blocks, for which this one repeats its last sample.
        return Mark(self._last_given.place, number, 0, 1, again=1)

    def _report(self) -> None:
        if self._refused:
            text = "epoch %d: skipped %d samples longer than max_tokens, or of no length, as on_error decided"
            log.warning(text, self._run.epoch, self._refused)
        if self._repeated:
            text = "epoch %d: repeated a sample %d times, to make as many blocks as other ranks"
            log.warning(text, self._run.epoch, self._repeated)
