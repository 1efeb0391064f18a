"""States of a mixture that changes: their size, and what is accepted as one."""

import json
from typing import Any

import pytest

from shardcache.errors import ConfigError
from shardcache_client.position.mixture_change import MixtureLoad
from shardcache_client.position.progress import Progress
from shardcache_client.position.staged_state import Reached, StagedState
from shardcache_client.position.state import find_states
from shardcache_client.stages.stage import Mark
from support.shards.mixture_model import Job, Run


@pytest.mark.slow
def test_states_stay_small_however_often_a_mixture_changes() -> None:
    """Also if of one source, which is left out from the first change on, some is left for ever."""
    state: str | None = None
    sizes: list[int] = []
    for number in range(60):
        weights = {"a": 1 + number % 3, "b": 1} if number else {"a": 1, "c": 1}
        job = Job(Run(weights, 60, 2, (), batch_size=3), state)
        for _ in range(3):
            if not job.left()[0]:
                job.next_epoch()
            job.take(min(2, len(job.left()[0]) // 3))
        state = job.state(over=False)
        sizes.append(len(state))
    assert max(sizes) < 1200


def test_change_within_the_first_group_of_a_stage_is_in_states_that_can_be_loaded() -> None:
    """A single reader has then passed no samples but some beyond its place."""
    job = Job(Run({"a": 1, "b": 1}, 60, 1, ()), None)
    mixture = job.deal.mixture_of(0)
    reached = Reached(Mark(place=0, given=1, beyond=0b101))
    staged = StagedState(job.dataset, Progress(), 0, 1, 1, reached, mixture=mixture)
    changed = Run({"a": 3, "b": 1}, 60, 1, ())
    load = MixtureLoad([staged], changed.deal_options(), changed.manifest, changed.ranks)
    (state,) = load.states_after_change()
    data = json.loads(json.dumps(state.to_json()))
    (loaded,) = find_states(data)
    assert json.loads(json.dumps(loaded.to_json())) == data


@pytest.mark.parametrize(
    "spoilt",
    [
        {"mixed": [["a", "x"]]},
        {"mixed": [["z", "01234567"]]},
        {"batches": [2, 3, True, 60]},
        {"batches": [2, 3, 1, 60]},
        {"changed": {"epoch": 0, "samples": -1, "sources": []}},
        {"changed": {"epoch": 0, "samples": 5, "sources": [["a", "01234567"]]}},
        {"changed": {"epoch": 0, "samples": 5, "sources": [], "sections": [{"sources": []}]}},
        {"sources": {"a": {"start": 0}}},
    ],
)
def test_spoilt_states_are_refused(spoilt: dict[str, Any]) -> None:
    """They come from files that anyone may have written."""
    job = Job(Run({"a": 1, "b": 1}, 59, 1, ()), None)
    with pytest.raises(ConfigError, match="the state is invalid"):
        find_states(json.loads(job.state(over=False)) | spoilt)
