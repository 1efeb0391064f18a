"""Four ranks with two copies of a model: the ranks of a copy train on the same samples, copies on different ones."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from parallel_job import parallel

import support
from support.programs.daemon import Daemon
from support.programs.ranks import torchrun
from support.shards.tars import KEYS

pytestmark = pytest.mark.slow

MEGATRON = Path(support.__file__).parent / "megatron"
COPIES = (0, 0, 1, 1)  # by rank
LINES = {"titan": 'mesh=mesh["fsdp"]', "megatron": "mesh=parallel_state.get_data_parallel_group()"}
EACH = len(KEYS) // 2

Report = dict[str, Any]


@pytest.fixture(scope="module", params=LINES)
def recipe(request: pytest.FixtureRequest) -> str:
    """The recipe to follow."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def ranks(recipe: str, train: str, daemon: Daemon) -> list[Report]:
    """The report of each rank."""
    return torchrun(parallel, recipe, daemon.socket, train, ranks=4, PYTHONPATH=str(MEGATRON))


@pytest.fixture
def copies(ranks: list[Report]) -> list[list[Report]]:
    """The reports of the two ranks of each copy."""
    return [ranks[:2], ranks[2:]]


def count(*parts: list[list[str]]) -> int:
    """Return the number of samples in batches; none of them may come twice."""
    reads = Counter(key for part in parts for batch in part for key in batch)
    assert set(reads.values()) == {1}
    return reads.total()


def test_ranks_of_a_copy_train_on_the_same_samples(ranks: list[Report], copies: list[list[Report]]) -> None:
    """Batches and states of a copy are the same on its ranks, and over the copies every sample comes once an epoch."""
    assert [rank["train"]["share"] for rank in ranks] == [[copy, 2] for copy in COPIES]
    assert [one["train"] == other["train"] for one, other in copies] == [True, True]
    for epoch in range(2):
        assert count(*(one["train"]["read"][epoch] for one, _ in copies)) == 2 * EACH


def test_other_ways_of_reading_take_the_mesh(copies: list[list[Report]]) -> None:
    """Spawned workers read for the rank of their trainer; a mixture has the mesh of its sources."""
    for way, samples in {"spawned": 2 * EACH, "mixture": 2 * len(KEYS)}.items():
        assert [one[way] == other[way] for one, other in copies] == [True, True]
        assert count(*(one[way] for one, _ in copies)) == samples


def test_sampler_of_indexed_divides_among_the_mesh(ranks: list[Report], copies: list[list[Report]]) -> None:
    """The ranks of a copy read the same numbers; a sampler for all ranks of the job is an error with the right ones."""
    assert [one["numbered"]["read"] == other["numbered"]["read"] for one, other in copies] == [True, True]
    assert count(*(one["numbered"]["read"] for one, _ in copies)) == 2 * EACH
    for rank, copy in zip(ranks, COPIES, strict=True):
        assert f"num_replicas=2, rank={copy})" in rank["numbered"]["error"]


def test_state_resumes_on_another_mesh(ranks: list[Report], copies: list[list[Report]]) -> None:
    """Two copies of two ranks stop after two batches; as four copies of one rank, they read the rest once."""
    stopped = [one["stopped"] for one, _ in copies]
    assert count(*stopped) == 12
    assert 2 * EACH - 3 <= count(*stopped, *(rank["rest"] for rank in ranks)) <= 2 * EACH


def test_model_parallelism_without_a_mesh_is_an_error(recipe: str, ranks: list[Report]) -> None:
    """On every rank, with the line to write: each would get samples of its own."""
    for rank in ranks:
        assert all(
            "ConfigError" in error and f"ShardDataset(..., {LINES[recipe]})" in error for error in rank["no mesh"]
        )


def test_seed_of_one_rank_is_compared_with_all_of_the_job(ranks: list[Report]) -> None:
    """The last rank has another seed than the others, one of which reads the same share: one side is told.

    Whether the share comes from a mesh or from rank and world_size.
    """
    for rank, way in enumerate(("mesh", "named")):
        errors = [rank["other seeds"][way] for rank in ranks]
        assert [error is not None for error in errors] in ([False] * 3 + [True], [True] * 3 + [False])
        assert all("RanksError" in error and "seed" in error for error in errors if error)
