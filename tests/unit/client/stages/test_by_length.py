"""Batches by length: few and bounded, equal on all ranks, and each once on resuming."""

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardcache.errors import ConfigError, SampleError
from shardcache_client.batches.staged_epoch import StagedEpoch, StagedForm
from shardcache_client.handlers import (
    ignore_and_continue,
    ignore_and_stop,
    reraise,
    warn_and_continue,
)
from shardcache_client.order.dealing.deal import SampleDeal
from shardcache_client.order.topology import Topology
from shardcache_client.position.progress import Progress
from shardcache_client.position.staged_state import Reached, Resume, StagedState, resume_place
from shardcache_client.stages.by_length import ByLength
from shardcache_client.stages.length_batches import batches_of, min_batch_count
from shardcache_client.stages.stage import Agree, Placed
from support.cases import examples, first_quick
from support.programs.guard import GUARD_S
from support.shards.dealt import walk

Batch = list[dict[str, Any]]


class Reader:
    """A reader's epoch, or its rest: batches of `{"__key__": number, "length": ...}`.

    Attributes:
        passed: number of places that were read.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        stage: ByLength,
        reader: Topology,
        start: Resume,
        left_out: Sequence[int] = (),
    ) -> None:
        counts = [len(lengths)]
        deal = SampleDeal(counts, even=None)
        alone = Topology(reader.reader, reader.readers)
        self._numbers = [
            number for _, number in walk(deal.share(0, alone, start.progress.past(None)), counts)
        ]
        self._lengths = lengths
        self._left_out = left_out
        self._epoch = StagedEpoch(
            StagedForm("0" * 16, deal, stage, 7, {}), start, reader, len(self._numbers), None
        )
        self.passed = start.reached.mark.place

    def __iter__(self) -> Iterator[Batch]:
        return self._epoch.items(self._samples())

    def _samples(self) -> Iterator[Placed]:
        for place in range(self.passed, len(self._numbers)):
            self.passed += 1
            number = self._numbers[place]
            if number not in self._left_out:
                yield Placed(place, {"__key__": number, "length": self._lengths[number]})

    def state(self) -> StagedState:
        """Return the state of this reader, as a checkpoint gives it back."""
        state = self._epoch.state(self._epoch.reached, ended=self._epoch.is_read, over=False)
        return StagedState.from_json(json.loads(json.dumps(state.to_json())))


class Table:
    """Agreement of the ranks of one process. A rank that waits in vain raises TimeoutError."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._given: dict[str, dict[int, int]] = {}
        self._changed = threading.Condition()

    def seat(self, reader: Topology) -> Agree:
        """Return one reader's way to agree with the same worker of all ranks."""
        return lambda name, value: self.greatest(
            reader.rank, f"{name}, worker {reader.worker}", value
        )

    def greatest(self, rank: int, name: str, value: int) -> int:
        """Return the greatest value under a name once all ranks have given theirs."""
        with self._changed:
            given = self._given.setdefault(name, {})
            given[rank] = value
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: len(given) == self._world_size, timeout=GUARD_S):
                raise TimeoutError(f"only {sorted(given)} said {name}")
            return max(given.values())


def train(ranks: list[list[Reader]], steps: int | None = None) -> list[list[Batch]]:
    """Return each rank's batches, taken from its readers in turn as a DataLoader does."""
    step = threading.Barrier(len(ranks))

    def rank(readers: list[Reader]) -> list[Batch]:
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


def _in_turn(readers: list[Reader]) -> Iterator[Batch]:
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


def alone(_: Topology) -> Agree:
    """Return how a reader agrees that has no others."""
    return lambda name, value: value


def by_length(agreement: Callable[[Topology], Agree] = alone, **options: Any) -> ByLength:
    """Return the stage with a buffer of ten."""
    chosen: dict[str, Any] = {"sort_buffer": 10, "collate": list, "on_error": reraise} | options
    return ByLength(MAX_TOKENS, length, agreement=agreement, **chosen)


def single(lengths: Sequence[int], states: Sequence[StagedState] = (), **options: Any) -> Reader:
    """Return the only reader of a job, which resumes from states if there are any."""
    ((reader,),) = job(lengths, 1, 1, states, **options)
    return reader


