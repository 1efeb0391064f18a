"""`batch_by_length`: batches of samples of similar length, for speech and text, the same number on every rank.

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

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any, Generic

from torch.utils.data import IterableDataset

from shardcache.errors import ConfigError, SampleError
from shardcache_client.arguments import FUNCTION, SECONDS, Accepts, B_co, T_co, checked, plain, whole
from shardcache_client.dataset import ShardDataset
from shardcache_client.handlers import ANY_HANDLER, Handler, for_epoch, handler_of, reraise
from shardcache_client.order.rounds import Topology, permutation
from shardcache_client.position.state import search
from shardcache_client.ranks.distributed import Agreement, MeetingPlace

log = logging.getLogger("shardcache")

State = dict[str, Any]
Agree = Callable[[str, int], int]
"""Returns the greatest value that any rank passes under a name, once all have passed one."""

_END = object()
_made: Counter[str] = Counter()


def _dataset(value: Any) -> Any:
    """Return anything that has the ranks and positions of a dataset. Raises TypeError."""
    if not all(hasattr(value, name) for name in ("topology", "position", "state_dict")):
        raise TypeError
    return value


@checked(
    dataset=Accepts("a ShardDataset or Mixture", _dataset),
    max_tokens=whole(1),
    length=FUNCTION,
    sort_buffer=whole(1),
    collate=FUNCTION.or_none(),
    on_error=Accepts(ANY_HANDLER, handler_of),
    timeout_s=SECONDS,
)
def batch_by_length(
    dataset: ShardDataset[T_co],
    max_tokens: int,
    length: Callable[[T_co], int],
    *,
    sort_buffer: int = 1_000,
    collate: Callable[[list[T_co]], B_co] | None = None,
    on_error: Handler | str = reraise,
    timeout_s: float = 300.0,
) -> "LengthBatches[B_co]":
    """Batch samples of similar length: little padding, and no batch too large for the accelerator.

        ds = ShardDataset(urls, shuffle=True, decode=tokenize)
        loader = DataLoader(batch_by_length(ds, 16_000, len, collate=pad), batch_size=None, num_workers=8)

    Each worker reads `sort_buffer` samples at a time, sorts them, and cuts them into as few batches as `max_tokens`
    allows, or a few more if another rank needs more: every rank yields the same number of batches, and those of one
    step have similar lengths. The batches of a buffer come in an order shuffled by seed and epoch.

    Each sample comes once, with one exception: if a rank has fewer samples in a buffer than batches to make, the
    shortest is repeated. This happens only if it reads fewer samples than another rank, or many are too long.

    Args:
        dataset: a `ShardDataset` or `Mixture`.
        max_tokens: maximum padded size of a batch: number of samples times length of the longest, in any unit.
        length: returns a sample's length in that unit, always the same for the same sample; random changes of length
            belong in `collate`. A length below 1 counts as 1.
        sort_buffer: number of samples that each worker keeps in memory. Larger buffers mean less padding.
        collate: makes a batch from a list of samples. Default: the list itself.
        on_error: called with the SampleError of a sample that is longer than `max_tokens`, or whose length is not a
            whole number. See `handlers`.
        timeout_s: how long a rank waits for the others to fill their buffers.

    Raises:
        ConfigError: an argument is invalid; or, when iterating, the ranks share no key-value store over which to
            agree, or one of them has no samples at all.
        RankTimeoutError, RanksError: a rank does not answer.
    """
    kind = f"{dataset.seed}/{max_tokens}/{sort_buffer}"
    _made[kind] += 1
    # The same name on all ranks, as they create these objects in the same order.
    agreement = partial(_agreement, f"batches/{kind}/{_made[kind]}", timeout_s, MeetingPlace())
    dataset.read_in_spans()
    return LengthBatches(
        dataset, Recipe(max_tokens, length, sort_buffer, collate or list, handler_of(on_error)), agreement
    )


def _agreement(name: str, timeout_s: float, place: MeetingPlace, reader: Topology) -> Agree:
    """Return the agreement of a reader with the same worker of all other ranks, for one iteration."""
    channel = f"{name}/{reader.worker}of{reader.workers}"
    return Agreement(channel, reader, timeout_s, place).greatest


@dataclass(frozen=True, slots=True)
class Recipe:
    """Parameters of the batches; see `batch_by_length`."""

    max_tokens: int
    length: Callable[[Any], int]
    sort_buffer: int
    collate: Callable[[list[Any]], Any]
    on_error: Handler


class LengthBatches(IterableDataset[B_co], Generic[B_co]):
    """The batches of `batch_by_length`, for use with `DataLoader(..., batch_size=None)`."""

    def __init__(self, dataset: ShardDataset[Any], recipe: Recipe, agreement: Callable[[Topology], Agree]) -> None:
        self._dataset = dataset
        self._recipe = recipe
        self._agreement = agreement
        self._loaded: Any = None
        self._state: State | None = None

    def __repr__(self) -> str:
        return f"LengthBatches({self._dataset!r}, max_tokens={self._recipe.max_tokens})"

    def __len__(self) -> int:
        """Raise TypeError: the number of batches depends on lengths that have not been read yet."""
        raise TypeError("the number of batches by length is unknown until the samples have been read")

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iteration reads, including those in running DataLoader workers."""
        self._dataset.set_epoch(epoch)

    def state_dict(self) -> State:
        """Return the position after the last batch: a few numbers, and no samples.

        It holds the dataset's state at the start of the current buffer, the number of batches yielded from it, and, as
        "beyond" in the dataset's state, one bit per sample of the buffer, set if the sample was in them.
        """
        if self._state is not None:
            return self._state
        reader, epoch = self._dataset.topology(), self._dataset.epoch
        return _find_state(self._loaded, reader, epoch) or SampleBuffer.of(self._dataset, 0).state(reader, epoch)

    def load_state_dict(self, state: Any) -> None:
        """Resume the next iteration from a state, or any structure that contains states, as a StatefulDataLoader's.

        The same ranks and workers read their buffers again and continue with exactly the next batch. With other ranks
        or workers, the states of all ranks resume with exactly those samples that were in no batch yet; the state of
        one rank makes them re-read the other ranks' current buffers from the start, so at most `sort_buffer` samples
        per worker come twice, and none is lost.
        """
        self._dataset.load_state_dict(state)
        self._loaded, self._state = state, None

    def __iter__(self) -> Iterator[B_co]:
        # Not a generator, as StatefulDataLoader requests the state between this call and the first batch.
        rounds = _Rounds(self._dataset, self._recipe, self._agreement(self._dataset.topology()), self._loaded)
        self._state = rounds.state
        return self._follow(rounds)

    def _follow(self, rounds: "_Rounds") -> Iterator[Any]:
        for batch, self._state in rounds:
            yield batch


