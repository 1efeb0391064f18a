"""Batches by length: few and bounded, equally many on all ranks, each sample once, and no batch twice on resuming."""

import json
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from shardcache.errors import ConfigError, SampleError
from shardcache_client.handlers import ignore_and_continue, ignore_and_stop, reraise, warn_and_continue
from shardcache_client.lengths import Agree, LengthBatches, Recipe, batch_by_length, batches, fewest
from shardcache_client.order.deal import SampleDeal
from shardcache_client.order.rounds import Partition, Topology
from shardcache_client.position.state import Position, ReaderState, find_states, resume
from support.programs.guard import GUARD_S
from support.shards.dealt import Place, walk

Batch = list[dict[str, Any]]


class Numbered(IterableDataset[dict[str, Any]]):
    """Samples `{"__key__": number, "length": ...}` of one shard, dealt and resumed as those of a ShardDataset."""

    seed = 7

    def __init__(self, lengths: Sequence[int], reader: Topology | None = None, *, skipped: Sequence[int] = ()) -> None:
        self._lengths = lengths
        self._reader = reader or Topology()
        self._skipped = skipped
        self._cut = Partition(self._reader.world_size, self._reader.workers, "drop")
        self._loaded: list[ReaderState] = []
        self._resumed = False
        self._place = Position(0)

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration, or of the one that is read."""
        return self._place.epoch

    @property
    def position(self) -> int:
        """Number of samples of the share that were passed."""
        return self._place.taken

    def topology(self) -> Topology:
        """Return which reader this is."""
        return self._reader

    def read_in_spans(self) -> None:
        """Change nothing: each reader has a span."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of every iteration from now on."""
        states = [state for state in self._loaded if state.epoch == epoch]
        self._resumed = bool(states)
        samples = len(self._lengths)
        self._place = resume(states, self._cut, self._reader, samples) if states else Position(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.set_epoch(self.epoch)
        self._loaded = []
        counts = [len(self._lengths)]
        share = SampleDeal(counts, even="drop").share(self.epoch, 0, self._reader, self._place.phases)
        return self._samples(walk(share.behind(self.position), counts))

    def _samples(self, places: Sequence[Place]) -> Iterator[dict[str, Any]]:
        for _, number in places:
            self._place.taken += 1
            if number not in self._skipped:
                self._place.given += 1
                yield {"__key__": number, "length": self._lengths[number]}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this reader."""
        return ReaderState("numbered", self._place, self._cut, reader=self._reader.reader).to_json()

    def load_state_dict(self, state: Any) -> None:
        """Go on from there in the epoch of the state."""
        self._loaded = [each for each in find_states(state) if isinstance(each, ReaderState)]
        self.set_epoch(self._loaded[0].epoch)


class Table:
    """Where the ranks of one process agree. A rank that waits in vain raises TimeoutError."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._given: dict[str, dict[int, int]] = {}
        self._changed = threading.Condition()

    def seat(self, reader: Topology) -> Agree:
        """Return one reader's way to agree with the same worker of all ranks."""
        return lambda name, value: self.greatest(reader.rank, f"{name}, worker {reader.worker}", value)

    def greatest(self, rank: int, name: str, value: int) -> int:
        """Return the greatest value under a name once all ranks have given theirs."""
        with self._changed:
            given = self._given.setdefault(name, {})
            given[rank] = value
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: len(given) == self._world_size, timeout=GUARD_S):
                raise TimeoutError(f"only {sorted(given)} said {name}")
            return max(given.values())


def train(ranks: list[list[LengthBatches]], steps: int | None = None) -> list[list[Batch]]:
    """Return the batches of each rank, which takes them from its readers in turn as a DataLoader does."""
    step = threading.Barrier(len(ranks))

    def rank(readers: list[LengthBatches]) -> list[Batch]:
        taken: list[Batch] = []
        try:
            for batch in islice(_in_turn(readers), steps):
                taken.append(batch)
                step.wait(timeout=GUARD_S)
        except Exception:
            step.abort()
            raise
        return taken

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(rank, ranks))


def _in_turn(readers: list[LengthBatches]) -> Iterator[Batch]:
    going = [iter(reader) for reader in readers]
    while going:
        for each in list(going):
            batch = next(each, None)
            if batch is None:
                going.remove(each)
            else:
                yield batch


MAX_TOKENS = 60


def length(sample: dict[str, Any]) -> int:
    """Return what the sample says."""
    stated: int = sample["length"]
    return stated


