"""Four ranks with two copies of a model: ranks of a copy share samples, copies do not."""

import sys
from collections import Counter
from collections.abc import Callable
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DistributedSampler

from shardcache.errors import ShardcacheError
from shardcache_client.dataset import Mixture, ShardDataset
from support.programs.daemon import Daemon
from support.programs.ranks import torchrun
from support.shards.reading import keys_of
from support.shards.tars import KEYS

pytestmark = pytest.mark.slow

BATCH = 3
COPIES = (0, 0, 1, 1)  # by rank
LINES = {"titan": 'mesh=mesh["fsdp"]', "megatron": "mesh=parallel_state.get_data_parallel_group()"}
EACH = len(KEYS) // 2

Report = dict[str, Any]


def titan() -> Any:
    """Shard parameters over "fsdp" and layers over "tp", as torchtitan does; return the former."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Linear(4, 1))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["fsdp"])
    model(torch.ones(1, 1)).sum().backward()  # makes what FSDP makes of meshes
    return mesh["fsdp"]


def megatron() -> Any:
    """Have Megatron make the groups; return that of the ranks with samples of their own."""
    groups: Any = dist.new_subgroups_by_enumeration
    groups([[0, 1], [2, 3]])
    data, _ = groups([[0, 2], [1, 3]])
    # What data loaders use of the module, which is not installed here.
    state = {
        "model_parallel_is_initialized": lambda: True,
        "get_data_parallel_world_size": lambda: dist.get_world_size(data),
    }
    sys.modules["megatron.core.parallel_state"] = SimpleNamespace(**state)  # type: ignore[assignment]
    return data


RECIPES = {"titan": titan, "megatron": megatron}


class Job:
    """One rank."""

    def __init__(self, recipe: str, socket: str, urls: str) -> None:
        self._args = urls
        self._options = {"shuffle": True, "seed": 7, "even": "drop", "socket": socket}
        self._early = self.dataset(None)
        self.mesh = RECIPES[recipe]()

    def dataset(self, mesh: Any, **options: Any) -> ShardDataset:
        """Return the dataset, divided over a mesh."""
        return ShardDataset(self._args, mesh=mesh, **self._options | options)

    def train(self) -> dict[str, Any]:
        """Read two epochs with forked workers."""
        dataset = self.dataset(self.mesh)
        read = []
        states = []
        loader = dataset.loader(batch_size=BATCH, num_workers=2, collate_fn=keys_of)
        for _ in range(2):
            read.append([])
            for batch in loader:
                read[-1].append(batch)
                states.append(loader.state_dict())
        topology = dataset.topology()
        return {"share": [topology.rank, topology.world_size], "read": read, "states": states}

    def stop(self) -> list[Any]:
        """Take two batches of each copy; return them, and the states of all ranks."""
        loader = self.dataset(self.mesh).loader(batch_size=BATCH, num_workers=1, collate_fn=keys_of)
        taken = list(islice(loader, 2))
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, loader.state_dict())
        return [taken, states]

    def rest(self, states: list[Any]) -> list[list[str]]:
        """Go on with each rank for itself: from the states of all ranks, or of one."""
        dataset = self.dataset(init_device_mesh("cpu", (4,)))
        dataset.load_state_dict(states if dist.get_rank() % 2 else states[0])
        return list(dataset.loader(batch_size=1, num_workers=0, collate_fn=keys_of))

    def spawned(self) -> list[list[str]]:
        """Read by a worker that does not know the mesh."""
        options = {"batch_size": BATCH, "num_workers": 1, "multiprocessing_context": "spawn"}
        return list(self.dataset(self.mesh).loader(collate_fn=keys_of, **options))

    def mixture(self) -> list[list[str]]:
        """Read two sources."""
        sources = {
            str(seed): self.dataset(self.mesh, seed=seed).map(named(seed)) for seed in (7, 8)
        }
        unlike = {
            "divided": self.dataset(self.mesh),
            "whole": self.dataset(None, rank=0, world_size=1),
        }
        assert "differ in rank and world_size, or in mesh" in (error(lambda: Mixture(unlike)) or "")
        return [[sample["key"]] for sample in Mixture(sources)]

    def without_mesh(self) -> list[str | None]:
        """Return the errors of a dataset made now, and of one made before the model was divided."""
        return [
            error(lambda: self.dataset(None)),
            error(lambda: list(self._early.loader(batch_size=1, num_workers=1))),
        ]

    def numbered(self) -> dict[str, Any]:
        """Read by number with a sampler for the mesh; return the error of one for all ranks."""
        dataset = self.dataset(self.mesh)
        samples: Any = dataset.indexed()
        share = dataset.topology()
        sampler = DistributedSampler(
            samples, share.world_size, share.rank, shuffle=False, drop_last=True
        )
        read = [keys_of([samples[number]]) for number in sampler]
        return {"read": read, "error": error(lambda: DistributedSampler(samples))}

    def other_seeds(self) -> dict[str, str | None]:
        """Return the errors where the last rank has a seed of its own."""
        seed = dist.get_rank() // 3
        share = self.dataset(self.mesh).topology()
        mesh = self.dataset(self.mesh, seed=seed)
        ranks = self.dataset(None, seed=seed, rank=share.rank, world_size=share.world_size)
        return {"mesh": error(lambda: next(iter(mesh))), "named": error(lambda: next(iter(ranks)))}


def named(seed: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that tells the samples of a source from others'."""
    return lambda sample: {"key": f"{seed} {sample['__key__']}"}


