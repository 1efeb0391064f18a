"""state.py: states are found in any checkpoint, whoever saved them and however deep they lie."""

import json
from dataclasses import replace
from typing import Any

import pytest

from shardcache.errors import ConfigError
from shardcache_client.order.dealing.deal import SampleDeal
from shardcache_client.order.topology import Topology
from shardcache_client.position.progress import Progress
from shardcache_client.position.rank_state import RankState, StateForm, WorkerPart, progress_of
from shardcache_client.position.staged_state import Reached, StagedState
from shardcache_client.position.state import SavedState, find_states
from shardcache_client.stages.stage import Mark

DATASET = "0123456789abcdef"


def state_of(reader: int, **fields: Any) -> StagedState:
    """Return the state of one of four readers."""
    state = StagedState(DATASET, Progress(3), reader, 4, 2, Reached(Mark(10 + reader)))
    return replace(state, **fields)


def saved_loader(*states: SavedState, steps_since_snapshot: int = 0) -> dict[str, Any]:
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
            "_main_snapshot": {
                "_num_workers": len(states),
                "_sampler_iter_state": None,
                "_base_seed": 2**60,
            },
            "_worker_snapshots": workers,
        },
        "_steps_since_snapshot": steps_since_snapshot,
        "_iterator_finished": False,
    }


def test_states_are_found_wherever_they_lie() -> None:
    """By themselves, in a loader's state, in those of several ranks, and in a whole checkpoint."""
    crew = [state_of(reader) for reader in range(4)]
    checkpoint = {
        "model": {"weight": "..."},
        "loaders": [saved_loader(*crew[:2]), saved_loader(*crew[2:])],
        "step": 7,
    }
    assert find_states(crew[1].to_json()) == crew[1:2]
    assert find_states(saved_loader(*crew[:2])) == crew[:2]
    assert find_states(checkpoint) == crew
    assert find_states(json.loads(json.dumps(checkpoint))) == crew


def test_states_of_ranks_are_told_from_those_of_readers() -> None:
    """By what they hold, as both are of one format."""
    rank = RankState(DATASET, Progress(3).after(2, 4, 5))
    assert find_states([rank.to_json(), rank.to_json()]) == [rank, rank]
    assert find_states(state_of(0).to_json()) == [state_of(0)]


@pytest.mark.parametrize("drop_last", [False, True, None])
def test_a_rank_at_its_end_does_not_speak_for_one_with_a_further_batch(
    drop_last: bool | None,
) -> None:
    """The first rank has 16 of 33 samples, and the other has one more in a short batch."""
    deal = SampleDeal([33], None, even=None)
    form = StateForm(DATASET, deal, 16, drop_last=drop_last, seeds={})
    start = Progress(3)
    begun = form.state(start, Topology(0, 2), ended=False, over=False, left=16)
    assert progress_of([begun], Topology(1, 2)) == start
    if drop_last:
        return  # both ranks end after one batch
    at_end = form.state(start.after(2, 16, 1), Topology(0, 2), ended=True, over=False, left=0)
    with pytest.raises(ConfigError, match="states of all ranks"):
        progress_of([at_end], Topology(1, 2))


def test_workers_at_their_end_do_not_speak_for_a_rank_with_a_further_batch() -> None:
    """One of a plain DataLoader's two workers alone gets a batch of the first rank."""
    deal = SampleDeal([33], None, even=None)
    form = StateForm(DATASET, deal, 16, drop_last=None, seeds={})
    start = Progress(3)

    def state(worker: int, samples: int, left: int) -> RankState:
        part = WorkerPart(worker, 2, 16, samples)
        return form.state(start, Topology(0, 2), ended=not left, over=False, left=left, part=part)

    assert progress_of([state(0, 0, left=16), state(1, 0, left=0)], Topology(1, 2)) == start
    with pytest.raises(ConfigError, match="states of all ranks"):
        progress_of([state(0, 16, left=0), state(1, 0, left=0)], Topology(1, 2))


def test_states_without_one_of_the_dataset_are_an_error() -> None:
    """Rather than an epoch from its beginning."""
    for nothing in ({}, [], {"model": "shardcache"}, None, "shardcache"):
        with pytest.raises(ConfigError, match="no state"):
            find_states(nothing)


@pytest.mark.parametrize(
    "other",
    [
        {"progress": Progress(4)},
        {"progress": Progress(3).after(3, 1, 7)},
        {"readers": 8},
        {"workers": 1},
        {"counted": False},
        {"dataset": "f" * 16},
    ],
    ids=str,
)
def test_states_of_several_moments_are_refused(other: dict[str, Any]) -> None:
    """Nobody could say what is left of the epoch."""
    with pytest.raises(ConfigError, match="not from the same moment"):
        find_states([state_of(0).to_json(), state_of(1, **other).to_json()])


def test_a_snapshot_of_an_earlier_moment_is_refused() -> None:
    """A state from between two saves leaves out later samples, which would be read twice."""
    with pytest.raises(ConfigError, match="snapshot_every_n_steps") as caught:
        find_states([saved_loader(state_of(0), steps_since_snapshot=2)])
    assert "older" in caught.value.message