def stage(dataset: Numbered, **options: Any) -> LengthBatches:
    """Return batches of a buffer of ten."""
    return batch_by_length(dataset, MAX_TOKENS, length, **({"sort_buffer": 10} | options))


def seated(table: Table, dataset: Numbered, **options: Any) -> LengthBatches:
    """Return the same, for a reader that agrees with others at a table."""
    recipe: dict[str, Any] = {"sort_buffer": 10, "collate": list, "on_error": reraise} | options
    return LengthBatches(dataset, Recipe(MAX_TOKENS, length, **recipe), table.seat)


def job(lengths: list[int], world_size: int, workers: int, **options: Any) -> list[list[LengthBatches]]:
    """Return each rank's readers."""
    table = Table(world_size)
    return [
        [
            seated(table, Numbered(lengths, Topology(rank, world_size, worker, workers)), **options)
            for worker in range(workers)
        ]
        for rank in range(world_size)
    ]


def keys(ranks: list[list[Batch]]) -> list[int]:
    """Return the samples of all batches of all ranks, in order of their numbers."""
    return sorted(sample["__key__"] for batches in ranks for batch in batches for sample in batch)


def spread(count: int, longest: int = 30) -> list[int]:
    """Return lengths of which each job of this file makes buffers that need different numbers of batches."""
    draw = Random(count)
    return [draw.randint(1, longest) for _ in range(count)]


lengths = st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=80)
numbers_of_readers = st.tuples(st.integers(1, 3), st.integers(1, 2))


@settings(deadline=None, max_examples=60)
@given(lengths, numbers_of_readers, st.integers(1, 30))
def test_ranks_in_step_get_equally_many_batches_and_each_sample_once(
    lengths: list[int], readers: tuple[int, int], sort_buffer: int
) -> None:
    """Whatever the lengths, no rank waits in vain, all end at the same step, and no padded size is above the bound."""
    ranks = train(job(lengths, *readers, sort_buffer=sort_buffer))
    seen = keys(ranks)
    assert len({len(batches) for batches in ranks}) == 1
    assert len(seen) == len(set(seen)) == len(lengths) - len(lengths) % readers[0]
    assert all(len(batch) * max(map(length, batch)) <= MAX_TOKENS for batches in ranks for batch in batches)


@settings(deadline=None, max_examples=60)
@given(lengths, numbers_of_readers, st.data())
def test_job_resumes_with_the_very_next_batch(
    lengths: list[int], readers: tuple[int, int], data: st.DataObject
) -> None:
    """From the states behind any step the same ranks and workers get exactly the batches that were left."""
    whole = train(job(lengths, *readers))
    begun, going_on = stopped(job(lengths, *readers), data.draw(st.integers(0, len(whole[0]))))
    states = [[reader.state_dict() for reader in rank] for rank in going_on]
    resumed = job(lengths, *readers)
    for rank, theirs in zip(resumed, states, strict=True):
        for reader, state in zip(rank, theirs, strict=True):
            reader.load_state_dict(state)
    rest = train(resumed)
    for before, after, all_of_them in zip(begun, rest, whole, strict=True):
        assert sorted(map(str, before + after)) == sorted(map(str, all_of_them))
        assert readers[1] > 1 or before + after == all_of_them


def test_the_state_of_one_rank_is_enough_for_all() -> None:
    """Ranks take their batches together, so from the state of rank 0 alone each goes on with its own next batch."""
    whole = train(job(spread(120), 2, 1))
    begun, ((first,), _) = stopped(job(spread(120), 2, 1), 7)
    resumed = job(spread(120), 2, 1)
    for (reader,) in resumed:
        reader.load_state_dict(first.state_dict())
    assert [before + after for before, after in zip(begun, train(resumed), strict=True)] == whole


@settings(deadline=None, max_examples=60)
@given(lengths, numbers_of_readers, numbers_of_readers, st.data())
def test_other_readers_see_what_is_left_exactly_once(
    lengths: list[int], readers: tuple[int, int], others: tuple[int, int], data: st.DataObject
) -> None:
    """With other numbers of ranks and workers, each sample that was in no batch comes once, buffers begun included."""
    lengths = lengths * readers[0] * readers[1]
    begun, going_on = stopped(job(lengths, *readers), data.draw(st.integers(0, 20)))
    states = [[reader.state_dict() for reader in rank] for rank in going_on]
    resumed = job(lengths, *others)
    for rank in resumed:
        for reader in rank:
            reader.load_state_dict({"checkpoint": states})
    rest = train(resumed)
    left = len(lengths) - len(keys(begun))
    seen = keys(begun + rest)
    assert len(seen) == len(set(seen))
    left_over = 0 if others == readers else left % others[0]  # what does not divide is dropped
    assert len(keys(rest)) == left - left_over