def error(call: Callable[[], object]) -> str | None:
    """Return the error of a call."""
    try:
        call()
    except ShardcacheError as exn:
        return f"{type(exn).__name__}: {exn}"
    return None


def parallel(recipe: str, socket: str, urls: str) -> dict[str, Any]:
    """Be one rank."""
    dist.init_process_group("gloo")
    job = Job(recipe, socket, urls)
    taken, states = job.stop()
    return {
        "train": job.train(),
        "stopped": taken,
        "rest": job.rest(states),
        "spawned": job.spawned(),
        "mixture": job.mixture(),
        "numbered": job.numbered(),
        "no mesh": job.without_mesh(),
        "other seeds": job.other_seeds(),
    }


@pytest.fixture(scope="module", params=LINES)
def recipe(request: pytest.FixtureRequest) -> str:
    """The recipe to follow."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def ranks(recipe: str, train: str, daemon: Daemon) -> list[Report]:
    """The report of each rank."""
    return torchrun(parallel, recipe, daemon.socket, train, ranks=4)


@pytest.fixture
def copies(ranks: list[Report]) -> list[list[Report]]:
    """The reports of the two ranks of each copy."""
    return [ranks[:2], ranks[2:]]


def count(*parts: list[list[str]]) -> int:
    """Return the number of samples in batches; none of them may come twice."""
    reads = Counter(key for part in parts for batch in part for key in batch)
    assert set(reads.values()) == {1}
    return reads.total()


def test_ranks_of_a_copy_train_on_the_same_samples(
    ranks: list[Report], copies: list[list[Report]]
) -> None:
    """Batches and states of a copy are the same, and all copies read every sample once."""
    assert [rank["train"]["share"] for rank in ranks] == [[copy, 2] for copy in COPIES]
    assert [one["train"] == other["train"] for one, other in copies] == [True, True]
    for epoch in range(2):
        assert count(*(one["train"]["read"][epoch] for one, _ in copies)) == 2 * EACH


def test_other_ways_of_reading_take_the_mesh(copies: list[list[Report]]) -> None:
    """Spawned workers read for the rank of their trainer; a mixture has the mesh of its sources."""
    for way, samples in {"spawned": 2 * EACH, "mixture": 2 * len(KEYS)}.items():
        assert [one[way] == other[way] for one, other in copies] == [True, True]
        assert count(*(one[way] for one, _ in copies)) == samples


def test_sampler_of_indexed_divides_among_the_mesh(
    ranks: list[Report], copies: list[list[Report]]
) -> None:
    """The ranks of a copy read the same numbers. A sampler for all ranks is an error."""
    assert [one["numbered"]["read"] == other["numbered"]["read"] for one, other in copies] == [
        True,
        True,
    ]
    assert count(*(one["numbered"]["read"] for one, _ in copies)) == 2 * EACH
    for rank, copy in zip(ranks, COPIES, strict=True):
        assert f"num_replicas=2, rank={copy})" in rank["numbered"]["error"]


def test_state_resumes_on_another_mesh(ranks: list[Report], copies: list[list[Report]]) -> None:
    """Two copies of two ranks stop after two batches. Four copies of one rank read the rest."""
    stopped = [one["stopped"] for one, _ in copies]
    assert count(*stopped) == 12
    assert 2 * EACH - 3 <= count(*stopped, *(rank["rest"] for rank in ranks)) <= 2 * EACH


def test_model_parallelism_without_a_mesh_is_an_error(recipe: str, ranks: list[Report]) -> None:
    """On every rank, with the line to write: each would get samples of its own."""
    for rank in ranks:
        assert all(
            "ConfigError" in error and f"ShardDataset(..., {LINES[recipe]})" in error
            for error in rank["no mesh"]
        )


def test_seed_of_one_rank_is_compared_with_all_of_the_job(ranks: list[Report]) -> None:
    """The last rank has another seed than one that reads the same share, and one side is told.

    Whether the share comes from a mesh or from rank and world_size.
    """
    for rank, way in enumerate(("mesh", "named")):
        errors = [rank["other seeds"][way] for rank in ranks]
        assert [error is not None for error in errors] in (
            [False] * 3 + [True],
            [True] * 3 + [False],
        )
        assert all("RanksError" in error and "seed" in error for error in errors if error)
