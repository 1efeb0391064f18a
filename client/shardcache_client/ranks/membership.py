"""A process's place among the readers of its job: its rank, and its worker id in a DataLoader."""

from __future__ import annotations

from typing import Any

from torch.utils.data import get_worker_info

from shardcache_client.ranks import distributed
from shardcache_client.topology import Ranks, Topology, ranks_of_environment, ranks_of_ray_train


def in_worker() -> bool:
    """Return True in a DataLoader worker."""
    return get_worker_info() is not None


class Membership:
    """This process's place in the job, determined at each call, as datasets are created before their worker processes.

    Can be pickled for workers.
    """

    def __init__(self) -> None:
        self._inherited: Ranks | None = None

    def __repr__(self) -> str:
        return f"Membership({self.ranks_of_job!r})"

    @property
    def ranks_of_job(self) -> Ranks:
        """Rank of the process by torch.distributed, Ray Train or else the launcher, whatever the user named."""
        # A spawned worker has no torch.distributed and reads for the process that started it.
        inherited = self._inherited if in_worker() else None
        return distributed.ranks() or inherited or ranks_of_ray_train() or ranks_of_environment()

    def topology(self, ranks: Ranks) -> Topology:
        """Return the place of this process, which reads for a rank, among the readers of the job, as of now."""
        worker = get_worker_info()
        if worker is None:
            return Topology(ranks.rank, ranks.world_size)
        return Topology(ranks.rank, ranks.world_size, worker.id, worker.num_workers)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_inherited": distributed.ranks() or ranks_of_ray_train()}
