"""staged_state.py: states of readers without sample numbers pass JSON and resume all."""

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import ConfigError
from shardcache_client.order.dealing.deal import SampleDeal
from shardcache_client.order.sequences.permutations import Shuffle
from shardcache_client.order.topology import Topology
from shardcache_client.order.uncounted import StepPlace
from shardcache_client.position.progress import BatchPhase, Progress
from shardcache_client.position.rank_state import RankState
from shardcache_client.position.staged_state import (
    Reached,
    Resume,
    StagedState,
    as_progress,
    have_ended,
    resume_place,
)
from shardcache_client.stages.stage import Mark
from support.cases import examples
from support.shards.dealt import walk

DATASET = "0123456789abcdef"

numbers = st.integers(0, 2**40)
phases = st.integers(1, 5).flatmap(
    lambda ranks: st.builds(
        BatchPhase,
        st.just(ranks),
        st.just(1),
        st.tuples(*[numbers] * ranks),
        st.just(()) | st.tuples(*[st.sampled_from(["", "1", "ff0"])] * ranks),
    )
)
marks = st.builds(
    Mark, numbers, numbers, st.integers(1, 99), numbers, st.integers(0, 9)
) | numbers.map(Mark)


@st.composite
def states(draw: st.DrawFn) -> StagedState:
    """A state of any reader, of samples that are counted or not."""
    workers = draw(st.integers(1, 4))
    readers = workers * draw(st.integers(1, 8))
    counted = draw(st.booleans())
    step = StepPlace() if counted else draw(st.builds(StepPlace, numbers, numbers, numbers))
    return StagedState(
        DATASET,
        Progress(draw(numbers), tuple(draw(st.lists(phases, max_size=3)))),
        draw(st.integers(0, readers - 1)),
        readers,
        workers,
        Reached(draw(marks), draw(numbers), step),
        counted=counted,
        over=draw(st.booleans()),
        ended=draw(st.booleans()),
        in_step=draw(st.booleans()),
        seeds=draw(st.dictionaries(st.text(max_size=3), numbers, max_size=2)),
    )


@given(states())
def test_a_state_goes_through_json(state: StagedState) -> None:
    """As through any checkpoint: equal after it, whatever the numbers."""
    assert StagedState.from_json(json.loads(json.dumps(state.to_json()))) == state


def state_of(
    reader: int, place: int = 0, readers: int = 4, workers: int = 2, **fields: Any
) -> StagedState:
    """Return the state of one reader at a place."""
    return replace(
        StagedState(DATASET, Progress(3), reader, readers, workers, Reached(Mark(place))), **fields
    )


def test_a_state_is_small() -> None:
    """Below 300 bytes, in the middle of a group of 200 samples."""
    mark = Mark(1_000_000, group=5_000, given=17, beyond=(1 << 200) - 1)
    state = state_of(63, readers=64, workers=1, reached=Reached(mark))
    assert len(json.dumps(state.to_json())) < 300


@pytest.mark.parametrize(
    "change",
    [
        {"shardcache": 2},
        {"epoch": "three"},
        {"phases": 5},
        {"phases": [[2, 1, [1, 1], ["-1", ""]]]},
        {"phases": [[2, 1, [1, 1], ["1_0", ""]]]},
        {"phases": [[2, 1, [1, 1], [""]]]},
        {"reader": [4, 4, 2]},
        {"reader": [0, 4, 3]},
        {"reader": [0, 4]},
        {"place": -1},
        {"place": None},
        {"items": True},
        {"group": [1, 1]},
        {"group": [1, 1, "-1"]},
        {"step": [1, 2]},
        {"over": 1},
        {"stage": 5},
        {"seeds": {"": "5"}},
    ],
    ids=str,
)
def test_invalid_states_are_refused(change: dict[str, Any]) -> None:
    """Another format, damage, or a state that no reader wrote is an error that says so."""
    with pytest.raises(ConfigError, match="the state"):
        StagedState.from_json(state_of(0).to_json() | change)


