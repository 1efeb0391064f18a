"""Detection of models that are divided among ranks, which must then train on the same samples."""

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from shardcache.errors import ConfigError
from shardcache_client.ranks.mesh import DATA_WORDS, MODEL_WORDS, argument_for, dimensions, words_of

_searched: dict[type, tuple[int, list[weakref.ref[Any]]]] = {}
"""By class: number of references to it, and its instances, at the last search without a match."""


def refuse_model_parallelism() -> None:
    """Raise ConfigError if this process holds a part of a model, and so shares samples with others.

    The error names the argument that divides samples among the right ranks.
    """
    for division, argument in _divided_models():
        raise ConfigError(
            f"this process has {division}: ranks that hold parts of one model must train on the "
            "same samples, and the dataset would give each rank samples of its own",
            remedy=f"name the ranks that have different samples: ShardDataset(..., {argument})",
        )


def _divided_models() -> Iterator[tuple[str, str]]:
    """Yield a description of what divides a model, and the argument to give."""
    yield from _megatron(sys.modules.get("megatron.core.parallel_state"))
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    yield from _accelerate(getattr(state, "_shared_state", {}))
    meshes = _instances("torch.distributed.device_mesh", "DeviceMesh", _divides_model)
    for mesh in sorted(meshes, key=_likelihood, reverse=True):
        yield f"a DeviceMesh with the dimensions {mesh.mesh_dim_names}", argument_for(mesh)
    for model in _instances("transformers.modeling_utils", "PreTrainedModel", _is_tensor_parallel):
        yield f"a model that a tp_plan divides among {model.tp_size} ranks", "rank=0, world_size=1"


def _likelihood(mesh: Any) -> tuple[bool, int]:
    """Return a key by which meshes are sorted: higher if samples are likelier divided by this one.

    torchtitan has two. Samples are divided by the one with a dimension "batch"; the "fsdp" of the
    other one includes the ranks of "cp", which train on the same samples.
    """
    return "batch" in mesh.mesh_dim_names, mesh.ndim


def _is_tensor_parallel(model: Any) -> bool:
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
    shared = getattr(config, "non_data_parallel_size", 1)
    if shared <= 1:
        return
    mesh = state.get("device_mesh")
    if mesh is None:
        argument = (
            f"rank=accelerator.process_index // {shared}, "
            f"world_size=accelerator.num_processes // {shared}"
        )
    else:
        argument = argument_for(mesh, "accelerator.torch_device_mesh")
    yield "Accelerate's ParallelismConfig", argument


def _divides_model(mesh: Any) -> bool:
    """Return True for a mesh with a dimension that is not data.

    One that joins data and model, such as "dp_cp", counts as data: programs that do not use "cp"
    have it, too.
    """
    for name in dimensions(mesh):
        words = words_of(name)
        if words & DATA_WORDS:
            continue
        # A mesh of one dimension may be for anything, such as "loss", unless it is named as a
        # model's.
        if mesh.ndim > 1 or words & MODEL_WORDS:
            return True
    return False


def _instances(module: str, name: str, wanted: Callable[[Any], bool]) -> list[Any]:
    """Return the wanted instances of a class; none if its module is not imported."""
    cls = getattr(sys.modules.get(module), name, None)
    if cls is None:
        return []
    classes = list(_with_subclasses(cls))
    # An instance refers to its class: if no reference is new and no instance has gone, no instance
    # is new.
    references = sum(map(sys.getrefcount, classes))
    references_before, instances_before = _searched.get(cls, (0, []))
    none_has_gone = all(instance() is not None for instance in instances_before)
    if references == references_before and none_has_gone:
        return []

    def search() -> list[Any]:
        return [each for each in gc.get_referrers(*classes) if cls in type(each).__mro__]

    instances = search()
    if any(map(wanted, instances)):
        # Some may be garbage: drop the references here, collect it, and search again.
        del instances
        gc.collect()
        return list(filter(wanted, search()))
    _searched[cls] = (references, list(map(weakref.ref, instances)))
    return []


def _with_subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _with_subclasses(subclass)