def test_batches_of_a_step_are_of_like_length_on_all_ranks() -> None:
    """The order is shuffled, by the same permutation everywhere, and another in every buffer and epoch."""
    ranks = train(job(spread(400), 2, 1, sort_buffer=100))
    longest = [[max(map(length, batch)) for batch in batches] for batches in ranks]
    assert all(abs(one - other) <= 3 for one, other in zip(*longest, strict=True))
    assert longest[0] != sorted(longest[0], reverse=True)
    (alone,) = job([5] * 100, 1, 1, sort_buffer=50)
    epochs = []
    for epoch in range(2):
        alone[0].set_epoch(epoch)
        epochs.append([batch[0]["__key__"] for batch in alone[0]])
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    assert [key - 50 for key in epochs[0][-5:]] != epochs[0][:5]


@pytest.mark.parametrize("taken", range(4))
def test_run_of_too_long_samples_does_not_end_the_epoch(taken: int) -> None:
    """Longer than the buffer, at the start or later; and a run that was stopped continues behind it."""
    sizes = [61] * 25 + [40, 41] + [61] * 45 + [42, 43]
    options: dict[str, Any] = {"on_error": ignore_and_continue}
    begun = stage(Numbered(sizes), **options)
    batches = list(islice(begun, taken))
    resumed = stage(Numbered(sizes), **options)
    resumed.load_state_dict(begun.state_dict())
    assert keys([batches + list(resumed)]) == [25, 26, 72, 73]


def test_samples_that_are_too_long_go_to_the_handler(caplog: pytest.LogCaptureFixture) -> None:
    """It raises and names the sample, or is left out and counted, or ends the epoch, as `on_error` says."""
    sizes = [5, 6, MAX_TOKENS + 1, 7]
    with pytest.raises(SampleError, match="sample 2 has length 61, more than max_tokens=60"):
        list(stage(Numbered(sizes)))
    with caplog.at_level(logging.WARNING, "shardcache"):
        assert keys([list(stage(Numbered(sizes), on_error=ignore_and_continue))]) == [0, 1, 3]
    assert "skipped 1 samples longer than max_tokens" in caplog.text
    with pytest.warns(UserWarning, match="more than max_tokens=60") as caught:
        assert keys([list(stage(Numbered([5, *[61] * 8, 7]), on_error=warn_and_continue))]) == [0, 9]
    assert len(caught) == 5
    assert "skipped 8 samples longer than max_tokens" in caplog.text
    assert keys([list(stage(Numbered(sizes), on_error=ignore_and_stop))]) == [0, 1]


@pytest.mark.parametrize("absurd", [float("nan"), float("inf"), 2.5, "x", None])
def test_lengths_that_are_no_whole_numbers_go_to_the_handler(absurd: Any) -> None:
    """With the sample's name, before they take part in a comparison."""
    sizes: list[Any] = [5, absurd, 7]
    with pytest.raises(SampleError, match=f"sample 1 has length {absurd!r}, which is not a whole number"):
        list(stage(Numbered(sizes)))
    assert keys([list(stage(Numbered(sizes), on_error=ignore_and_continue))]) == [0, 2]


def test_lengths_of_numpy_are_whole_numbers() -> None:
    """As a float without a fraction is."""
    sizes: list[Any] = [np.int64(5), 6.0, np.float32(7)]
    assert keys([list(stage(Numbered(sizes)))]) == [0, 1, 2]


@pytest.mark.parametrize("long", [range(9), range(20)])
def test_ranks_stay_equal_whatever_is_left_out(long: range, caplog: pytest.LogCaptureFixture) -> None:
    """A rank with hardly a sample, or none, for a buffer repeats one, and says how many; the others lose nothing."""
    sizes = [50] * 60
    for number in long:
        sizes[10 + number] = MAX_TOKENS + 1
    with caplog.at_level(logging.WARNING, "shardcache"):
        ranks = train(job(sizes, 2, 1, on_error=ignore_and_continue))
    assert [len(batches) for batches in ranks] == [30, 30]
    assert set(keys(ranks)) == {number for number in range(60) if sizes[number] == 50}
    assert "samples to make as many batches as other ranks" in caplog.text


def test_rank_without_samples_gets_an_error() -> None:
    """With nothing to repeat there is an error that says how to deal samples, and no batch without any."""
    table = Table(2)
    none, some = Numbered([], Topology(0, 2)), Numbered([9] * 60, Topology(1, 2))
    with pytest.raises(ConfigError, match=r"no sample for a batch.*\n.*even='pad'"):
        train([[seated(table, none)], [seated(table, some)]])