class _Rounds:
    """One pass over a dataset: pairs of a batch and the state after it. Iterable once.

    Raises what the agreement raises, and ConfigError if this reader has no sample but others do.
    """

    def __init__(self, dataset: ShardDataset[Any], recipe: Recipe, agree: Agree, loaded: Any) -> None:
        self._dataset = dataset
        self._recipe = recipe
        self._agree = agree
        self._reader = dataset.topology()
        self._samples = iter(dataset)
        self._epoch = dataset.epoch  # definite, now that the dataset has begun the epoch
        self._is_over = False
        self._refused = self._repeated = 0
        self._on_error = for_epoch(recipe.on_error)
        state = _find_state(loaded, self._reader, self._epoch) if dataset._resumed else None
        note = state["batch_by_length"] if state else {"round": 0, "given": 0}
        self._skip: int = note["given"]
        self._buffer = SampleBuffer.of(dataset, note["round"])
        self.state = state or self._buffer.state(self._reader, self._epoch)  # before the first batch

    def __iter__(self) -> Iterator[tuple[Any, State]]:
        buffer, before = self._buffer, None
        self._fill(buffer, self._recipe.sort_buffer)
        while True:
            need = fewest(buffer.lengths, self._recipe.max_tokens)
            count = self._agree(f"epoch {self._epoch}, round {buffer.number}", need)
            if not count:
                break
            self._repeated += max(0, count - len(buffer.samples))
            if not buffer.samples:
                buffer.borrow(before)
            following = SampleBuffer.of(self._dataset, buffer.number + 1)
            yield from self._round(buffer, count, following)
            buffer, before = following, buffer
        if self._refused:
            text = "epoch %d: skipped %d samples longer than max_tokens, or of no length, as on_error decided"
            log.warning(text, self._epoch, self._refused)
        if self._repeated:
            text = "epoch %d: repeated %d samples to make as many batches as other ranks"
            log.warning(text, self._epoch, self._repeated)

    def _round(self, buffer: "SampleBuffer", count: int, following: "SampleBuffer") -> Iterator[tuple[Any, State]]:
        made = batches(buffer.lengths, self._recipe.max_tokens, count)
        # The same on all ranks, so that they get batches of similar length at the same time.
        order = permutation(count, f"{self._dataset.seed}/{self._epoch}/{self._reader.worker}/{buffer.number}")
        for given, which in enumerate(order, 1):
            batch = buffer.take(made[which])
            if given > self._skip:
                reached, nth = (buffer, given) if given < count else (following, 0)
                yield self._recipe.collate(batch), reached.state(self._reader, self._epoch, nth)
            # As many as were yielded, so that no batch waits for a whole buffer, and memory never holds two.
            self._fill(following, min(buffer.gone, self._recipe.sort_buffer))
        self._skip = 0

    def _fill(self, buffer: "SampleBuffer", size: int) -> None:
        """Read on until the buffer has received `size` samples, or the dataset ends.

        One that has refused all of them reads on until it has a sample: an empty buffer means the end of the epoch.
        """
        while not self._is_over:
            is_only_refused = buffer.refused > 0 and not buffer.samples
            if len(buffer.samples) + buffer.refused >= size and not is_only_refused:
                return
            sample = next(self._samples, _END)
            if sample is _END:
                self._is_over = True
                return
            position = self._dataset.position - 1
            try:
                length = self._length_of(sample)
            except SampleError as exn:
                buffer.refuse(position)
                self._refused += 1
                self._is_over = not self._on_error(exn)
            else:
                buffer.add(sample, length, position)

    def _length_of(self, sample: Any) -> int:
        """Return the length of a sample. Raises SampleError if it is too long, or not a whole number."""
        given = self._recipe.length(sample)
        fields = sample if isinstance(sample, dict) else {}
        name = f"sample {fields.get('__key__', '')!r}"
        url = fields.get("__url__")
        try:
            length: int = whole().converted(plain(given))
        except (TypeError, ValueError):
            raise SampleError(
                f"{name} has length {given!r}, which is not a whole number",
                url=url,
                remedy="let the function return one",
            ) from None
        if length > self._recipe.max_tokens:
            raise SampleError(
                f"{name} has length {length}, more than max_tokens={self._recipe.max_tokens}",
                url=url,
                remedy="raise max_tokens",
            )
        return max(1, length)


