"""state.py: a few numbers that go through JSON, are found in any checkpoint, and say where everybody goes on."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardcache.errors import ConfigError
from shardcache_client.order.deal import SampleDeal
from shardcache_client.order.rounds import Even, Partition, Phase, Shuffle, Topology
from shardcache_client.position.state import Position, ReaderState, find_states, resume
from support.shards.dealt import crew, taken_in_turns, walk

numbers = st.integers(0, 2**40)
cuts = st.builds(
    Partition,
    st.integers(1, 64),
    st.integers(1, 16),
    st.sampled_from(["pad", "drop", None]),
    batch_size=st.integers(1, 512),
)
phases = cuts.flatmap(lambda cut: st.builds(Phase, st.just(cut), st.tuples(*[numbers] * cut.workers), st.just(())))
states = st.builds(
    ReaderState,
    dataset=st.text("0123456789abcdef", min_size=16, max_size=16),
    position=st.builds(
        lambda epoch, phases, time, nth, before, given, step: Position(
            epoch, phases, time, before + nth, given, step, before
        ),
        numbers,
        st.lists(phases, max_size=3).map(tuple),
        *[numbers] * 5,
    ),
    cut=cuts,
    counted=st.booleans(),
    reader=st.integers(0, 1023),
)
TWO_BY_TWO = Partition(2, 2, batch_size=4)
SAMPLES = 100


def state_of(reader: int, cut: Partition = TWO_BY_TWO, **fields: Any) -> ReaderState:
    """Return the state of one reader of a job."""
    where = {name: fields.pop(name) for name in Position.__dataclass_fields__ if name in fields}
    position = fields.pop("position", Position(**{"epoch": 3} | where))
    return ReaderState(**{"dataset": "train", "position": position, "cut": cut, "reader": reader} | fields)


def saved_loader(*states: ReaderState, steps_since_snapshot: int = 0) -> dict[str, Any]:
    """Return what a StatefulDataLoader (torchdata 0.11) with one worker for each state saves."""
    workers = {
        f"worker_{number}": {
            "worker_id": number,
            "dataset_state": state.to_json(),
            "fetcher_state": {"fetcher_ended": False, "dataset_iter_state": None},
        }
        for number, state in enumerate(states)
    }
    return {
        "_snapshot": {
            "_snapshot_step": 5,
            "_last_yielded_worker_id": 0,
            "_main_snapshot": {"_num_workers": len(states), "_sampler_iter_state": None, "_base_seed": 2**60},
            "_worker_snapshots": workers,
        },
        "_steps_since_snapshot": steps_since_snapshot,
        "_iterator_finished": False,
    }


@settings(max_examples=50)
@given(states)
def test_a_state_goes_through_json(state: ReaderState) -> None:
    """As through any checkpoint: equal after it, whatever the numbers."""
    assert ReaderState.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_a_state_is_small() -> None:
    """Of a reader of a job that has been cut anew four times, the last time from a thousand readers."""
    phases = (Phase(TWO_BY_TWO, (10_000,) * 4),) * 3
    assert len(json.dumps(state_of(1023, Partition(64, 16), phases=phases).to_json())) < 1_000


@pytest.mark.parametrize(
    "change",
    [
        {"shardcache": 1},
        {"cut": {"world_size": 2}},
        {"cut": None},
        {"epoch": "three"},
        {"place": {"nowhere": 1}},
        {"phases": [{}]},
        {"phases": 5},
        *(
            {"phases": [asdict(Phase(TWO_BY_TWO, (1, 1), beyond))]}
            for beyond in [("-1",) * 4, ("0x",) * 4, ("1_0",) * 4, ("1",) * 2, ("1",) * 5]
        ),
    ],
    ids=str,
)
def test_invalid_states_are_refused(change: dict[str, Any]) -> None:
    """One of another format, or one that was damaged, is an error that says so; as is a phase that no reader wrote."""
    with pytest.raises(ConfigError, match="the state"):
        ReaderState.from_json(state_of(0).to_json() | change)


def test_a_state_that_lacks_something_is_refused() -> None:
    """Each of its parts is needed, but for `over`, which older states lack."""
    whole = state_of(0).to_json()
    assert whole.pop("over") is False
    assert ReaderState.from_json(whole) == state_of(0)
    for name in whole:
        with pytest.raises(ConfigError, match="the state"):
            ReaderState.from_json({other: value for other, value in whole.items() if other != name})


def test_states_are_found_wherever_they_lie() -> None:
    """By themselves, in a loader's state, in those of several ranks, and in a whole checkpoint."""
    crew = [state_of(reader) for reader in range(4)]
    checkpoint = {"model": {"weight": "..."}, "loaders": [saved_loader(*crew[:2]), saved_loader(*crew[2:])], "step": 7}
    assert find_states(crew[1].to_json()) == crew[1:2]
    assert find_states(saved_loader(*crew[:2])) == crew[:2]
    assert find_states(checkpoint) == crew
    assert find_states(json.loads(json.dumps(checkpoint))) == crew