def test_readers_go_on_where_they_were() -> None:
    """Each by its own state, in the middle of a group, and within a step of uncounted shards."""
    crew = [
        state_of(
            reader,
            counted=False,
            reached=Reached(Mark(10 * reader, 2, 1, 5), reader, StepPlace(0, reader, reader)),
        )
        for reader in range(4)
    ]
    for state in crew:
        reader = Topology(state.reader // 2, 2, state.reader % 2, 2)
        assert resume_place(crew, reader, counted=False) == Resume(Progress(3), state.reached)


def test_ranks_that_are_in_step_need_one_rank_s_states_alone() -> None:
    """The last sample before those given out of order may repeat, so it is read again."""
    mark = Mark(20, group=2, given=3, beyond=7)
    crew = [state_of(worker, reached=Reached(mark), in_step=True) for worker in range(2)]
    assert resume_place(crew, Topology(1, 2, 1, 2), counted=True).reached.mark == Mark(
        19, 2, 3, beyond=1, again=1
    )


def test_ranks_between_two_groups_are_divided_anew_by_one_rank_s_states_alone() -> None:
    """All samples before the place were given, and none after it."""
    crew = [
        state_of(worker, reached=Reached(Mark(20, group=2)), in_step=True) for worker in range(2)
    ]
    (phase,) = resume_place(crew, Topology(0, 3), counted=True).progress.phases
    assert phase == BatchPhase(4, 1, (20, 20, 19, 19), ("", "", "1", "1"))


@pytest.mark.parametrize(
    ("topology", "stage"), [(Topology(0, 3), ""), (Topology(1, 2, 1, 2), "another")]
)
def test_ranks_within_a_group_are_not_divided_anew_by_one_rank_s_states_alone(
    topology: Topology, stage: str
) -> None:
    """Samples given by the others would come again, so the error says what to load."""
    mark = Mark(20, group=2, given=3, beyond=7)
    crew = [state_of(worker, reached=Reached(mark), in_step=True) for worker in range(2)]
    with pytest.raises(ConfigError, match="load the states of all ranks"):
        resume_place(crew, topology, counted=True, stage=stage)


def test_another_stage_makes_other_groups() -> None:
    """A new group omits what was given and begins at the first place that was not."""
    between = [
        state_of(reader, reached=Reached(Mark(20 + reader, group=2)), stage="pack 8")
        for reader in range(4)
    ]
    assert resume_place(between, Topology(0, 2, 1, 2), counted=True, stage="").reached.mark == Mark(
        21
    )
    within = [
        state_of(reader, reached=Reached(Mark(20, 2, 1, 5)), stage="pack 8") for reader in range(4)
    ]
    found = resume_place(within, Topology(0, 2, 1, 2), counted=True, stage="pack 16")
    assert found == Resume(Progress(3, (BatchPhase(4, 1, (20,) * 4, ("5",) * 4),)))


@pytest.mark.parametrize("topology", [Topology(1, 2, 0, 2), Topology(0, 3)])
def test_a_missing_state_of_others_is_refused(topology: Topology) -> None:
    """Nobody knows how far they are, and the error says what to load."""
    with pytest.raises(ConfigError, match="load the states of all ranks"):
        resume_place([state_of(0, 7), state_of(1, 5)], topology, counted=True)


def test_uncounted_shards_stay_with_their_readers() -> None:
    """Nobody knows what is left of them for others."""
    crew = [state_of(reader, counted=False) for reader in range(4)]
    with pytest.raises(ConfigError, match=r"the same ranks[\s\S]*shardcache index"):
        resume_place(crew, Topology(), counted=False)


def test_as_many_readers_of_other_ranks_divide_the_rest_anew() -> None:
    """Two ranks of one worker are not the two workers of one rank."""
    crew = [state_of(reader, 5 + reader, readers=2, workers=2) for reader in range(2)]
    found = resume_place(crew, Topology(0, 2), counted=True)
    assert found == Resume(Progress(3, (BatchPhase(2, 1, (5, 6)),)))


def test_state_of_a_rank_that_counts_batches_is_a_place() -> None:
    """A filter may be added in the middle of an epoch."""
    saved = [RankState(DATASET, Progress(3).after(2, 4, 5))]
    assert resume_place(saved, Topology(1, 2), counted=True).reached.mark == Mark(20)
    assert resume_place(saved, Topology(), counted=True) == Resume(saved[0].progress)


def test_an_epoch_has_ended_if_all_its_readers_have() -> None:
    """Of one that is missing, nobody knows."""
    crew = [state_of(reader, ended=True) for reader in range(4)]
    assert have_ended(crew)
    assert not have_ended(crew[:3])
    assert not have_ended([*crew[:3], state_of(3)])


@st.composite
def moments(draw: st.DrawFn) -> list[tuple[int, int, list[Mark]]]:
    """Jobs of ranks and workers, and the progress of each reader, with places beyond it."""
    jobs = []
    for _ in range(draw(st.integers(1, 4))):
        ranks = draw(st.integers(1, 4))
        workers = draw(st.integers(1, 3))
        each = st.builds(
            Mark, st.integers(0, 12), st.just(0), st.just(0), st.integers(0, 31), st.just(0)
        )
        jobs.append(
            (
                ranks,
                workers,
                draw(st.lists(each, min_size=ranks * workers, max_size=ranks * workers)),
            )
        )
    return jobs


@pytest.mark.slow
@examples(100)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=8).filter(any), moments())
def test_each_sample_comes_once_whoever_resumes(
    counts: list[int], jobs: list[tuple[int, int, list[Mark]]]
) -> None:
    """Again and again, by other numbers of ranks and workers, from the states of all."""
    deal = SampleDeal(counts, Shuffle(1, 3), even=None)
    read: Counter[tuple[int, int]] = Counter()
    saved: list[StagedState] = []
    for ranks, workers, marks in jobs:
        following = []
        for number in range(ranks * workers):
            reader = Topology(number // workers, ranks, number % workers, workers)
            start = resume_place(saved, reader, counted=True) if saved else Resume(Progress(3))
            places = share_of(deal, counts, start.progress, reader)
            first = start.reached.mark
            mark = Mark(
                min(len(places), first.place + marks[number].place), 0, 1, marks[number].beyond
            )
            if first.beyond:  # a stage makes the group again, and gives what it has not given of it
                mark = first
            left = [place for nth, place in enumerate(places) if not has(first, nth)]
            passed = [place for nth, place in enumerate(places) if has(mark, nth)]
            read.update(place for place in passed if place in left)
            following.append(
                StagedState(
                    DATASET, start.progress, number, ranks * workers, workers, Reached(mark)
                )
            )
        saved = following
    progress = as_progress(saved)
    for rank in range(2):
        read.update(share_of(deal, counts, progress, Topology(rank, 2)))
    every = [(shard, number) for shard, count in enumerate(counts) for number in range(count)]
    assert read == Counter(every)


def share_of(
    deal: SampleDeal, counts: list[int], progress: Progress, reader: Topology
) -> list[tuple[int, int]]:
    """Return what a reader has of an epoch, or of its rest."""
    alone = Topology(reader.reader, reader.readers)
    return walk(deal.share(3, alone, progress.past(None)), counts)


def has(mark: Mark, place: int) -> bool:
    """Return True if a place was passed."""
    if place < mark.place:
        return True
    return bool(mark.beyond >> place - mark.place & 1)
