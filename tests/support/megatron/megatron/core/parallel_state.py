"""The part of Megatron's module of this name that data loaders use, over torch's own process groups."""

from typing import Any

import torch.distributed as dist

_data_group: dist.ProcessGroup | None = None


def initialize_model_parallel(tensor_model_parallel_size: int) -> None:
    """Make groups of neighbours, which divide a model, and groups of those with the same part of it."""
    global _data_group
    ranks, parts = list(range(dist.get_world_size())), tensor_model_parallel_size
    subgroups: Any = dist.new_subgroups_by_enumeration
    subgroups([ranks[i : i + parts] for i in range(0, len(ranks), parts)])
    _data_group, _ = subgroups([ranks[part::parts] for part in range(parts)])


def model_parallel_is_initialized() -> bool:
    """Return True once there are groups."""
    return _data_group is not None


def get_data_parallel_group() -> dist.ProcessGroup:
    """Return the group of the ranks with samples of their own."""
    assert _data_group is not None
    return _data_group


def get_data_parallel_world_size() -> int:
    """Return the number of ranks in that group."""
    return dist.get_world_size(get_data_parallel_group())
