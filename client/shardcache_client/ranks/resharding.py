"""Detection of other projects' wrappers that divide samples a second time.

A dataset already gives each rank and each worker samples of its own. A wrapper that keeps one of
every N of these samples for its rank or worker silently loses the others. It is found on the call
stack, since its frame is there whenever it requests a sample. A forked DataLoader worker has its
parent's frames below its own, so a wrapper around the loader is found there as well.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

from shardcache.shared.exceptions import ConfigError
from shardcache_client.order.topology import Topology

# The local variables of a frame, by name.
Variables = Mapping[str, Any]
# Returns the number of shares into which a wrapper divides samples, from its frame's variables.
ShareCounter = Callable[[Variables], int]


class Resharder(NamedTuple):
    """A function of another project that passes on one share of the samples it reads.

    Attributes:
        name: name of the function as its users know it.
        remedy: remedy in the error.
        rank_shares: returns the number of shares into which samples are divided among ranks; 1 if
            they are not.
        worker_shares: returns the number of shares into which samples are divided among a rank's
            workers; 1 if they are not.
    """

    name: str
    remedy: str
    rank_shares: ShareCounter = lambda _: 1
    worker_shares: ShareCounter = lambda _: 1


def _shares_of_processes(variables: Variables) -> int:
    """Return the number of shares, one for each process."""
    return int(variables["self"].num_processes)


def _workers_per_shard(variables: Variables) -> int:
    """Return the number of workers per shard, rounded up.

    If it is more than 1, some workers have no shard and read nothing, so their samples are lost.
    """
    workers = variables["worker_info"].num_workers
    shards = max(1, variables["self"].num_shards)
    return int(-(-workers // shards))


def _shares_of_all_workers(variables: Variables) -> int:
    """Return the number of shares, one for each worker of each rank."""
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
        rank_shares=_shares_of_processes,
    ),
    ("accelerate.data_loader", "DataLoaderDispatcher.__iter__"): Resharder(
        "Accelerate's DataLoaderDispatcher",
        _ACCELERATE,
        rank_shares=lambda variables: int(variables["self"].state.num_processes),
    ),
    ("transformers.trainer_pt_utils", "IterableDatasetShard.__iter__"): Resharder(
        "transformers' IterableDatasetShard",
        _STAGE,
        rank_shares=_shares_of_processes,
    ),
    ("webdataset.shardlists", "split_by_node"): Resharder(
        "webdataset's split_by_node",
        _STAGE,
        rank_shares=lambda variables: int(variables["world_size"]),
    ),
    ("webdataset.shardlists", "split_by_worker"): Resharder(
        "webdataset's split_by_worker",
        _STAGE,
        worker_shares=lambda variables: int(variables["num_workers"]),
    ),
    ("datasets.iterable_dataset", "StepExamplesIterable.__iter__"): Resharder(
        "datasets' split_dataset_by_node",
        _DATASETS,
        rank_shares=lambda variables: int(variables["self"].step),
    ),
    ("datasets.iterable_dataset", "IterableDataset._iter_pytorch"): Resharder(
        "datasets.IterableDataset, with fewer shards than the loader has workers,",
        f"give the loader num_workers=0; or {_DATASETS}",
        worker_shares=_workers_per_shard,
    ),
    ("torch.utils.data.datapipes.iter.sharding", "ShardingFilterIterDataPipe.__iter__"): Resharder(
        "torch's sharding_filter",
        _STAGE,
        rank_shares=_shares_of_all_workers,
        worker_shares=_shares_of_all_workers,
    ),
}


def refuse_resharding(topology: Topology, processes: int) -> None:
    """Raise ConfigError if a wrapper on the call stack would lose samples.

    A second division loses nothing as long as both divisions together make no more shares than the
    job has processes. For example, the dataset may be divided among nodes, and the share of each
    node among the node's processes.

    Args:
        topology: the ranks and workers among which the dataset divides its samples.
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
            shares = _share_count(resharder.rank_shares, frame.f_locals)
            if shares > 1 and topology.world_size * shares > processes:
                raise _error(resharder, shares, "rank")
        # The dataset has already divided its samples among all workers of the rank.
        if topology.workers > 1:
            shares = _share_count(resharder.worker_shares, frame.f_locals)
            if shares > 1:
                raise _error(resharder, shares, "worker")


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the call stack, from the caller's frame outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_called_by_stateful_loader() -> bool:
    """Return True if torchdata's StatefulDataLoader is on the call stack.

    This matters since the loader's own state records the end of an iteration.
    """
    modules = (str(frame.f_globals.get("__name__")) for frame in _frames())
    return any(module.startswith("torchdata.") for module in modules)


def replicas_of_sampler_asking_length() -> int | None:
    """Return the number of ranks of the DistributedSampler that calls a dataset's `__len__`.

    To be called by this `__len__`. Returns None if its caller is not a DistributedSampler's
    constructor.
    """
    # Frame 0 is this function's, frame 1 that of the dataset's own `__len__`.
    caller = sys._getframe(2)
    if caller.f_code.co_qualname != "DistributedSampler.__init__":
        return None
    replicas: int | None = caller.f_locals["self"].num_replicas
    return replicas


def _share_count(count_shares: ShareCounter, variables: Variables) -> int:
    """Return the number of shares that a wrapper makes, from the variables of its frame."""
    try:
        return count_shares(variables)
    except (KeyError, AttributeError):
        # This release of the other project keeps the number elsewhere. The number is assumed to be
        # 2, since nobody uses a wrapper that divides nothing.
        return 2


def _error(resharder: Resharder, shares: int, reader: str) -> ConfigError:
    """Return the error for a wrapper that divides samples a second time.

    Args:
        resharder: the wrapper.
        shares: number of shares that it makes.
        reader: "rank" or "worker": what each share is for.
    """
    return ConfigError(
        f"the samples are sharded a second time: {resharder.name} passes on one of {shares} "
        f"shares of the samples that this {reader} reads, and drops the rest",
        remedy=resharder.remedy,
    )
