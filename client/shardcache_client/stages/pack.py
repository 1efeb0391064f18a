"""Whole samples packed into blocks of at most `max_tokens`, the same number on every rank.

A reader (a rank, or one of its DataLoader workers) makes its epoch's samples into groups of blocks.
`order.packing` explains the groups, and the number of blocks that ranks agree on. Ranks cannot
deadlock, for the reason that `by_length` gives: a reader agrees on a group once it has read
`window` samples that are in no group yet, or all that are left. This depends on no other rank.

A place is a position in the reader's order of samples; a mark is the reader's position between two
blocks. The samples of a group are a run of places, without the samples that were left out. So a
reader resumes from its own mark alone: it reads on from the first place of the group, packs the
group again, and skips the blocks that it has given. Ranks are at different places, as ranks with
short samples get ahead. So resuming with another number of ranks needs the marks of all ranks.

A rank that has given all of its samples, while others need more blocks, repeats its last sample, in
a block by itself. For this, its mark stays at that sample, which is read again after a resume.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, NotRequired, TypedDict, TypeVar

from shardcache.shared.exceptions import ConfigError, SampleError
from shardcache_client.arguments.values import shown
from shardcache_client.handlers import Handler, for_epoch
from shardcache_client.order.packing import Blocks, cu_seqlens, next_group, positions
from shardcache_client.order.topology import Topology
from shardcache_client.stages.sample_length import length_error, length_of, warn_of_refused
from shardcache_client.stages.stage import Agree, EpochFacts, Mark, Placed

log = logging.getLogger("shardcache")

T = TypeVar("T")

_END = Placed(-1, None)  # stands for the end of the samples

# Number of samples that is assumed to be left of an epoch without a known end. It is more than any
# rank has left, so that no rank waits for this rank.
_UNKNOWN_SAMPLES = 2**40


class Block(TypedDict, Generic[T]):
    """A block of whole samples, one after another.

    The arrays are int32 tensors; numpy arrays in a dataset without torch. Attention kernels for
    sequences of different lengths take them as they are.

    Attributes:
        samples: the samples as the dataset yields them, in the order of the block.
        cu_seqlens: (samples + 1,): offset of each sample's first token in the block, from 0, and
            the offset after the last sample's last token.
        positions: (tokens,): the position of each token in its sample, from 0.
        max_seqlen: number of tokens of the longest sample.
        tokens: (tokens,): the tokens of all samples, as the function `tokens=` of `pack` returns
            them; absent if `pack` was given `length=` instead.
        source: name of the samples' source in a mixture; absent if samples of several sources may
            share a block.
    """

    samples: list[T]
    cu_seqlens: Any
    positions: Any
    max_seqlen: int
    tokens: NotRequired[Any]
    source: NotRequired[str]


class Fitted(NamedTuple):
    """A sample that fits into a block.

    Attributes:
        place: the sample's place in the epoch.
        item: the sample.
        length: number of tokens of the sample, 1 or more.
        tokens: the sample's tokens, an array of this length; None if only the length is known.
        source: the sample's source in a mixture, if only samples of the same source may share a
            block with it; None if all samples may.
    """

    place: int
    item: Any
    length: int
    tokens: Any = None
    source: str | None = None


BlockMaker = Callable[[Sequence[Fitted]], "Block[Any]"]
"""Makes a block of the samples that it is given."""


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
    if samples[0].source is not None:
        block["source"] = samples[0].source
    return block


@dataclass(frozen=True, slots=True)
class Pack:
    """The stage of `ShardReader.pack`, which describes the attributes in full.

    Attributes:
        max_tokens: maximum number of tokens in a block.
        window: number of samples that wait to be packed; those that fit best share a block.
        length: returns the number of tokens of a sample; None if `tokens` is given.
        tokens: returns the tokens of a sample; None if `length` is given.
        on_error: called with the error of a sample that fits into no block.
        block_of: makes a block of samples: of torch's tensors, or of numpy's arrays.
        agreement: returns the function by which a reader agrees with the same worker of all other
            ranks, for one iteration.
        per_source: True if all samples of a block must be of the same source of a mixture.
    """

    max_tokens: int
    window: int
    length: Callable[[Any], Any] | None
    tokens: Callable[[Any], Any] | None
    on_error: Handler
    block_of: BlockMaker
    agreement: Callable[[Topology], Agree]
    per_source: bool = False

    is_in_step = False  # ranks with short samples get ahead of others; see `Stage`

    @property
    def name(self) -> str:
        """Identifier of the way in which samples are grouped; see `Stage`."""
        name = f"pack {self.max_tokens} {self.window}"
        if self.per_source:
            name += " per source"
        return name

    def fitted(self, placed: Placed) -> Fitted:
        """Return a sample with its length. Raises SampleError if it fits into no block."""
        place, item = placed
        tokens = None
        if self.tokens is not None:
            tokens = _array_of(item, self.tokens(item))
            stated_length: Any = len(tokens)
        else:
            assert self.length is not None
            stated_length = self.length(item)

        length = length_of(item, stated_length, self.max_tokens)
        if length < 1:
            remedy = "leave it out by filter(), or let on_error skip it"
            raise length_error(item, f"length {length}, and a block needs tokens", remedy)
        source = None
        if self.per_source:
            source = _source_of(item)
        return Fitted(place, item, length, tokens, source)

    def regrouped(self, samples: Iterator[Placed], facts: EpochFacts) -> Iterator[tuple[Any, Mark]]:
        """Yield each block with the mark after it; see `Stage`.

        Raises any error of the agreement, and ConfigError if this reader has no sample but the same
        worker of another rank has one.
        """
        return iter(_Groups(self, samples, facts, self.agreement(facts.reader)))


def _source_of(item: Any) -> str:
    """Return the name of a sample's source. Raises ConfigError if the sample has none."""
    source = item.get("__source__") if isinstance(item, Mapping) else None
    if not isinstance(source, str):
        raise ConfigError(
            "pack(per_source=True) needs samples with a __source__, as those of a Mixture have",
            remedy="let map() keep __source__; or omit per_source unless the dataset is a Mixture",
        )
    return source