def test_nothing_found_is_an_error() -> None:
    """Rather than an epoch from its beginning."""
    for nothing in ({}, [], {"model": "shardcache"}, None, "shardcache"):
        with pytest.raises(ConfigError, match="no state"):
            find_states(nothing)


@pytest.mark.parametrize(
    "other", [{"position": Position(4)}, {"cut": Partition(3, 1)}, {"counted": False}, {"dataset": "validation"}]
)
def test_states_of_several_moments_are_refused(other: dict[str, Any]) -> None:
    """Nobody could say what is left of the epoch."""
    with pytest.raises(ConfigError, match="not from one moment"):
        find_states([state_of(0).to_json(), replace(state_of(1), **other).to_json()])


def test_a_snapshot_of_an_earlier_moment_is_refused() -> None:
    """A loader that saves only every few steps leaves out what came since; that would be read twice."""
    with pytest.raises(ConfigError, match="snapshot_every_n_steps") as caught:
        find_states([saved_loader(state_of(0), steps_since_snapshot=2)])
    assert "older" in caught.value.message


def test_a_worker_whose_state_is_missing() -> None:
    """Without it nobody knows what is left, and the error says what to load."""
    with pytest.raises(ConfigError, match=r"worker 1[\s\S]*whole state"):
        resume([state_of(0), state_of(2)], Partition(3, 1), Topology(0, 3), SAMPLES)


@pytest.mark.parametrize(
    ("topology", "said"),
    [(Topology(0, 1), r"same ranks and workers[\s\S]*shardcache index"), (Topology(1, 2, 1, 2), "states of all ranks")],
)
def test_shards_that_were_not_counted_stay_with_their_readers(topology: Topology, said: str) -> None:
    """One dataset's progress says nothing about another's, nor about how to cut them anew."""
    crew = [state_of(0, counted=False), state_of(1, counted=False)]
    cut = Partition(topology.world_size, topology.workers, batch_size=4)
    with pytest.raises(ConfigError, match=said):
        resume(crew, cut, topology, None)
    assert resume(crew, TWO_BY_TWO, Topology(0, 2, 1, 2), None) == Position(3)


def test_reader_that_repeats_samples_for_others_has_none_left() -> None:
    """Samples that make up for bad ones are no part of the epoch: with other readers they are not read on."""
    crew = [
        state_of(0, Partition(1, 2), time=1, taken=2, given=7),
        state_of(1, Partition(1, 2), taken=4),
    ]
    start, same = (resume(crew, Partition(2, 1), Topology(rank, 2), 20) for rank in range(2))
    assert start == same
    left = [walk(SampleDeal([20]).share(3, 0, Topology(rank, 2), start.phases), [20]) for rank in range(2)]
    assert sorted(place for reader in left for place in reader) == [(0, number) for number in range(14, 20)]


def _rest(deal: SampleDeal, topology: Topology, start: Position, batch_size: int) -> Sequence[tuple[int, int]]:
    share = replace(deal, batch_size=batch_size).share(start.epoch, 0, topology, start.phases)
    return walk(share.behind(start.taken), deal.counts)


def given_in_step(cut: Partition, samples: int, batches: int, loader_batch: int) -> list[list[int]]:
    """Return by rank how many samples each worker has given once each rank has been asked for so many batches."""
    sizes = [cut.worker_sizes(samples, rank) for rank in range(cut.world_size)]
    return [taken_in_turns(each, loader_batch, batches) for each in sizes]