def job(
    lengths: Sequence[int],
    world_size: int,
    workers: int,
    states: Sequence[StagedState] = (),
    left_out: Sequence[int] = (),
    **options: Any,
) -> list[list[Reader]]:
    """Return each rank's readers, which resume from states if there are any."""
    stage = by_length(Table(world_size).seat, **options)

    def reader(rank: int, worker: int) -> Reader:
        topology = Topology(rank, world_size, worker, workers)
        start = Resume(Progress())
        if states:
            start = resume_place(states, topology, counted=True, stage=stage.name)
        return Reader(lengths, stage, topology, start, left_out)

    return [[reader(rank, worker) for worker in range(workers)] for rank in range(world_size)]


def states_of(ranks: list[list[Reader]]) -> list[StagedState]:
    """Return the states of all readers."""
    return [reader.state() for readers in ranks for reader in readers]


def keys(ranks: list[list[Batch]]) -> list[int]:
    """Return the samples of all batches of all ranks, in order of their numbers."""
    return sorted(sample["__key__"] for batches in ranks for batch in batches for sample in batch)


def spread(count: int, longest: int = 30) -> list[int]:
    """Return lengths that fill each job's buffers with different numbers of batches."""
    draw = Random(count)
    return [draw.randint(1, longest) for _ in range(count)]


lengths = st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=80)
numbers_of_readers = st.tuples(st.integers(1, 3), st.integers(1, 2))


@examples(60)
@given(lengths, numbers_of_readers, st.integers(1, 30))
def test_ranks_in_step_get_equally_many_batches_and_each_sample_once(
    lengths: list[int], readers: tuple[int, int], sort_buffer: int
) -> None:
    """Any lengths end all ranks at the same step, with no padded size above the bound."""
    lengths = lengths * readers[0] * readers[1]
    ranks = train(job(lengths, *readers, sort_buffer=sort_buffer))
    assert len({len(batches) for batches in ranks}) == 1
    assert keys(ranks) == list(range(len(lengths)))
    assert all(
        len(batch) * max(map(length, batch)) <= MAX_TOKENS for batches in ranks for batch in batches
    )


@examples(60)
@given(lengths, numbers_of_readers, st.integers(1, 30))
def test_ranks_with_a_sample_more_make_others_repeat_one(
    lengths: list[int], readers: tuple[int, int], sort_buffer: int
) -> None:
    """At most one sample per reader comes twice, and none is lost."""
    assume(len(lengths) >= readers[0] * readers[1])
    ranks = train(job(lengths, *readers, sort_buffer=sort_buffer))
    seen = keys(ranks)
    assert len({len(batches) for batches in ranks}) == 1
    assert set(seen) == set(range(len(lengths)))
    assert len(seen) - len(lengths) <= readers[0] * readers[1]


@examples(100)
@given(lengths, numbers_of_readers, st.integers(1, 12), st.sets(st.integers(0, 80)), st.data())
def test_job_resumes_with_the_very_next_batch(
    lengths: list[int],
    readers: tuple[int, int],
    sort_buffer: int,
    left_out: set[int],
    data: st.DataObject,
) -> None:
    """States behind any step give the same ranks and workers exactly the rest."""
    options: dict[str, Any] = {"sort_buffer": sort_buffer, "left_out": sorted(left_out)}
    try:
        whole = train(job(lengths, *readers, **options))
    except (ConfigError, threading.BrokenBarrierError):
        assume(False)  # a reader has no sample, and the others wait for it in vain
    begun, going_on = stopped(
        job(lengths, *readers, **options), data.draw(st.integers(0, len(whole[0])))
    )
    rest = train(job(lengths, *readers, states_of(going_on), **options))
    for before, after, all_of_them in zip(begun, rest, whole, strict=True):
        assert sorted(map(str, before + after)) == sorted(map(str, all_of_them))
        assert readers[1] > 1 or before + after == all_of_them


@pytest.mark.parametrize("steps", range(8))
def test_rank_whose_samples_have_ended_resumes_with_what_it_repeats(steps: int) -> None:
    """Others have a buffer more, at whose beginning or within which the run is interrupted."""
    sizes = [30, 9, 30, 30] + [30] * 10
    options: dict[str, Any] = {"sort_buffer": 2, "left_out": range(4, 7)}
    whole = train(job(sizes, 2, 1, **options))
    begun, going_on = stopped(job(sizes, 2, 1, **options), steps)
    rest = train(job(sizes, 2, 1, states_of(going_on), **options))
    assert [before + after for before, after in zip(begun, rest, strict=True)] == whole