def test_skipped_samples_do_not_shift_what_was_given() -> None:
    """Samples that the dataset itself skips have a position, too: a job of another size repeats and loses nothing."""
    sizes, broken = spread(60), (3, 4, 17, 33)
    begun, state = [], {}
    reader = stage(Numbered(sizes, skipped=broken))
    for number, batch in enumerate(reader):
        begun.append(batch)
        state = reader.state_dict()
        if number == 4:
            break
    ranks = [[stage(Numbered(sizes, Topology(0, 1, worker, 2), skipped=broken)) for worker in range(2)]]
    for other in ranks[0]:
        other.load_state_dict(state)
    seen = keys([begun, *train(ranks)])
    assert len(seen) == len(set(seen))
    assert set(seen) == set(range(60)) - set(broken)


def test_another_epoch_than_the_states_starts_over() -> None:
    """A state says nothing about the epochs behind it, and is used up by the iteration that goes on from it."""
    begun, ((reader,),) = stopped(job(spread(40), 1, 1), 5)
    again = stage(Numbered(spread(40)))
    again.load_state_dict(reader.state_dict())
    again.set_epoch(1)
    assert keys([list(again)]) == list(range(40))
    again = stage(Numbered(spread(40)))
    again.load_state_dict(reader.state_dict())
    assert keys([*begun, list(again)]) == list(range(40))
    assert keys([list(again)]) == list(range(40))  # of the same epoch, which is read again
    again.set_epoch(1)
    assert keys([list(again)]) == list(range(40))


def test_a_state_is_small_and_holds_no_sample() -> None:
    """It is a few numbers and a bit for each sample of a buffer, however many were read."""
    reader = stage(Numbered([5] * 1_000))
    for _ in reader:
        state = reader.state_dict()
        assert set(state["batch_by_length"]) == {"reader", "epoch", "round", "given"}
        assert int(state["dataset"]["beyond"] or "0", 16) < 2**10
        assert len(json.dumps(state)) < 1_000


def test_reading_ahead_ends_at_a_buffer() -> None:
    """Memory is bounded: the next buffer fills as this one empties, so both together never hold more than one does."""
    dataset = Numbered(spread(500))
    given_out = 0
    for batch in stage(dataset, sort_buffer=50):
        assert dataset.position - given_out <= 50
        given_out += len(batch)


def stopped(ranks: list[list[LengthBatches]], steps: int) -> tuple[list[list[Batch]], list[list[LengthBatches]]]:
    """Train for some steps; return the batches, and the readers as they then are."""
    return (train(ranks, steps) if steps else [[] for _ in ranks]), ranks


@st.composite
def buffers(draw: st.DrawFn, max_size: int = 60) -> tuple[list[int], int]:
    """Lengths, and a bound that the longest of them keeps to."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=max_size))
    return lengths, draw(st.integers(max(lengths), 200))


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Yield all ways to part items into groups."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for partition in partitions(rest):
        yield [[first], *partition]
        for at, group in enumerate(partition):
            yield [*partition[:at], [first, *group], *partition[at + 1 :]]


@given(buffers(max_size=7))
def test_batches_are_as_few_as_any_shape_allows(buffer: tuple[list[int], int]) -> None:
    """An exhaustive search over all groupings finds no fewer batches within the bound."""
    lengths, max_tokens = buffer
    fits = (
        len(groups)
        for groups in partitions(list(range(len(lengths))))
        if all(len(group) * max(lengths[number] for number in group) <= max_tokens for group in groups)
    )
    assert fewest(lengths, max_tokens) == min(fits)


def test_the_work_is_spread_over_all_batches() -> None:
    """Asked for one batch more than needed, no batch is left full beside a nearly empty one."""
    assert [len(batch) for batch in batches([10] * 100, 500, 2)] == [50, 50]
    assert [len(batch) for batch in batches([10] * 100, 500, 3)] == [34, 34, 32]
    assert [len(batch) for batch in batches([10] * 51, 500, 2)] == [26, 25]


def test_refused_state_leaves_the_epoch_whole() -> None:
    """If the dataset does not take a state, no batches are skipped on its account."""
    _, ((reader,),) = stopped(job(spread(40), 1, 1), 5)
    again = stage(Numbered(spread(40)))
    with pytest.raises(ConfigError, match="no state"):
        again.load_state_dict(reader.state_dict() | {"dataset": {}})
    assert keys([list(again)]) == list(range(40))
