"""This process's rank in torch.distributed."""

import torch.distributed

from shardcache_client.order.topology import Topology


def ranks() -> Topology | None:
    """Return torch.distributed's rank and world size; None if it is not initialised.

    It is also initialised in a process that was forked after the initialisation.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Topology(torch.distributed.get_rank(), torch.distributed.get_world_size())
    return None