@pytest.mark.parametrize("rank", first_quick([0, 1]))
def test_the_state_of_one_rank_is_enough_for_all(rank: int) -> None:
    """Each rank goes on from one state, as ranks take batches together."""
    whole = train(job(spread(120), 2, 1))
    for steps in range(len(whole[0]) + 1):
        begun, going_on = stopped(job(spread(120), 2, 1), steps)
        rest = train(job(spread(120), 2, 1, [going_on[rank][0].state()]))
        assert [before + after for before, after in zip(begun, rest, strict=True)] == whole


@pytest.mark.parametrize("rank", first_quick([0, 1]))
def test_rank_without_a_sample_for_the_last_buffer_resumes_from_the_state_of_another(
    rank: int,
) -> None:
    """It repeats a sample that it has given, whichever of the two has one sample more."""
    whole = train(job(spread(121), 2, 1))
    for steps in range(len(whole[0]) + 1):
        begun, going_on = stopped(job(spread(121), 2, 1), steps)
        rest = train(job(spread(121), 2, 1, [going_on[rank][0].state()]))
        assert len({len(batches) for batches in rest}) == 1
        assert set(keys(begun + rest)) == set(range(121))
        # At the very end, the one that has one sample fewer does not know that the other has read
        # its last.
        assert len(keys(begun + rest)) <= 124


@examples(60)
@given(lengths, numbers_of_readers, numbers_of_readers, st.data())
def test_other_readers_see_what_is_left_exactly_once(
    lengths: list[int], readers: tuple[int, int], others: tuple[int, int], data: st.DataObject
) -> None:
    """Other ranks and workers get each sample that was in no batch."""
    assume(readers != others)
    lengths = lengths * readers[0] * readers[1]
    begun, going_on = stopped(job(lengths, *readers), data.draw(st.integers(0, 20)))
    given = keys(begun)
    left = set(range(len(lengths))) - set(given)
    assume(not left or len(left) >= others[0] * others[1])
    rest = keys(train(job(lengths, *others, states_of(going_on))))
    assert set(rest) == left
    assert len(rest) - len(left) <= others[0] * others[1]


def test_other_ranks_repeat_nothing_given_the_state_of_one() -> None:
    """Either they see what is left exactly once, or the error asks for the states of the others."""
    outcomes = set()
    for steps in range(12):
        begun, going_on = stopped(job(spread(120), 2, 1), steps)
        try:
            rest = train(job(spread(120), 1, 1, [going_on[0][0].state()]))
        except ConfigError as exn:
            assert "load the states of all ranks" in str(exn)
            outcomes.add("refused")
        else:
            assert sorted(keys(begun) + keys(rest)) == list(range(120))
            outcomes.add("resumed")
    assert outcomes == {"refused", "resumed"}


def test_batches_of_a_step_are_of_like_length_on_all_ranks() -> None:
    """All ranks use the same permutation, new in every buffer and epoch."""
    ranks = train(job(spread(400), 2, 1, sort_buffer=100))
    longest = [[max(map(length, batch)) for batch in batches] for batches in ranks]
    assert all(abs(one - other) <= 3 for one, other in zip(*longest, strict=True))
    assert longest[0] != sorted(longest[0], reverse=True)
    epochs = []
    for epoch in range(2):
        start = [StagedState("0" * 16, Progress(epoch), 0, 1, 1, Reached())]
        epochs.append([batch[0]["__key__"] for batch in single([5] * 100, start, sort_buffer=50)])
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    assert [key - 50 for key in epochs[0][-5:]] != epochs[0][:5]


@pytest.mark.parametrize("taken", range(4))
def test_run_of_too_long_samples_does_not_end_the_epoch(taken: int) -> None:
    """A run longer than the buffer, at any place, continues behind it after a stop."""
    sizes = [61] * 25 + [40, 41] + [61] * 45 + [42, 43]
    begun = single(sizes, on_error=ignore_and_continue)
    batches = list(islice(begun, taken))
    resumed = single(sizes, [begun.state()], on_error=ignore_and_continue)
    assert keys([batches + list(resumed)]) == [25, 26, 72, 73]


