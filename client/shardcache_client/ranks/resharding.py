"""Detection of a second sharding: another project's wrapper that shares out samples which the dataset has shared out.

ShardDataset gives each rank and each worker its own samples. A wrapper that passes on one of every N of those loses
the others without a word. It is found on the call stack: its frame is there whenever it asks for a sample. A forked
DataLoader worker has its parent's frames below its own, so a wrapper around the loader is found there, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from shardcache.errors import ConfigError
from shardcache_client.topology import Topology

Variables = Mapping[str, Any]

_PAGE = "docs/frameworks.md"


@dataclass(frozen=True, slots=True)
class Resharder:
    """A function of another project that passes on one share of the samples it reads.

    Attributes:
        name: what its users call it.
        shares: number of shares that it makes of its samples, from the local variables of its frame.
        remedy: what to do about it.
        among_workers: whether it shares out among a rank's workers alone.
    """

    name: str
    shares: Callable[[Variables], int]
    remedy: str
    among_workers: bool = False


def _processes(variables: Variables) -> int:
    return int(variables["self"].num_processes)


def _processes_of_job(variables: Variables) -> int:
    return int(variables["self"].state.num_processes)


def _workers_per_shard(variables: Variables) -> int:
    """Return 1 where each worker has a shard of its own; otherwise, some of them read nothing at all."""
    return int(-(-variables["worker_info"].num_workers // max(1, variables["self"].num_shards)))


_ACCELERATE = (
    "leave this loader out of accelerator.prepare() and move its batches to accelerator.device; with transformers' "
    "Trainer, have get_train_dataloader, get_eval_dataloader and get_test_dataloader return a plain DataLoader "
    f"({_PAGE}); or give the dataset rank=0, world_size=1, for every process to read all samples and keep its share"
)
_WEBDATASET = "leave the stage out: ranks and workers have samples of their own already"
_DATASETS = "use the ShardDataset itself, without datasets.IterableDataset around it; .map(), in decode="

_RESHARDERS = {
    ("accelerate.data_loader", "IterableDatasetShard.__iter__"): Resharder(
        "Accelerate's IterableDatasetShard", _processes, _ACCELERATE
    ),
    ("accelerate.data_loader", "DataLoaderDispatcher.__iter__"): Resharder(
        "Accelerate's DataLoaderDispatcher", _processes_of_job, _ACCELERATE
    ),
    ("transformers.trainer_pt_utils", "IterableDatasetShard.__iter__"): Resharder(
        "transformers' IterableDatasetShard", _processes, "leave it out: ranks have samples of their own already"
    ),
    ("webdataset.shardlists", "split_by_node"): Resharder(
        "webdataset's split_by_node", lambda variables: int(variables["world_size"]), _WEBDATASET
    ),
    ("webdataset.shardlists", "split_by_worker"): Resharder(
        "webdataset's split_by_worker", lambda variables: int(variables["num_workers"]), _WEBDATASET, among_workers=True
    ),
    ("datasets.iterable_dataset", "StepExamplesIterable.__iter__"): Resharder(
        "datasets' split_dataset_by_node", lambda variables: int(variables["self"].step), _DATASETS
    ),
    ("datasets.iterable_dataset", "IterableDataset._iter_pytorch"): Resharder(
        "datasets.IterableDataset, which has fewer shards than the loader has workers,",
        _workers_per_shard,
        f"give the loader num_workers=0; or {_DATASETS}",
        among_workers=True,
    ),
    ("torch.utils.data.datapipes.iter.sharding", "ShardingFilterIterDataPipe.__iter__"): Resharder(
        "torch's sharding_filter", lambda variables: int(variables["self"].num_of_instances), _WEBDATASET
    ),
}


def refuse_resharding(topology: Topology, processes: int) -> None:
    """Check who asks for samples.

    Shares of shares are right where together they are no more than there are readers: a dataset of one rank that each
    process reads whole, or one dealt to nodes whose processes share what is the node's.

    Args:
        topology: how the dataset's samples are shared out.
        processes: of the job.

    Raises ConfigError where a wrapper would lose samples.
    """
    if topology.readers == 1:
        return
    for resharder, variables in _resharders(sys._getframe(1)):
        dealt, readers = topology.readers, max(processes, topology.world_size) * topology.workers
        if resharder.among_workers:
            dealt = readers = topology.workers
        shares = _shares(resharder, variables)
        if dealt * shares > readers:
            raise ConfigError(
                f"the samples are sharded a second time: {resharder.name} passes on one of {shares} shares of what "
                f"{'this worker' if resharder.among_workers else 'this rank'} reads, and the rest is lost",
                remedy=resharder.remedy,
            )


def _resharders(frame: FrameType | None) -> Iterator[tuple[Resharder, Variables]]:
    while frame is not None:
        found = _RESHARDERS.get((frame.f_globals.get("__name__", ""), frame.f_code.co_qualname))
        if found is not None:
            yield found, frame.f_locals
        frame = frame.f_back


def _shares(resharder: Resharder, variables: Variables) -> int:
    try:
        return resharder.shares(variables)
    except (KeyError, AttributeError):
        return 2  # a release that keeps the number elsewhere; it would not be there to pass on everything
