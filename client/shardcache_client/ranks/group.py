"""The ranks that read one dataset together, as far as a process knows of them without torch.

Other projects divide a model among ranks, or samples a second time. Whoever has a mesh has imported torch.
"""

import gc
import secrets
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

from shardcache.errors import ConfigError
from shardcache_client.order.manifest import Manifest
from shardcache_client.order.rounds import Topology
from shardcache_client.ranks.environment import ranks_of_environment
from shardcache_client.stages.stage import Agree

_DATA = {"dp", "ddp", "fsdp", "hsdp", "data", "replicate", "replica", "shard", "batch", "world"}
_DATA |= {"ep", "efsdp"}  # ranks that hold other experts have samples of their own
_MODEL = {"tp", "pp", "cp", "sp", "mp", "tensor", "pipeline", "pipe", "stage", "context", "sequence", "model"}

_searched: dict[type, tuple[int, list[weakref.ref[Any]]]] = {}
"""By class, the number of references to it and its instances when none was wanted."""


class MeshRanks:
    """This process's place among the ranks of a DeviceMesh, row-major, or of a ProcessGroup, as of each call.

    A mesh cannot be pickled: a worker keeps the place of the process that started it.

    Raises TypeError for anything else; ConfigError for dimensions that divide a model, and where this process is not a
    member.
    """

    def __init__(self, mesh: Any) -> None:
        _members(mesh)
        self._mesh = mesh
        self._kept: tuple[tuple[int, ...], int] | None = None

    @classmethod
    def of(cls, mesh: Any) -> "MeshRanks":
        """Return the ranks of a mesh, which may have been converted already."""
        return mesh if isinstance(mesh, MeshRanks) else cls(mesh)

    def __repr__(self) -> str:
        return f"MeshRanks{self._resolved()[0]}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeshRanks) and self._resolved()[0] == other._resolved()[0]

    def __hash__(self) -> int:
        return hash(self._resolved()[0])

    def __getstate__(self) -> dict[str, Any]:
        return {"_mesh": None, "_kept": self._resolved()}

    @property
    def ranks(self) -> Topology:
        """Rank of this process in the mesh."""
        members, rank = self._resolved()
        if rank not in members:
            remedy = "give each rank the part of the mesh, or the process group, that it belongs to"
            raise ConfigError(f"mesh has the ranks {members}, and this process is rank {rank}", remedy=remedy)
        return Topology(members.index(rank), len(members))

    def _resolved(self) -> tuple[tuple[int, ...], int]:
        """Return the members' ranks in the job, in the order of their shares, and this process's."""
        return self._kept or (_members(self._mesh), sys.modules["torch.distributed"].get_rank())


def given_ranks(mesh: MeshRanks | None, rank: int | None, world_size: int | None) -> Topology | MeshRanks | None:
    """Return the ranks that the caller named, None if it named none. Raises ConfigError for an invalid choice."""
    if rank is None and world_size is None:
        return mesh
    if mesh is not None:
        raise ConfigError("mesh is given, and rank and world_size as well", remedy="give mesh alone")
    if rank is None or world_size is None:
        raise ConfigError(
            f"rank is {rank} and world_size is {world_size}", remedy="pass both, or neither to detect them"
        )
    return Topology(rank, world_size)


def _members(mesh: Any) -> tuple[int, ...]:
    if hasattr(mesh, "mesh_dim_names") and not isinstance(mesh, type):
        if shared := [name for name in _dimensions(mesh) if _words(name) & _MODEL]:
            raise ConfigError(
                f"the ranks of the mesh's dimension {shared[0]!r} train on the same samples, and mesh= would divide "
                "the samples among them",
                remedy=f"give the other dimensions: {_line(mesh)}",
            )
        return tuple(mesh.mesh.flatten().tolist())
    distributed: Any = sys.modules.get("torch.distributed")
    if not isinstance(mesh, getattr(distributed, "ProcessGroup", ())):
        raise TypeError
    return tuple(distributed.get_process_group_ranks(mesh))


def _words(name: str) -> set[str]:
    return set(name.lower().split("_"))