@dataclass(slots=True)
class SampleBuffer:
    """Consecutive samples of one reader."""

    number: int  # number of buffers before this one
    start: State  # the dataset's state before the first sample
    first: int  # the dataset's position before the first sample
    samples: list[Any] = field(default_factory=list)  # None in place of those already yielded
    lengths: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)  # the dataset's at each sample
    refused: int = 0  # number of samples that were too long to be added
    _shortest: int = 0  # the last of the shortest: the one that `batches` repeats
    _passed: int = 0  # bit n: the sample at position `first + n` was yielded or refused

    @classmethod
    def of(cls, dataset: ShardDataset[Any], number: int) -> "SampleBuffer":
        """Return an empty buffer for the dataset's next samples."""
        return cls(number, dataset.state_dict(), dataset.position)

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

    def borrow(self, before: "SampleBuffer | None") -> None:
        """Take over the shortest sample of the previous buffer, to be repeated. Raises ConfigError without one."""
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
        for number in numbers:
            self._pass(self.positions[number])
            if number != self._shortest:
                self.samples[number] = None
        return taken

    @property
    def gone(self) -> int:
        """Number of samples that were yielded or refused."""
        return self._passed.bit_count()

    def _pass(self, position: int) -> None:
        # A position before the first belongs to a repeated sample, read in place of a bad one.
        if position >= self.first:
            self._passed |= 1 << position - self.first

    def state(self, reader: Topology, epoch: int, given: int = 0) -> State:
        """Return the state of a reader that has yielded `given` batches of this buffer.

        Its "beyond" has the bits of the samples yielded or refused, in hexadecimal: bit n for position `first + n`.
        """
        note = {"reader": list(astuple(reader)), "epoch": epoch, "round": self.number, "given": given}
        return {"batch_by_length": note, "dataset": self.start | {"beyond": hex(self._passed) if given else ""}}


def _find_state(states: Any, reader: Topology, epoch: int) -> State | None:
    """Find a reader's state in an epoch anywhere in a structure; return None if ranks or workers were others then.

    If it is missing, the state of the same worker of another rank serves as well, as ranks take their batches in step.
    """
    rank, *others = astuple(reader)
    found = [(state["batch_by_length"], dict(state)) for state in search(states, "batch_by_length")]
    alike = [(note, state) for note, state in found if note["reader"][1:] == others and note["epoch"] == epoch]
    return min(alike, key=lambda each: each[0]["reader"][0] != rank, default=(None, None))[1]


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
