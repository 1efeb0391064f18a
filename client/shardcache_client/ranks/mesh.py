"""The ranks of a DeviceMesh or a ProcessGroup, among which samples are divided.

A user whose model is divided among several ranks passes `mesh=`: the ranks that are to have
different samples, each of which gets one share of them. Words in the names of a DeviceMesh's
dimensions tell whether their ranks are to have different samples, as in "dp", or the same, as in
"tp".
"""

import sys
from typing import Any, NamedTuple

from shardcache.shared.exceptions import ConfigError
from shardcache_client.order.topology import Topology

DATA_WORDS = {
    "dp",
    "ddp",
    "fsdp",
    "hsdp",
    "data",
    "replicate",
    "replica",
    "shard",
    "batch",
    "world",
    # Ranks that hold different experts have different samples.
    "ep",
    "efsdp",
}
"""Words in the names of dimensions whose ranks have different samples."""

MODEL_WORDS = {
    "tp",
    "pp",
    "cp",
    "sp",
    "mp",
    "tensor",
    "pipeline",
    "pipe",
    "stage",
    "context",
    "sequence",
    "model",
}
"""Words in the names of dimensions whose ranks hold parts of one model."""


class _Membership(NamedTuple):
    """A process and the members of a mesh, to which the process may belong.

    Attributes:
        members: ranks of the members in the job; the first member reads the first share.
        rank: rank of the process in the job.
    """

    members: tuple[int, ...]
    rank: int


class MeshRanks:
    """This process's rank among the members of a mesh, determined at each call.

    A mesh itself cannot be pickled. A pickled object of this class keeps the rank that the process
    had, so a DataLoader worker has the rank of the process that started it.

    Args:
        mesh: a DeviceMesh, whose ranks are taken row by row, or a ProcessGroup.

    Raises:
        TypeError: `mesh` is anything else.
        ConfigError: a dimension divides a model, or this process is not a member of the mesh.
    """

    def __init__(self, mesh: Any) -> None:
        _members_of(mesh)  # raises for an invalid argument
        self._mesh = mesh
        # In a worker, the membership of the process that started the worker.
        self._inherited: _Membership | None = None

    @classmethod
    def of(cls, mesh: Any) -> "MeshRanks":
        """Return the ranks of a mesh, or `mesh` itself if it is an object of this class."""
        if isinstance(mesh, MeshRanks):
            return mesh
        return cls(mesh)

    def __repr__(self) -> str:
        return f"MeshRanks{self._membership().members}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MeshRanks):
            return False
        return self._membership().members == other._membership().members

    def __hash__(self) -> int:
        return hash(self._membership().members)

    def __getstate__(self) -> dict[str, Any]:
        return {"_mesh": None, "_inherited": self._membership()}

    @property
    def ranks(self) -> Topology:
        """This process's rank among the members of the mesh, and their number.

        Raises ConfigError if this process is not a member.
        """
        members, rank = self._membership()
        if rank not in members:
            raise ConfigError(
                f"mesh has the ranks {members}, and this process is rank {rank}",
                remedy="give each rank the part of the mesh, or the process group, that it belongs "
                "to",
            )
        return Topology(members.index(rank), len(members))

    def _membership(self) -> _Membership:
        """Return the membership of this process, or of the one that started this worker."""
        if self._inherited is not None:
            return self._inherited
        members = _members_of(self._mesh)
        return _Membership(members, rank=sys.modules["torch.distributed"].get_rank())


def given_ranks(
    mesh: MeshRanks | None,
    rank: int | None,
    world_size: int | None,
) -> Topology | MeshRanks | None:
    """Return the ranks that the caller named; None if the caller named none.

    Raises ConfigError if only one of `rank` and `world_size` is given, or `mesh` in addition.
    """
    if rank is None and world_size is None:
        return mesh
    if mesh is not None:
        raise ConfigError(
            "mesh cannot be combined with rank and world_size",
            remedy="give only mesh",
        )
    if rank is None or world_size is None:
        raise ConfigError(
            f"rank is {rank} and world_size is {world_size}",
            remedy="pass both, or neither to detect them",
        )
    return Topology(rank, world_size)


def _members_of(mesh: Any) -> tuple[int, ...]:
    """Return the ranks in the job of a mesh's members.

    Raises ConfigError for a dimension that divides a model. Raises TypeError, to which the caller
    adds a message, if this is neither a mesh nor a process group.
    """
    # The class DeviceMesh has the attribute as well, but a class is not a mesh.
    is_device_mesh = hasattr(mesh, "mesh_dim_names") and not isinstance(mesh, type)
    if is_device_mesh:
        for name in divided_dimensions(mesh):
            if words_of(name) & MODEL_WORDS:
                raise ConfigError(
                    f"the ranks of the mesh's dimension {name!r} train on the same samples, and "
                    "mesh= would divide the samples among them",
                    remedy=f"give the other dimensions: {argument_for(mesh)}",
                )
        return tuple(mesh.mesh.flatten().tolist())
    # If torch is not imported, there is no class ProcessGroup, and `mesh` cannot be one.
    distributed: Any = sys.modules.get("torch.distributed")
    if not isinstance(mesh, getattr(distributed, "ProcessGroup", ())):
        raise TypeError
    return tuple(distributed.get_process_group_ranks(mesh))


def words_of(name: str) -> set[str]:
    """Return the words in the name of a dimension, in lower case."""
    return set(name.lower().split("_"))


def divided_dimensions(mesh: Any) -> list[str]:
    """Return the names of the dimensions that have more than one rank."""
    sizes = zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=False)
    return [name for name, size in sizes if size > 1]


def argument_for(mesh: Any, name: str = "mesh") -> str:
    """Return the arguments, as source text, that divide samples over a mesh's data dimensions.

    These are the dimensions whose ranks have different samples. If every dimension divides the
    model, all ranks have to read the same samples: each reads as if it were the only rank.

    Args:
        mesh: the mesh.
        name: name of the mesh in the user's program.
    """
    data_dimensions = []
    has_model_dimension = False
    for dimension in mesh.mesh_dim_names:
        words = words_of(dimension)
        if words & MODEL_WORDS:
            has_model_dimension = True
        elif words & DATA_WORDS:
            data_dimensions.append(f'"{dimension}"')

    if data_dimensions:
        return f"mesh={name}[{', '.join(data_dimensions)}]"
    if has_model_dimension:
        return "rank=0, world_size=1"
    return f"mesh={name}[the names of its dimensions of data]"