def test_samples_that_are_too_long_go_to_the_handler(caplog: pytest.LogCaptureFixture) -> None:
    """It raises, leaves the sample out and counts it, or ends the epoch, as `on_error` says."""
    sizes = [5, 6, MAX_TOKENS + 1, 7]
    with pytest.raises(SampleError, match="sample 2 has length 61, more than max_tokens=60"):
        list(single(sizes))
    with caplog.at_level(logging.WARNING, "shardcache"):
        assert keys([list(single(sizes, on_error=ignore_and_continue))]) == [0, 1, 3]
    assert "skipped 1 samples longer than max_tokens" in caplog.text
    with pytest.warns(UserWarning, match="more than max_tokens=60") as caught:
        assert keys([list(single([5, *[61] * 8, 7], on_error=warn_and_continue))]) == [0, 9]
    assert len(caught) == 5
    assert "skipped 8 samples longer than max_tokens" in caplog.text
    assert keys([list(single(sizes, on_error=ignore_and_stop))]) == [0, 1]


@pytest.mark.parametrize("absurd", [float("nan"), float("inf"), 2.5, "x", None])
def test_lengths_that_are_no_whole_numbers_go_to_the_handler(absurd: Any) -> None:
    """With the sample's name, before they take part in a comparison."""
    sizes: list[Any] = [5, absurd, 7]
    with pytest.raises(
        SampleError, match=f"sample 1 has length {absurd!r}, which is not a whole number"
    ):
        list(single(sizes))
    assert keys([list(single(sizes, on_error=ignore_and_continue))]) == [0, 2]


def test_lengths_of_numpy_are_whole_numbers() -> None:
    """As a float without a fraction is."""
    sizes: list[Any] = [np.int64(5), 6.0, np.float32(7)]
    assert keys([list(single(sizes))]) == [0, 1, 2]


@pytest.mark.parametrize("long", [range(9), range(20)])
def test_ranks_stay_equal_whatever_is_left_out(
    long: range, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank short of samples for a buffer repeats one and counts it; others lose nothing."""
    sizes = [50] * 60
    for number in long:
        sizes[10 + number] = MAX_TOKENS + 1
    with caplog.at_level(logging.WARNING, "shardcache"):
        ranks = train(job(sizes, 2, 1, on_error=ignore_and_continue))
    assert [len(batches) for batches in ranks] == [30, 30]
    assert set(keys(ranks)) == {number for number in range(60) if sizes[number] == 50}
    assert "samples to make as many batches as other ranks" in caplog.text


def test_rank_without_samples_gets_an_error() -> None:
    """With nothing to repeat there is an error that says what to do, and no batch without any."""
    with pytest.raises(ConfigError, match=r"no sample for a batch.*\n.*use fewer"):
        train(job([9], 2, 1))


def test_samples_that_are_left_out_before_do_not_shift_what_was_given() -> None:
    """They have a place, too: a job of another size repeats and loses nothing."""
    sizes = spread(60)
    left_out = (3, 4, 17, 33)
    begun = single(sizes, left_out=left_out)
    taken = list(islice(begun, 5))
    seen = keys([taken, *train(job(sizes, 1, 2, [begun.state()], left_out=left_out))])
    assert len(seen) == len(set(seen))
    assert set(seen) == set(range(60)) - set(left_out)


def test_a_state_is_small_and_holds_no_sample() -> None:
    """It is a few numbers and a bit for each sample of a buffer, however many were read."""
    reader = single([5] * 1_000)
    for _ in reader:
        state = reader.state()
        assert state.reached.mark.beyond < 2**10
        assert len(json.dumps(state.to_json())) < 300


def test_reading_ahead_ends_at_a_buffer() -> None:
    """The next buffer fills as this one empties, so both never hold more than one does."""
    reader = single(spread(500), sort_buffer=50)
    given_out = 0
    for batch in reader:
        assert reader.passed - given_out <= 50
        given_out += len(batch)


def stopped(ranks: list[list[Reader]], steps: int) -> tuple[list[list[Batch]], list[list[Reader]]]:
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
    first = items[0]
    rest = items[1:]
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
        if all(
            len(group) * max(lengths[number] for number in group) <= max_tokens for group in groups
        )
    )
    assert min_batch_count(lengths, max_tokens) == min(fits)


def test_the_work_is_spread_over_all_batches() -> None:
    """Asked for one batch more than needed, no batch is left full beside a nearly empty one."""
    assert [len(batch) for batch in batches_of([10] * 100, 500, 2)] == [50, 50]
    assert [len(batch) for batch in batches_of([10] * 100, 500, 3)] == [34, 34, 32]
    assert [len(batch) for batch in batches_of([10] * 51, 500, 2)] == [26, 25]
