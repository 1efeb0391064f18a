"""Stages of at most one item per sample work with every door, resuming and ranks."""

import json
from collections.abc import Callable
from itertools import chain, islice
from typing import Any, TypeAlias

import pytest
from torch.utils.data import DataLoader

from shardcache_client.dataset import Joined, Mixture, ShardDataset
from support.cases import first_quick
from support.shards.tars import BATCH, KEYS, Make

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

Items: TypeAlias = list[Any]
Stage: TypeAlias = Callable[[ShardDataset[Any]], ShardDataset[Any]]


def number_of(sample: dict[str, Any]) -> int:
    """Return a sample's number."""
    return int(sample["__key__"])


def is_kept(sample: dict[str, Any]) -> bool:
    """Return True for two samples of three."""
    return number_of(sample) % 3 > 0


ALL = [int(key) for key in KEYS]
KEPT = [number for number in ALL if number % 3 > 0]
STAGES: dict[str, tuple[Stage, list[int]]] = {
    "map": (lambda dataset: dataset.map(number_of), ALL),
    "filter": (lambda dataset: dataset.filter(is_kept).map(number_of), KEPT),
}


@pytest.fixture(params=STAGES)
def stage(request: pytest.FixtureRequest) -> Stage:
    """Stage that makes a dataset of numbers of one of samples."""
    return STAGES[request.param][0]


@pytest.fixture
def expected(request: pytest.FixtureRequest) -> list[int]:
    """The numbers that are left."""
    return STAGES[request.node.callspec.params["stage"]][1]


def joined(dataset: ShardDataset[Any], other: ShardDataset[Any]) -> ShardDataset[Any]:
    """Return samples with those of another dataset beside them."""
    return Joined({"": dataset, "other": other})


def by_loader(dataset: ShardDataset[Any], **options: Any) -> Items:
    """Return the items of an epoch as a loader gives them."""
    return list(chain.from_iterable(dataset.loader(batch_size=4, collate_fn=list, **options)))


DOORS: dict[str, Callable[[Make, Stage], Items]] = {
    "dataset": lambda make, stage: list(stage(make(even=None))),
    "loader": lambda make, stage: by_loader(stage(make(even=None)), num_workers=0),
    "threads": lambda make, stage: by_loader(
        stage(make(even=None)), num_workers=2, workers="threads"
    ),
    "processes": lambda make, stage: by_loader(stage(make(even=None)), num_workers=1),
    "plain": lambda make, stage: list(DataLoader(stage(make(even=None)), None, num_workers=1)),
    "mixture": lambda make, stage: list(stage(Mixture([make(even=None)]))),
    "source of a mixture": lambda make, stage: list(Mixture([stage(make(even=None))])),
    "joined": lambda make, stage: list(stage(joined(make(even=None), make(even=None)))),
}


@pytest.mark.parametrize("door", first_quick(DOORS, 3))
def test_stage_goes_with_every_door(
    make: Make, stage: Stage, expected: list[int], door: str
) -> None:
    """Each item once in an epoch."""
    assert sorted(DOORS[door](make, stage)) == expected


@pytest.mark.parametrize("taken", [2, 5])
def test_stage_resumes_exactly(make: Make, stage: Stage, taken: int) -> None:
    """With the next batch, on workers of another kind."""
    whole = by_loader(stage(make(even=None)), num_workers=0)
    loader = stage(make(even=None)).loader(
        batch_size=4, collate_fn=list, num_workers=2, workers="threads"
    )
    begun = list(chain.from_iterable(islice(loader, taken)))
    resumed = stage(make(even=None)).loader(batch_size=4, collate_fn=list, num_workers=0)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert begun + list(chain.from_iterable(resumed)) == whole


def test_stage_is_resumed_by_other_ranks(make: Make, stage: Stage, expected: list[int]) -> None:
    """From the states of two, three read what is left once."""

    def rank(number: int, ranks: int) -> Any:
        dataset = stage(make(even=None, rank=number, world_size=ranks))
        return dataset.loader(batch_size=BATCH, collate_fn=list, num_workers=0)

    loaders = [rank(number, 2) for number in range(2)]
    read: Items = []
    for loader in loaders:
        read += chain.from_iterable(islice(loader, 2))
    states = [loader.state_dict() for loader in loaders]
    for number in range(3):
        loader = rank(number, 3)
        loader.load_state_dict(states)
        read += chain.from_iterable(loader)
    assert sorted(read) == expected
