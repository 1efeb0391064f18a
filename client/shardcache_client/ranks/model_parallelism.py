"""Detection of model parallelism: ranks that hold parts of one model need the same samples.

By default a dataset gives each rank different samples, which is wrong for these ranks. So before it
reads, it looks for signs of model parallelism in the process: the state of Megatron and Accelerate,
DeviceMesh objects, and tensor-parallel models of transformers.
"""

import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from shardcache.shared.exceptions import ConfigError
from shardcache_client.ranks.mesh import (
    DATA_WORDS,
    MODEL_WORDS,
    argument_for,
    divided_dimensions,
    words_of,
)


class _Division(NamedTuple):
    """A division of a model among ranks.

    Attributes:
        description: what the process has that shows the division.
        argument: the argument of a dataset, as source text, that divides samples correctly.
    """

    description: str
    argument: str


class _Search(NamedTuple):
    """A search for a class's instances.

    Attributes:
        references: number of references to the class and its subclasses at the time.
        instances: the instances that existed.
    """

    references: int
    instances: list[weakref.ref[Any]]


_fruitless_searches: dict[type, _Search] = {}
"""For each class, the last search that found no instance that shows a division of a model."""


def refuse_model_parallelism() -> None:
    """Raise ConfigError if this process holds a part of a model that is divided among ranks.

    The error names the argument that divides samples among the right ranks.
    """
    division = next(_divisions(), None)
    if division is None:
        return
    raise ConfigError(
        f"this process has {division.description}: ranks that hold parts of one model must train "
        "on the same samples, and the dataset would give each rank samples of its own",
        remedy="name the ranks that have different samples: "
        f"ShardDataset(..., {division.argument})",
    )


def _divisions() -> Iterator[_Division]:
    """Yield the divisions of models that this process shows."""
    yield from _megatron_divisions()
    yield from _accelerate_divisions()
    meshes = _instances("torch.distributed.device_mesh", "DeviceMesh", _divides_model)
    for mesh in sorted(meshes, key=_likelihood_of_dividing_samples, reverse=True):
        yield _Division(
            f"a DeviceMesh with the dimensions {mesh.mesh_dim_names}",
            argument_for(mesh),
        )
    for model in _instances("transformers.modeling_utils", "PreTrainedModel", _is_tensor_parallel):
        yield _Division(
            f"a model that a tp_plan divides among {model.tp_size} ranks",
            "rank=0, world_size=1",
        )


def _megatron_divisions() -> Iterator[_Division]:
    """Yield Megatron's division of the model, if there is one."""
    parallel_state: Any = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is None or not parallel_state.model_parallel_is_initialized():
        return
    processes = sys.modules["torch.distributed"].get_world_size()
    if parallel_state.get_data_parallel_world_size() < processes:
        yield _Division(
            "Megatron's model parallelism",
            "mesh=parallel_state.get_data_parallel_group()",
        )


def _accelerate_divisions() -> Iterator[_Division]:
    """Yield Accelerate's division of the model, if there is one."""
    accelerator_state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    state: dict[str, Any] = getattr(accelerator_state, "_shared_state", {})
    config = state.get("parallelism_config")
    ranks_per_model = getattr(config, "non_data_parallel_size", 1)
    if ranks_per_model <= 1:
        return
    mesh = state.get("device_mesh")
    if mesh is None:
        argument = (
            f"rank=accelerator.process_index // {ranks_per_model}, "
            f"world_size=accelerator.num_processes // {ranks_per_model}"
        )
    else:
        argument = argument_for(mesh, "accelerator.torch_device_mesh")
    yield _Division("Accelerate's ParallelismConfig", argument)


def _likelihood_of_dividing_samples(mesh: Any) -> tuple[bool, int]:
    """Return a key for sorting meshes, greater for a mesh that more likely divides samples.

    torchtitan has two meshes. The mesh with a dimension "batch" divides samples. In the other mesh,
    the dimension "fsdp" includes the ranks of "cp", which train on the same samples.
    """
    return "batch" in mesh.mesh_dim_names, mesh.ndim


def _is_tensor_parallel(model: Any) -> bool:
    """Return True if a model of transformers is divided among ranks."""
    ranks = getattr(model, "tp_size", None) or 1
    return ranks > 1


def _divides_model(mesh: Any) -> bool:
    """Return True for a mesh with a dimension that divides a model.

    A dimension that joins both kinds, for example "dp_cp", does not count: programs that do not use
    "cp" also have it.
    """
    for name in divided_dimensions(mesh):
        words = words_of(name)
        if words & DATA_WORDS:
            continue
        # The only dimension of a mesh may have any purpose, such as "loss". It counts only if its
        # name says that it divides a model.
        if mesh.ndim > 1 or words & MODEL_WORDS:
            return True
    return False


def _instances(module: str, name: str, is_wanted: Callable[[Any], bool]) -> list[Any]:
    """Return the instances of a class that satisfy `is_wanted`; none if the class is not imported.

    Args:
        module: name of the class's module.
        name: name of the class.
        is_wanted: returns True for an instance to return.
    """
    cls = getattr(sys.modules.get(module), name, None)
    if cls is None:
        return []
    classes = list(_with_subclasses(cls))
    # The search is slow, so it is skipped if there can be no new instances. Every instance refers
    # to its class. So if there are as many references as at the last search, and all instances that
    # it found still exist, there are no new ones.
    references = sum(map(sys.getrefcount, classes))
    last_search = _fruitless_searches.get(cls, _Search(0, []))
    all_exist = all(instance() is not None for instance in last_search.instances)
    if references == last_search.references and all_exist:
        return []

    instances = _all_instances(classes)
    if not any(map(is_wanted, instances)):
        _fruitless_searches[cls] = _Search(references, list(map(weakref.ref, instances)))
        return []
    # Some of the instances may be garbage. Without this list of them, the garbage collector can
    # free these, and the second search does not find them.
    del instances
    gc.collect()
    return list(filter(is_wanted, _all_instances(classes)))


def _all_instances(classes: Sequence[type[Any]]) -> list[Any]:
    """Return all instances of a class and its subclasses, given the class first."""
    cls = classes[0]
    return [each for each in gc.get_referrers(*classes) if cls in type(each).__mro__]


def _with_subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    """Yield a class and all of its subclasses."""
    yield cls
    for subclass in cls.__subclasses__():
        yield from _with_subclasses(subclass)