def _dimensions(mesh: Any) -> list[str]:
    """Return the names of the dimensions with more than one rank."""
    sizes = zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=False)
    return [name for name, size in sizes if size > 1]


def _line(mesh: Any, name: str = "mesh") -> str:
    """Return the argument that divides samples over the mesh's dimensions of data."""
    data = [f'"{each}"' for each in mesh.mesh_dim_names if _words(each) & _DATA and not _words(each) & _MODEL]
    if data or not any(_words(each) & _MODEL for each in mesh.mesh_dim_names):
        return f"mesh={name}[{', '.join(data) or 'the names of its dimensions of data'}]"
    return "rank=0, world_size=1"


def refuse_model_parallelism() -> None:
    """Raise ConfigError with the line to write if this process divides a model, and so shares samples with others."""
    for found, line in _divided_models():
        raise ConfigError(
            f"this process has {found}: ranks that hold parts of one model must train on the same samples, and the "
            "dataset would give each rank samples of its own",
            remedy=f"name the ranks that have different samples: ShardDataset(..., {line})",
        )


def _divided_models() -> Iterator[tuple[str, str]]:
    """Yield a description of what divides a model, and the argument to give."""
    yield from _megatron(sys.modules.get("megatron.core.parallel_state"))
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    yield from _accelerate(getattr(state, "_shared_state", {}))
    meshes = _instances("torch.distributed.device_mesh", "DeviceMesh", _divides_model)
    # torchtitan names the data of its loaders "batch"; the "fsdp" of its other mesh has the ranks of "cp" as well.
    for mesh in sorted(meshes, key=lambda mesh: ("batch" in mesh.mesh_dim_names, mesh.ndim), reverse=True):
        yield f"a DeviceMesh with the dimensions {mesh.mesh_dim_names}", _line(mesh)
    models = _instances(
        "transformers.modeling_utils", "PreTrainedModel", lambda model: (getattr(model, "tp_size", None) or 1) > 1
    )
    for model in models:
        yield f"a model that a tp_plan divides among {model.tp_size} ranks", "rank=0, world_size=1"


def _megatron(state: Any) -> Iterator[tuple[str, str]]:
    if state is None or not state.model_parallel_is_initialized():
        return
    if state.get_data_parallel_world_size() < sys.modules["torch.distributed"].get_world_size():
        yield "Megatron's model parallelism", "mesh=parallel_state.get_data_parallel_group()"


def _accelerate(state: Any) -> Iterator[tuple[str, str]]:
    config, mesh = state.get("parallelism_config"), state.get("device_mesh")
    shared = getattr(config, "non_data_parallel_size", 1)
    if shared > 1:
        place = f"rank=accelerator.process_index // {shared}, world_size=accelerator.num_processes // {shared}"
        line = place if mesh is None else _line(mesh, "accelerator.torch_device_mesh")
        yield "Accelerate's ParallelismConfig", line


def _divides_model(mesh: Any) -> bool:
    """Return True for a dimension that is not data. One that joins both, such as "dp_cp", is there without "cp" too."""
    # A mesh of one dimension may be for anything, such as "loss", unless it is named as a model's.
    words = [_words(name) for name in _dimensions(mesh)]
    return any(not each & _DATA and (mesh.ndim > 1 or each & _MODEL) for each in words)


def _instances(module: str, name: str, wanted: Callable[[Any], bool]) -> list[Any]:
    """Return the instances of a class, if its module is imported, that are wanted."""
    cls = getattr(sys.modules.get(module), name, None)
    if cls is None:
        return []
    classes = list(_with_subclasses(cls))
    # An instance refers to its class: if no reference is new and no instance has gone, no instance is new.
    references, (known, seen) = sum(map(sys.getrefcount, classes)), _searched.get(cls, (0, []))
    if known == references and all(instance() is not None for instance in seen):
        return []

    def search() -> list[Any]:
        return [each for each in gc.get_referrers(*classes) if cls in type(each).__mro__]

    found = search()
    if any(map(wanted, found)):
        del found
        gc.collect()  # it may be garbage
        return list(filter(wanted, search()))
    _searched[cls] = references, list(map(weakref.ref, found))
    return []


