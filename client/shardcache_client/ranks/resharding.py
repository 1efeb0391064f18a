"""Detection of a second sharding: another project's wrapper that shares out samples which the dataset has shared out.

ShardDataset gives each rank and each worker its own samples. A wrapper that passes on one of every N of those loses
the others without a word. It is found on the call stack: its frame is there whenever it asks for a sample. A forked
DataLoader worker has its parent's frames below its own, so a wrapper around the loader is found there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardcache.errors import ConfigError
from shardcache_client.callers import frames
from shardcache_client.topology import Topology

Variables = Mapping[str, Any]
Shares = Callable[[Variables], int]


def _all(variables: Variables) -> int:
    return 1


@dataclass(frozen=True, slots=True)
class Resharder:
    """A function of another project that passes on one share of the samples it reads.

    Attributes:
        name: what its users call it.
        remedy: what to do about it.
        ranks: number of shares that it makes for ranks, from the local variables of its frame.
        workers: number of shares that it makes for a rank's workers.
    """

    name: str
    remedy: str
    ranks: Shares = _all
    workers: Shares = _all


def _processes(variables: Variables) -> int:
    return int(variables["self"].num_processes)


def _workers_per_shard(variables: Variables) -> int:
    """Return 1 where each worker has a shard of its own; otherwise, some of them read nothing at all."""
    return int(-(-variables["worker_info"].num_workers // max(1, variables["self"].num_shards)))


def _instances(variables: Variables) -> int:
    """Return the shares of all workers of all ranks."""
    return int(variables["self"].num_of_instances)


_ACCELERATE = (
    "leave this loader out of accelerator.prepare() and move its batches to accelerator.device; with transformers' "
    "Trainer, have get_train_dataloader, get_eval_dataloader and get_test_dataloader return a plain DataLoader "
    "(docs/frameworks.md); or give the dataset rank=0, world_size=1, for every process to read all samples and keep "
    "its share"
)
_STAGE = "leave the stage out: ranks and workers have samples of their own already"
_DATASETS = "use the ShardDataset itself, without datasets.IterableDataset around it; .map() becomes decode="

_RESHARDERS = {
    ("accelerate.data_loader", "IterableDatasetShard.__iter__"): Resharder(
        "Accelerate's IterableDatasetShard", _ACCELERATE, ranks=_processes
    ),
    ("accelerate.data_loader", "DataLoaderDispatcher.__iter__"): Resharder(
        "Accelerate's DataLoaderDispatcher", _ACCELERATE, ranks=lambda names: int(names["self"].state.num_processes)
    ),
    ("transformers.trainer_pt_utils", "IterableDatasetShard.__iter__"): Resharder(
        "transformers' IterableDatasetShard", _STAGE, ranks=_processes
    ),
    ("webdataset.shardlists", "split_by_node"): Resharder(
        "webdataset's split_by_node", _STAGE, ranks=lambda names: int(names["world_size"])
    ),
    ("webdataset.shardlists", "split_by_worker"): Resharder(
        "webdataset's split_by_worker", _STAGE, workers=lambda names: int(names["num_workers"])
    ),
    ("datasets.iterable_dataset", "StepExamplesIterable.__iter__"): Resharder(
        "datasets' split_dataset_by_node", _DATASETS, ranks=lambda names: int(names["self"].step)
    ),
    ("datasets.iterable_dataset", "IterableDataset._iter_pytorch"): Resharder(
        "datasets.IterableDataset, with fewer shards than the loader has workers,",
        f"give the loader num_workers=0; or {_DATASETS}",
        workers=_workers_per_shard,
    ),
    ("torch.utils.data.datapipes.iter.sharding", "ShardingFilterIterDataPipe.__iter__"): Resharder(
        "torch's sharding_filter", _STAGE, ranks=_instances, workers=_instances
    ),
}


def refuse_resharding(topology: Topology, processes: int) -> None:
    """Check who asks for samples.

    Shares of shares are right where they are no more than the job has processes: a dataset dealt to nodes, for example,
    whose processes share what is the node's.

    Args:
        topology: how the dataset's samples are shared out.
        processes: of the job.

    Raises ConfigError where a wrapper would lose samples.
    """
    if topology.readers == 1:
        return
    for resharder, variables in _resharders():
        if topology.world_size > 1:
            shares = _count(resharder.ranks, variables)
            if topology.world_size * shares > max(processes, topology.world_size):
                raise _error(resharder, shares, "rank")
        if topology.workers > 1:
            shares = _count(resharder.workers, variables)
            if shares > 1:
                raise _error(resharder, shares, "worker")


def _resharders() -> Iterator[tuple[Resharder, Variables]]:
    for frame in frames():
        found = _RESHARDERS.get((frame.f_globals.get("__name__", ""), frame.f_code.co_qualname))
        if found is not None:
            yield found, frame.f_locals


def _count(shares: Shares, variables: Variables) -> int:
    try:
        return shares(variables)
    except (KeyError, AttributeError):
        return 2  # a release that keeps the number elsewhere; it would not be there to pass on everything


def _error(resharder: Resharder, shares: int, reader: str) -> ConfigError:
    return ConfigError(
        f"the samples are sharded a second time: {resharder.name} passes on one of {shares} shares of what this "
        f"{reader} reads, and the rest is lost",
        remedy=resharder.remedy,
    )
