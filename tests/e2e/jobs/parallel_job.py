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

BATCH = 3
Step = Callable[[torch.Tensor], Any]


def titan() -> tuple[Any, Step]:
    """Shard parameters over "fsdp" and layers over "tp", as torchtitan does."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Linear(4, 1))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["fsdp"])
    return mesh["fsdp"], lambda batch: model(batch).sum().backward()


def megatron() -> tuple[Any, Step]:
    """Take the groups from Megatron; each layer's parts are summed over its tensor-parallel group."""
    from megatron.core import parallel_state  # type: ignore[import-not-found]

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    group = parallel_state.get_tensor_model_parallel_group()
    return parallel_state.get_data_parallel_group(), lambda batch: dist.all_reduce(batch, group=group)


def pipeline() -> tuple[Any, Step]:
    """Pass activations from the first stage to the last, which takes the labels from its own batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage, (first, last) = mesh["pp"].get_local_rank(), mesh["pp"].mesh.tolist()

    def step(batch: torch.Tensor) -> None:
        if stage == 0:
            dist.send(batch, last)
            return
        activations = torch.empty_like(batch)
        dist.recv(activations, first)
        assert torch.equal(activations, batch)

    return mesh["dp"], step


RECIPES = {"titan": titan, "megatron": megatron, "pipeline": pipeline}


def keys(batch: list[dict[str, Any]]) -> list[str]:
    """Return the keys of a batch."""
    return [sample["__key__"] for sample in batch]


class Job:
    """One rank."""

    def __init__(self, recipe: str, socket: str, urls: str) -> None:
        self._args, self._options = urls, {"shuffle": True, "seed": 7, "even": "drop", "socket": socket}
        self._early = self.dataset(None)
        self.mesh, self._step = RECIPES[recipe]()

    def dataset(self, mesh: Any, **options: Any) -> ShardDataset:
        """Return the dataset, divided over a mesh."""
        return ShardDataset(self._args, mesh=mesh, **self._options | options)

    def train(self) -> dict[str, Any]:
        """Read two epochs with forked workers, in step with the other ranks."""
        dataset, read, states = self.dataset(self.mesh), [], []
        loader = dataset.loader(batch_size=BATCH, num_workers=2, collate_fn=keys)
        for _ in range(2):
            read.append([])
            for batch in loader:
                read[-1].append(batch)
                states.append(loader.state_dict())
                self._step(torch.tensor([[float(key)] for key in batch]))
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
        return list(
            self.dataset(self.mesh).loader(
                batch_size=BATCH, num_workers=1, collate_fn=keys, multiprocessing_context="spawn"
            )
        )

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
        return {
            "read": [keys([samples[number]]) for number in sampler],
            "error": error(lambda: DistributedSampler(samples)),
        }

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