def _with_subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _with_subclasses(subclass)


# A wrapper of another project that divides samples which the dataset has divided already: each rank and each worker has
# its own, and one that passes on one of every N of those silently loses the others. It is found on the call stack: its
# frame is there whenever it requests a sample. A forked DataLoader worker has its parent's frames below its own, so a
# wrapper around the loader is found there as well.

Variables = Mapping[str, Any]
Shares = Callable[[Variables], int]


class Resharder(NamedTuple):
    """A function of another project that passes on one share of the samples it reads."""

    name: str  # name that its users know
    remedy: str  # remedy of the error
    ranks: Shares = lambda _: 1  # returns the number of shares for ranks, from the local variables of its frame
    workers: Shares = lambda _: 1  # returns the number of shares for a rank's workers, likewise


def _processes(variables: Variables) -> int:
    return int(variables["self"].num_processes)


def _workers_per_shard(variables: Variables) -> int:
    """Return 1 if each worker has a shard of its own; otherwise, some of them would read nothing."""
    return int(-(-variables["worker_info"].num_workers // max(1, variables["self"].num_shards)))


def _shares_of_all(variables: Variables) -> int:
    """Return the number of shares for all workers of all ranks."""
    return int(variables["self"].num_of_instances)


_ACCELERATE = (
    "do not pass this loader to accelerator.prepare(), and move its batches to accelerator.device; with transformers, "
    "use shardcache_client.transformers.ShardTrainer in place of Trainer; or give the dataset "
    "rank=0, world_size=1, so that every process reads all samples and keeps its share"
)
_STAGE = "remove the stage: ranks and workers have their own samples already"
_DATASETS = (
    "read without datasets.IterableDataset, whose .map() becomes decode=; or give it a ShardReader for each of its "
    "shards, reader i of n with rank=i and world_size=n"
)

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
        "torch's sharding_filter", _STAGE, ranks=_shares_of_all, workers=_shares_of_all
    ),
}


def refuse_resharding(topology: Topology, processes: int) -> None:
    """Raise ConfigError if a wrapper on the call stack would lose samples.

    A second division is right as long as it makes no more shares than the job has processes: for example, of a dataset
    divided among nodes, whose processes then divide the node's share. `topology` is the dataset's own division.
    """
    if topology.readers == 1:
        return
    for frame in _frames():
        found = _RESHARDERS.get((frame.f_globals.get("__name__", ""), frame.f_code.co_qualname))
        if found is None:
            continue
        if topology.world_size > 1:
            shares = _count(found.ranks, frame.f_locals)
            if topology.world_size * shares > max(processes, topology.world_size):
                raise _error(found, shares, "rank")
        if topology.workers > 1 and (shares := _count(found.workers, frame.f_locals)) > 1:
            raise _error(found, shares, "worker")


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the call stack from the caller's on, outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def stateful_loader_asks() -> bool:
    """Return True if the caller is torchdata's StatefulDataLoader, whose own state records the end of an iteration."""
    return any(str(frame.f_globals.get("__name__")).startswith("torchdata.") for frame in _frames())


def replicas_of_sampler_asking_length() -> int | None:
    """Return the number of ranks of the DistributedSampler whose constructor calls a dataset's `__len__`."""
    asking = sys._getframe(2)  # 0 is this function, 1 the dataset's own `__len__`
    found = asking.f_code.co_qualname == "DistributedSampler.__init__"
    return asking.f_locals["self"].num_replicas if found else None


def _count(shares: Shares, variables: Variables) -> int:
    try:
        return shares(variables)
    except (KeyError, AttributeError):
        return 2  # a release that keeps the number elsewhere; the wrapper would not be in use to pass on everything


def _error(resharder: Resharder, shares: int, reader: str) -> ConfigError:
    return ConfigError(
        f"the samples are sharded a second time: {resharder.name} passes on one of {shares} shares of the samples that "
        f"this {reader} reads, and the rest is lost",
        remedy=resharder.remedy,
    )


