"""Detection of other projects' wrappers that divide samples a second time.

The dataset already gives each rank and each worker samples of its own. A wrapper that passes on
only one of every N samples silently loses the others. Such a wrapper is found on the call stack,
since its frame is there whenever it requests a sample. A forked DataLoader worker has its parent's
frames below its own, so a wrapper around the loader is found there as well.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

from shardcache.errors import ConfigError
from shardcache_client.order.topology import Topology

# The local variables of a frame, by name.
Variables = Mapping[str, Any]
# Returns the number of shares that a wrapper makes, given the variables of its frame.
Shares = Callable[[Variables], int]


class Resharder(NamedTuple):
    """A function of another project that passes on one share of the samples it reads.

    Attributes:
        name: name of the function as its users know it.
        remedy: remedy in the error.
        ranks: returns the number of shares into which samples are divided among ranks.
        workers: returns the number of shares into which they are divided among a rank's workers.
    """

    name: str
    remedy: str
    ranks: Shares = lambda _: 1
    workers: Shares = lambda _: 1


def _processes(variables: Variables) -> int:
    """Return the number of shares of a wrapper that makes one for each process."""
    return int(variables["self"].num_processes)


def _workers_per_shard(variables: Variables) -> int:
    """Return the number of workers per shard, rounded up.

    If it is more than 1, some workers have no shard and read nothing.
    """
    workers = variables["worker_info"].num_workers
    shards = max(1, variables["self"].num_shards)
    return int(-(-workers // shards))


def _shares_of_all(variables: Variables) -> int:
    """Return the number of shares for all workers of all ranks."""
    return int(variables["self"].num_of_instances)


# The remedies of the errors.
_ACCELERATE = (
    "do not pass this loader to accelerator.prepare(), and move its batches to "
    "accelerator.device; with transformers, use shardcache_client.transformers.ShardTrainer in "
    "place of Trainer; or give the dataset rank=0, world_size=1, so that every process reads all "
    "samples and keeps its share"
)
_STAGE = "remove the stage: ranks and workers have their own samples already"
_DATASETS = (
    "read without datasets.IterableDataset, whose .map() becomes decode=; or give it a "
    "ShardReader for each of its shards, reader i of n with rank=i and world_size=n"
)

# The known functions, by module and qualified name.
_RESHARDERS = {
    ("accelerate.data_loader", "IterableDatasetShard.__iter__"): Resharder(
        "Accelerate's IterableDatasetShard",
        _ACCELERATE,
        ranks=_processes,
    ),
    ("accelerate.data_loader", "DataLoaderDispatcher.__iter__"): Resharder(
        "Accelerate's DataLoaderDispatcher",
        _ACCELERATE,
        ranks=lambda variables: int(variables["self"].state.num_processes),
    ),
    ("transformers.trainer_pt_utils", "IterableDatasetShard.__iter__"): Resharder(
        "transformers' IterableDatasetShard",
        _STAGE,
        ranks=_processes,
    ),
    ("webdataset.shardlists", "split_by_node"): Resharder(
        "webdataset's split_by_node",
        _STAGE,
        ranks=lambda variables: int(variables["world_size"]),
    ),
    ("webdataset.shardlists", "split_by_worker"): Resharder(
        "webdataset's split_by_worker",
        _STAGE,
        workers=lambda variables: int(variables["num_workers"]),
    ),
    ("datasets.iterable_dataset", "StepExamplesIterable.__iter__"): Resharder(
        "datasets' split_dataset_by_node",
        _DATASETS,
        ranks=lambda variables: int(variables["self"].step),
    ),
    ("datasets.iterable_dataset", "IterableDataset._iter_pytorch"): Resharder(
        "datasets.IterableDataset, with fewer shards than the loader has workers,",
        f"give the loader num_workers=0; or {_DATASETS}",
        workers=_workers_per_shard,
    ),
    ("torch.utils.data.datapipes.iter.sharding", "ShardingFilterIterDataPipe.__iter__"): Resharder(
        "torch's sharding_filter",
        _STAGE,
        ranks=_shares_of_all,
        workers=_shares_of_all,
    ),
}


def refuse_resharding(topology: Topology, processes: int) -> None:
    """Raise ConfigError if a wrapper on the call stack would lose samples.

    A second division is right as long as both divisions together make no more shares than the job
    has processes. For example, the dataset may be divided among nodes, and the share of each node
    among the node's processes.

    Args:
        topology: the dataset's own division.
        processes: number of processes of the job.
    """
    if topology.readers == 1:
        return
    for frame in _frames():
        module = frame.f_globals.get("__name__", "")
        resharder = _RESHARDERS.get((module, frame.f_code.co_qualname))
        if resharder is None:
            continue

        if topology.world_size > 1:
            shares = _count(resharder.ranks, frame.f_locals)
            if shares > 1 and topology.world_size * shares > processes:
                raise _error(resharder, shares, "rank")
        if topology.workers > 1:
            shares = _count(resharder.workers, frame.f_locals)
            if shares > 1:
                raise _error(resharder, shares, "worker")


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the call stack, from the caller's frame outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def stateful_loader_asks() -> bool:
    """Return True if the caller is torchdata's StatefulDataLoader.

    This matters since the loader's own state records the end of an iteration.
    """
    modules = (str(frame.f_globals.get("__name__")) for frame in _frames())
    return any(module.startswith("torchdata.") for module in modules)


def replicas_of_sampler_asking_length() -> int | None:
    """Return the number of ranks of a DistributedSampler that asks for a dataset's length.

    None if something other than its constructor calls the dataset's `__len__`.
    """
    # Frame 0 is this function's, frame 1 that of the dataset's own `__len__`.
    asking = sys._getframe(2)
    if asking.f_code.co_qualname != "DistributedSampler.__init__":
        return None
    replicas: int | None = asking.f_locals["self"].num_replicas
    return replicas


def _count(shares: Shares, variables: Variables) -> int:
    """Return the number of shares that a wrapper makes, from the variables of its frame."""
    try:
        return shares(variables)
    except (KeyError, AttributeError):
        # This release of the other project keeps the number elsewhere. The number is taken to be 2,
        # since nobody uses a wrapper that divides nothing.
        return 2


def _error(resharder: Resharder, shares: int, reader: str) -> ConfigError:
    """Return the error for a wrapper that makes `shares` shares; `reader` is "rank" or "worker"."""
    return ConfigError(
        f"the samples are sharded a second time: {resharder.name} passes on one of {shares} "
        f"shares of the samples that this {reader} reads, and drops the rest",
        remedy=resharder.remedy,
    )
