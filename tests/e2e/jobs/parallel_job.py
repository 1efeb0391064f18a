"""One rank of four for `test_model_parallelism`, two of which hold each copy of a model.

It trains two epochs, and returns its share, its batches, and the state after each.
"""

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DistributedSampler

from shardcache.errors import ShardcacheError
from shardcache_client import Mixture, ShardDataset
from support.shards.reading import keys_of as keys

BATCH = 3


def titan() -> Any:
    """Shard parameters over "fsdp" and layers over "tp", as torchtitan does; return the mesh of the former."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Linear(4, 1))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["fsdp"])
    model(torch.ones(1, 1)).sum().backward()  # makes what FSDP makes of meshes
    return mesh["fsdp"]


def megatron() -> Any:
    """Have Megatron make the groups; return that of the ranks with samples of their own."""
    from megatron.core import parallel_state  # type: ignore[import-not-found]

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    return parallel_state.get_data_parallel_group()


RECIPES = {"titan": titan, "megatron": megatron}


class Job:
    """One rank."""

    def __init__(self, recipe: str, socket: str, urls: str) -> None:
        self._args, self._options = urls, {"shuffle": True, "seed": 7, "even": "drop", "socket": socket}
        self._early = self.dataset(None)
        self.mesh = RECIPES[recipe]()

    def dataset(self, mesh: Any, **options: Any) -> ShardDataset:
        """Return the dataset, divided over a mesh."""
        return ShardDataset(self._args, mesh=mesh, **self._options | options)

    def train(self) -> dict[str, Any]:
        """Read two epochs with forked workers."""
        dataset, read, states = self.dataset(self.mesh), [], []
        loader = dataset.loader(batch_size=BATCH, num_workers=2, collate_fn=keys)
        for _ in range(2):
            read.append([])
            for batch in loader:
                read[-1].append(batch)
                states.append(loader.state_dict())
        topology = dataset.topology()
        return {"share": [topology.rank, topology.world_size], "read": read, "states": states}

    def stop(self) -> list[Any]:
        """Take two batches of each copy; return them, and the states of all ranks."""
        loader = self.dataset(self.mesh).loader(batch_size=BATCH, num_workers=1, collate_fn=keys)
        taken = list(islice(loader, 2))
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, loader.state_dict())
        return [taken, states]

    def rest(self, states: list[Any]) -> list[list[str]]:
        """Go on with each rank for itself: from the states of all ranks, or of one."""
        dataset = self.dataset(init_device_mesh("cpu", (4,)))
        dataset.load_state_dict(states if dist.get_rank() % 2 else states[0])
        return list(dataset.loader(batch_size=1, num_workers=0, collate_fn=keys))

    def spawned(self) -> list[list[str]]:
        """Read by a worker that does not know the mesh."""
        options = {"batch_size": BATCH, "num_workers": 1, "multiprocessing_context": "spawn"}
        return list(self.dataset(self.mesh).loader(collate_fn=keys, **options))

    def mixture(self) -> list[list[str]]:
        """Read two sources."""
        sources = {str(seed): self.dataset(self.mesh, seed=seed).map(named(seed)) for seed in (7, 8)}
        unlike = {"divided": self.dataset(self.mesh), "whole": self.dataset(None, rank=0, world_size=1)}
        assert "differ in rank and world_size, or in mesh" in (error(lambda: Mixture(unlike)) or "")
        return [[sample["key"]] for sample in Mixture(sources)]

    def without_mesh(self) -> list[str | None]:
        """Return the errors of a dataset made now, and of one made before the model was divided."""
        return [error(lambda: self.dataset(None)), error(lambda: list(self._early.loader(batch_size=1, num_workers=1)))]

    def numbered(self) -> dict[str, Any]:
        """Read by number, with a sampler for the ranks of the mesh; return the error of one for all ranks as well."""
        dataset = self.dataset(self.mesh)
        samples: Any = dataset.indexed()
        share = dataset.topology()
        sampler = DistributedSampler(samples, share.world_size, share.rank, shuffle=False, drop_last=True)
        read = [keys([samples[number]]) for number in sampler]
        return {"read": read, "error": error(lambda: DistributedSampler(samples))}

    def other_seeds(self) -> dict[str, str | None]:
        """Return the errors where the last rank has a seed of its own."""
        seed, share = dist.get_rank() // 3, self.dataset(self.mesh).topology()
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