class Epochs:
    """One rank's count of epochs, by itself: its iterations read one epoch after another."""

    def follows(self, epoch: int, left: int, *, is_held: bool = False) -> int:
        """Return the epoch after `left`, which this rank has ended early; `epoch` by its own count. May block.

        With `is_held`, the iterator of `left` still exists, and may be read on: this does not block.
        """
        return epoch

    def begin(self, epoch: int | None) -> None:
        """Note that this rank reads an epoch, beyond a look; None for one that was set."""

    def leave(self, epoch: int) -> None:
        """Note that this rank has ended an epoch early."""

    def end(self, epoch: int) -> None:
        """Note that this rank has read an epoch to its end."""


class RankGroup:
    """Ranks that know their number and share nothing: each resolves its own manifest and counts its own epochs."""

    settled = False  # True if all ranks have the manifest of rank 0

    def __init__(self, given: Topology | MeshRanks | None) -> None:
        self.given = given  # the ranks that the user named; None for the launcher's

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.topology()!r})"

    @property
    def ranks(self) -> Topology:
        """Rank for which this process reads."""
        return self.given.ranks if isinstance(self.given, MeshRanks) else self.given or self.ranks_of_job

    @property
    def alone(self) -> bool:
        """True if no other process has to agree with this one: ranks outside of a mesh do."""
        return (self.given if isinstance(self.given, Topology) else self.ranks_of_job).world_size == 1

    @property
    def ranks_of_job(self) -> Topology:
        """Rank of the process in its job, whatever the user named."""
        return ranks_of_environment()

    def refuse_resharding(self) -> None:
        """Raise ConfigError if samples are divided a second time, or among ranks that must read the same ones."""
        if self.given is None and not self.alone:
            refuse_model_parallelism()
        processes = self.ranks if isinstance(self.given, MeshRanks) else self.ranks_of_job
        refuse_resharding(self.topology(), processes.world_size)

    def topology(self) -> Topology:
        """Return the place of this process among the readers of the job, as of now."""
        return self.ranks

    def settle(self, resolve: Callable[[], Manifest]) -> Manifest:
        """Return the manifest for all ranks, which `resolve` makes."""
        return resolve()

    def draw_seed(self) -> int:
        """Return a random seed, the same on all ranks. Raises ConfigError if they cannot agree on one."""
        if self.ranks.world_size > 1:
            raise ConfigError(
                f"seed=None would be another seed on each of {self.ranks.world_size} ranks, which share no store",
                remedy="give a seed; or initialise torch.distributed before creating the ShardDataset",
            )
        return secrets.randbits(32)

    def compare(self, manifest: Manifest, *, counted: bool) -> None:
        """Raise ManifestMismatchError if another rank is known to read other shards."""

    def compare_options(self, options: Mapping[str, object]) -> None:
        """Raise RanksError if another rank is known to have other options of the order."""

    def of_copy(self, name: str = "") -> "RankGroup":
        """Return the group of a copy of the dataset, with epochs of its own, known by name or else by order."""
        return self

    def agreements(self, what: str, timeout_s: float) -> Callable[[Topology], Agree]:
        """Return how a reader agrees with those of the same worker of all other ranks, for one iteration.

        All ranks call this in the same order. The function raises ConfigError if there is nothing over which to agree.

        Args:
            what: is agreed on, in words that are the same on all ranks.
            timeout_s: how long a reader waits for the others.
        """
        return _agreement_of_one

    def epochs(self, batches: Mapping[str, object]) -> Epochs:
        """Return the count of epochs that all ranks agree on, if they also agree on these options."""
        return Epochs()


def _agreement_of_one(reader: Topology) -> Agree:
    if reader.world_size > 1:
        raise ConfigError(
            f"{reader.world_size} ranks that share no key-value store cannot agree on how many items each gets",
            remedy="use a ShardDataset, in a job of torch.distributed",
        )
    return _own_value


def _own_value(name: str, value: int) -> int:
    return value
