"""Detection of models that are divided among ranks, which must then train on the same samples.

By default the dataset gives each rank samples of its own, which is wrong for such ranks. So before
it reads, it looks for signs of model parallelism in the process: the state of Megatron and
Accelerate, DeviceMesh objects, and tensor-parallel models of transformers.
"""

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from shardcache.errors import ConfigError
from shardcache_client.ranks.mesh import DATA_WORDS, MODEL_WORDS, argument_for, dimensions, words_of


class _Search(NamedTuple):
    """A search for a class's instances.

    Attributes:
        references: number of references to the class and its subclasses at the time.
        instances: the instances that existed.
    """

    references: int
    instances: list[weakref.ref[Any]]


_vain_searches: dict[type, _Search] = {}
"""For each class, the last search for its instances that found none with a divided model."""


def refuse_model_parallelism() -> None:
    """Raise ConfigError if this process holds a part of a model, and so shares samples with others.

    The error names the argument that divides samples among the right ranks.
    """
    found = next(_divided_models(), None)
    if found is None:
        return
    division, argument = found
    raise ConfigError(
        f"this process has {division}: ranks that hold parts of one model must train on the "
        "same samples, and the dataset would give each rank samples of its own",
        remedy=f"name the ranks that have different samples: ShardDataset(..., {argument})",
    )


def _divided_models() -> Iterator[tuple[str, str]]:
    """Yield pairs: a description of a division of a model, and the argument that the user needs."""
    yield from _megatron(sys.modules.get("megatron.core.parallel_state"))
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    yield from _accelerate(getattr(state, "_shared_state", {}))
    meshes = _instances("torch.distributed.device_mesh", "DeviceMesh", _divides_model)
    for mesh in sorted(meshes, key=_likelihood, reverse=True):
        yield f"a DeviceMesh with the dimensions {mesh.mesh_dim_names}", argument_for(mesh)
    for model in _instances("transformers.modeling_utils", "PreTrainedModel", _is_tensor_parallel):
        yield f"a model that a tp_plan divides among {model.tp_size} ranks", "rank=0, world_size=1"


def _likelihood(mesh: Any) -> tuple[bool, int]:
    """Return a key for sorting meshes, higher for a mesh that more likely divides samples.

    torchtitan has two meshes. Samples are divided by the mesh with a dimension "batch". The
    dimension "fsdp" of the other mesh includes the ranks of "cp", which train on the same samples.
    """
    return "batch" in mesh.mesh_dim_names, mesh.ndim


def _is_tensor_parallel(model: Any) -> bool:
    """Return True if a model of transformers is divided among ranks."""
    ranks = getattr(model, "tp_size", None) or 1
    return ranks > 1


def _megatron(state: Any) -> Iterator[tuple[str, str]]:
    """Yield Megatron's division of the model, given its module `parallel_state`."""
    if state is None or not state.model_parallel_is_initialized():
        return
    processes = sys.modules["torch.distributed"].get_world_size()
    if state.get_data_parallel_world_size() < processes:
        yield "Megatron's model parallelism", "mesh=parallel_state.get_data_parallel_group()"


def _accelerate(state: Any) -> Iterator[tuple[str, str]]:
    """Yield Accelerate's division of the model, given the fields of its `AcceleratorState`."""
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
    yield "Accelerate's ParallelismConfig", argument


def _divides_model(mesh: Any) -> bool:
    """Return True for a mesh with a dimension whose ranks have the same samples.

    A dimension that joins both kinds, for example "dp_cp", is not counted: programs that do not use
    "cp" also have it.
    """
    for name in dimensions(mesh):
        words = words_of(name)
        if words & DATA_WORDS:
            continue
        # A mesh with a single dimension may have any purpose, such as "loss". It counts only if
        # its name says that the dimension divides a model.
        if mesh.ndim > 1 or words & MODEL_WORDS:
            return True
    return False


def _instances(module: str, name: str, wanted: Callable[[Any], bool]) -> list[Any]:
    """Return the instances of a class that satisfy `wanted`; none if its module is not imported.

    Args:
        module: name of the class's module.
        name: name of the class.
        wanted: returns True for an instance to return.
    """
    cls = getattr(sys.modules.get(module), name, None)
    if cls is None:
        return []
    classes = list(_with_subclasses(cls))
    # The search is slow, so it is skipped if there can be no new instances. Every instance refers
    # to its class: so if the number of references is the same and no instance has gone, there are
    # no new instances.
    references = sum(map(sys.getrefcount, classes))
    before = _vain_searches.get(cls, _Search(0, []))
    none_has_gone = all(instance() is not None for instance in before.instances)
    if references == before.references and none_has_gone:
        return []

    def search() -> list[Any]:
        """Return all instances of the class and its subclasses."""
        return [each for each in gc.get_referrers(*classes) if cls in type(each).__mro__]

    instances = search()
    if any(map(wanted, instances)):
        # Some of the instances may be garbage. The list of them is dropped, so that the garbage
        # collector can free these, and the search is repeated.
        del instances
        gc.collect()
        return list(filter(wanted, search()))
    _vain_searches[cls] = _Search(references, list(map(weakref.ref, instances)))
    return []


def _with_subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    """Yield a class and all of its subclasses."""
    yield cls
    for subclass in cls.__subclasses__():
        yield from _with_subclasses(subclass)