def _array_of(item: Any, tokens: Any) -> Any:
    """Return the tokens of a sample as an array of one dimension.

    Raises SampleError if they are not numbers in one dimension.

    Args:
        item: the sample.
        tokens: what the user's function returned for the sample.
    """
    import numpy

    if not hasattr(tokens, "shape"):
        try:
            tokens = numpy.asarray(tokens)
        except ValueError:  # numpy makes no array of lists of different lengths
            raise _not_an_array(item, tokens) from None
        if tokens.size and tokens.dtype.kind not in "biuf":
            raise _not_an_array(item, tokens)
    if len(tokens.shape) != 1:
        raise _not_an_array(item, tokens)
    return tokens


def _not_an_array(item: Any, tokens: Any) -> SampleError:
    """Return the error for a sample whose tokens cannot be an array of one dimension."""
    flaw = f"tokens that are not numbers in one dimension: {shown(tokens)}"
    return length_error(item, flaw, "let the function return a tensor or array of one dimension")


class _Groups:
    """The blocks of one reader's epoch, or of the rest of it, made group by group. Iterable once.

    Args:
        stage: the options of packing.
        samples: the samples from the start in `facts` on.
        facts: facts about the epoch, and the reader's position at the start.
        agree: agrees with the same worker of all other ranks on the greatest of their numbers.
    """

    def __init__(
        self, stage: Pack, samples: Iterator[Placed], facts: EpochFacts, agree: Agree
    ) -> None:
        self._stage = stage
        self._samples = samples
        self._facts = facts
        self._agree = agree
        self._on_error = for_epoch(stage.on_error)
        self._waiting: list[Fitted] = []  # samples that were read, and are in no group yet
        self._last_given: Fitted | None = None
        self._read_until = facts.start.place  # place of the next sample to be read
        self._is_over = False
        self._refused = 0  # number of samples that were skipped for their lengths
        self._repeated = 0  # number of blocks with a repeated sample

    def __iter__(self) -> Iterator[tuple[Block[Any], Mark]]:
        group = self._facts.start.group
        given_before = self._facts.start.given
        try:
            self._read_sample_to_repeat()
            self._fill_waiting(self._stage.window)
            while blocks := self._next_blocks(group):
                yield from self._blocks_of(group, blocks, given_before)
                group += 1
                given_before = 0
        finally:  # an epoch that is left early is reported as well
            self._report()

    def _read_sample_to_repeat(self) -> None:
        """Read the epoch's last sample again if it was given before the run was interrupted.

        Other ranks may need more blocks: this rank then repeats that sample.
        """
        if not self._facts.start.again:
            return
        self._fill_waiting(1)
        if self._waiting:
            self._last_given = self._waiting.pop()

    def _fill_waiting(self, size: int) -> None:
        """Read samples until `size` samples are waiting for a group, or the epoch ends."""
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

    def _next_blocks(self, group: int) -> Blocks:
        """Return the blocks of a group, each as a list of numbers of waiting samples.

        There are no blocks if no rank has samples left.
        """
        facts = self._facts
        name = f"epoch {facts.epoch}, group {group}"
        sources: Sequence[str | None] = ()
        if self._stage.per_source:
            sources = [sample.source for sample in self._waiting]
        return next_group(
            [sample.length for sample in self._waiting],
            unread=self._unread(),
            max_tokens=self._stage.max_tokens,
            key=f"{facts.seed}/{facts.epoch}/{facts.reader.worker}/{group}",
            greatest=lambda value: self._agree(name, value),
            sources=sources,
        )

    def _unread(self) -> int:
        """Return the number of samples still to be read, or a greater number if it is unknown."""
        if self._is_over:
            return 0
        if self._facts.places is None:
            return _UNKNOWN_SAMPLES
        return self._facts.places - self._read_until

    def _blocks_of(
        self, group: int, blocks: Blocks, given_before: int
    ) -> Iterator[tuple[Block[Any], Mark]]:
        """Yield the blocks of a group, without the first `given_before`.

        Samples of the next group are read while blocks of this group are given.

        Args:
            group: number of the group.
            blocks: each block as a list of numbers of waiting samples; an empty list for a block
                that only other ranks need.
            given_before: number of blocks that were given before the run was interrupted.
        """
        start = self._mark_before(group)
        beyond = start.beyond  # bits of the places whose samples were given; see `Mark`
        samples = self._take_waiting(count=sum(map(len, blocks)))
        samples_left = len(samples)
        for given, numbers in enumerate(blocks, 1):
            samples_left -= len(numbers)
            block_samples = [samples[number] for number in numbers]
            # If other ranks need a block for which this rank has no sample, it repeats one.
            is_repeated = not block_samples
            if is_repeated:
                block_samples = [self._sample_to_repeat()]
            for sample in block_samples:
                beyond |= 1 << (sample.place - start.place)
            if given <= given_before:
                continue

            # As many samples are read as were given, so that no block has to wait until a whole
            # window is read. Before the last block, this also shows whether the epoch has more
            # samples, on which the mark after that block depends.
            self._fill_waiting(self._stage.window - samples_left)
            block = self._stage.block_of(block_samples)
            if is_repeated:
                self._repeated += 1
            if given < len(blocks):
                yield block, Mark(start.place, group, given, beyond, again=start.again)
            else:
                yield block, self._mark_before(group + 1)

    def _take_waiting(self, count: int) -> list[Fitted]:
        """Remove and return the `count` samples that have waited longest."""
        taken = self._waiting[:count]
        del self._waiting[:count]
        if taken:
            self._last_given = taken[-1]
        return taken

    def _sample_to_repeat(self) -> Fitted:
        """Return the last sample given. Raises ConfigError if there is none."""
        if self._last_given is None:
            raise ConfigError(
                "this reader has no sample for a block, but the same worker of another rank does",
                remedy="use fewer workers or ranks, so that each has at least one sample; "
                "or begin the next epoch",
            )
        return self._last_given

    def _mark_before(self, group: int) -> Mark:
        """Return the reader's position before a group."""
        if self._waiting:
            return Mark(self._waiting[0].place, group)
        has_other_ranks = self._facts.reader.world_size > 1
        if self._is_over and has_other_ranks and self._last_given is not None:
            # Other ranks may need more blocks: this rank then repeats its last sample. So the mark
            # is at that sample, which has been given (bit 0 of `beyond`), and is read again.
            return Mark(self._last_given.place, group, given=0, beyond=1, again=1)
        return Mark(self._read_until, group)

    def _report(self) -> None:
        """Log how many samples were refused, and how often one was repeated."""
        warn_of_refused(self._facts.epoch, self._refused)
        if self._repeated:
            text = "epoch %d: repeated a sample %d times, to make as many blocks as other ranks"
            log.warning(text, self._facts.epoch, self._repeated)