def check_states_of_one_rank(cut: Partition, samples: int, loader_batch: int) -> int:
    """Compare what each rank's states tell, after any number of batches, with what was given; return how many tell."""
    told = 0
    most = -(-samples // loader_batch) + cut.workers
    for batches in range(most + 1):
        given = given_in_step(cut, samples, batches, loader_batch)
        for rank, mine in enumerate(given):
            crew = [
                state_of(rank * cut.workers + worker, cut, taken=count, given=count)
                for worker, count in enumerate(mine)
            ]
            try:
                (phase,) = resume(crew, Partition(1, 1), Topology(), samples).phases
            except ConfigError as exn:
                assert "states of all ranks" in exn.remedy
                sizes = cut.worker_sizes(samples, rank)
                assert cut.even is None
                assert any(count >= size for count, size in zip(mine, sizes, strict=True))
            else:
                found = [list(phase.taken[: cut.workers])] * cut.world_size
                if len(phase.taken) == cut.readers:
                    found = [list(phase.taken[rank * cut.workers :][: cut.workers]) for rank in range(cut.world_size)]
                assert found == given, (cut, samples, batches, rank)
                told += 1
        if given == given_in_step(cut, samples, most * loader_batch, loader_batch):
            break
    return told


@pytest.mark.parametrize("even", ["pad", "drop", None])
def test_one_ranks_states_tell_where_all_are_or_are_refused(even: Even) -> None:
    """For each small job, after each number of batches and by the states of each rank."""
    told = check_states_of_one_rank(Partition(4, 3, even, 8), 257, 8)
    for samples in [*range(1, 13), *range(13, 41 if even is None else 16, 3)]:
        for cut in (Partition(w, k, even, b) for w in (2, 3, 4) for k in (1, 2, 3) for b in (1, 3, 8)):
            told += check_states_of_one_rank(cut, samples, cut.batch_size)
            if cut.batch_size == 1:
                told += check_states_of_one_rank(cut, samples, 4)
    assert told > 1000


def test_samples_that_were_skipped_are_not_taken_for_batches() -> None:
    """A worker that skipped samples came to its end sooner, and the loader then asked the others more often."""
    cut = Partition(2, 2, None, 4)
    ended = [state_of(0, cut, taken=8, given=5), state_of(1, cut, taken=8, given=8)]
    with pytest.raises(ConfigError, match="states of all ranks"):
        resume(ended, cut, Topology(1, 2, 0, 2), 32)
    before = [state_of(0, cut, taken=6, given=4), state_of(1, cut, taken=4, given=4)]
    assert resume(before, cut, Topology(1, 2, 0, 2), 32) == Position(3, taken=4, given=4)


def test_one_workers_state_tells_nothing_of_ranks_that_have_another_share() -> None:
    """A StatefulDataLoader gives each worker its own state alone; with equal shares that is enough."""
    cut = Partition(2, 2, None, 4)
    state = state_of(1, cut, taken=4, given=4)
    assert resume([state], cut, Topology(1, 2, 1, 2), 32) == state.position
    with pytest.raises(ConfigError, match="states of all ranks"):
        resume([state], cut, Topology(1, 2, 1, 2), 33)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=8).filter(any),
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4)), min_size=2, max_size=6),
    st.sampled_from(["pad", "drop", None]),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), min_size=6, max_size=6),
    st.booleans(),
)
@example([103], [(4, 1, 1), (3, 1, 1)] * 3, "drop", [(5, 0)] * 6, False)
@example([21], [(5, 1, 1), (3, 1, 1)], "pad", [(4, 0)] * 6, False)
@example([23], [(2, 1, 4), (3, 1, 1)], None, [(3, 0)] * 6, True)
@example([7], [(2, 2, 4), (3, 1, 1)], None, [(1, 0)] * 6, True)
@example([22], [(3, 1, 4), (1, 1, 1)], None, [(2, 2)] * 6, True)
def test_any_job_resumes_from_one_ranks_states(
    counts: list[int], sizes: list[tuple[int, int, int]], even: Even, moments: list[tuple[int, int]], drop_last: bool
) -> None:
    """Again and again, on the same or another topology, all ranks having been asked for equally many batches."""
    cuts = [Partition(world, workers, even, batch) for world, workers, batch in sizes]
    deal, count, saved, chosen = SampleDeal(counts, Shuffle(1, 3), even), Counter[tuple[int, int]](), [], []
    last = cuts[0]
    for cut, (batches, rank) in zip([*cuts, cuts[-1]], [*moments[: len(cuts)], (1000, 0)], strict=True):
        starts = [_start(chosen, saved, cut, topology, sum(counts)) for topology in crew(cut)]
        shares = [
            _rest(deal, topology, start, cut.batch_size) for topology, start in zip(crew(cut), starts, strict=True)
        ]
        saved, before_phase = [], count.total()
        for first in range(0, cut.readers, cut.workers):
            mine = range(first, first + cut.workers)
            left = [len(shares[reader]) for reader in mine]
            whole = [size - size % cut.batch_size if drop_last else size for size in left]
            taken = taken_in_turns(whole, cut.batch_size, batches)
            end = any(size - more < cut.batch_size for size, more in zip(left, taken, strict=True))
            ends_sooner = drop_last and end and not deal.ends_together(cut, starts[0].phases, drop_last=True)
            for reader, more in zip(mine, taken, strict=True):
                count.update(shares[reader][:more])
                saved.append(state_of(reader, cut, position=starts[reader].after(more), in_step=not ends_sooner))
        chosen = [state for state in saved if state.reader // cut.workers == rank % cut.world_size]
        last = cut if count.total() > before_phase else last
    lost = cuts[-1].world_size * (cuts[-1].batch_size - 1 if drop_last else 0)
    assert len(count) >= sum(counts) - lost - (cuts[-1].world_size - 1 if even == "drop" else 0)
    assert count.total() - len(count) <= (last.world_size - 1 if even == "pad" else 0)


def _start(
    chosen: list[ReaderState], saved: list[ReaderState], cut: Partition, topology: Topology, samples: int
) -> Position:
    if not chosen:
        return Position(3)
    try:
        found = [resume(chosen, cut, each, samples) for each in crew(cut)]
    except ConfigError:
        found = [resume(saved, cut, each, samples) for each in crew(cut)]
    return found[topology.reader]
