"""`ShardDataset`: tar shards as a PyTorch dataset. The only module of the package that imports torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed
from torch.utils.data import IterableDataset, get_worker_info

from shardcache.errors import ConfigError
from shardcache.protocol import ShardRef, socket_path
from shardcache_client.connection import Reader, resolve
from shardcache_client.cutting import Sample
from shardcache_client.epoch import SharedEpoch
from shardcache_client.handlers import Handler, reraise
from shardcache_client.order import epoch_order, plan_reading, rank_share
from shardcache_client.session import Patience
from shardcache_client.sessions import Sessions
from shardcache_client.stream import EpochStream
from shardcache_client.topology import Ranks, Topology, explicit_ranks, job_name, ranks_of_environment

log = logging.getLogger("shardcache")


class ShardDataset(IterableDataset[Sample]):
    """The samples of tar shards, read from the local disk where this node's daemon keeps them.

    Yields dicts: `__key__` and `__url__` (str), and the bytes of each member by its extension. Whole shards are
    dealt to the ranks of the job and the DataLoader workers of each rank, so that each sample is read exactly once
    an epoch over all of them; ranks may therefore get different numbers of samples.

    Args:
        urls: a brace pattern, glob, prefix ending in "/", index file (.json, wids format), or a list of these.
        shuffle: read the shards in another order each epoch, a function of `seed` and the epoch alone.
        seed: must be the same on all ranks.
        on_error: called with the error of one shard or sample; returns True to go on without it, False to end the
            epoch here, or raises. See `handlers`.
        job: the name under which `shardcache status` shows this job. Default: Slurm's or torchrun's, or the script.
        socket: the daemon's. Default: as in `shardcache serve`.
        rank, world_size: of this process. Default: torch.distributed's where it is initialised, else torchrun's or
            Slurm's variables, else a single process. Found out when iteration begins.
        timeout_s: how long to wait for one shard, or for a daemon that went away to come back.
        partial_reads: give samples of a plain tar that is waited for as their bytes arrive and are checked. Should the
            rest of such a shard fail, its error says which samples had been given already, and its `yielded` how many.
            False: give none before the whole shard has arrived and passed every check.

    Attributes:
        manifest: the shards, in the order of `urls`, with sizes and sample counts as far as they are known.

    Raises:
        NoDaemonError, DaemonError, VersionMismatchError: the daemon cannot be talked to.
        NotFoundError, AccessDeniedError, NotAllowedError, OriginError: what the store says about `urls`.
        ConfigError: an argument makes no sense.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        shuffle: bool = False,
        seed: int = 0,
        on_error: Handler = reraise,
        job: str | None = None,
        socket: str | os.PathLike[str] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        timeout_s: float = 300.0,
        partial_reads: bool = True,
    ) -> None:
        self._seed = seed if shuffle else None
        self._on_error = on_error
        self._job = job or job_name()
        self._socket = socket_path(socket)
        self._explicit_ranks = explicit_ranks(rank, world_size)
        self._parent_ranks: Ranks | None = None
        self._epoch = SharedEpoch()
        self._sessions = Sessions(self._socket, Patience(timeout_s), partial_reads=partial_reads)
        patterns = [urls] if isinstance(urls, str) else urls
        self.manifest: list[ShardRef] = resolve(self._socket, Reader(self._job), patterns, timeout_s)

    def __repr__(self) -> str:
        return f"ShardDataset(shards={len(self.manifest)}, epoch={self._epoch.get()}, job={self._job!r})"

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration reads, in living DataLoader workers, too."""
        if epoch < 0:
            raise ConfigError(f"epoch {epoch} is negative")
        self._epoch.set(epoch)

    def __len__(self) -> int:
        """Return how many samples this rank reads in the present epoch.

        Raises TypeError, as Python's protocols want it, while some shard was never read on this node.
        """
        ranks = self._ranks()
        order = epoch_order(len(self.manifest), seed=self._seed, epoch=self._epoch.get())
        counts = [self.manifest[position].samples for position in rank_share(order, ranks.rank, ranks.world_size)]
        known = [count for count in counts if count is not None]
        if len(known) < len(counts):
            raise TypeError(
                f"the samples of {len(counts) - len(known)} shards are not counted yet; they are known to datasets "
                "made after the daemon has fetched every shard once (`shardcache warm`)"
            )
        return sum(known)

    def __iter__(self) -> Iterator[Sample]:
        topology = self._topology()
        plan = plan_reading(self.manifest, seed=self._seed, epoch=self._epoch.get(), topology=topology)
        idle = topology.readers - len(self.manifest)
        if idle > 0 and topology.rank == topology.worker == 0:
            log.warning("%d of %d readers have nothing to read: there are fewer shards", idle, topology.readers)
        if not plan.reads:
            return iter(())
        return iter(EpochStream(self._sessions, Reader(self._job, topology), plan, self._on_error))

    def _topology(self) -> Topology:
        ranks, info = self._ranks(), get_worker_info()
        if info is None:
            return Topology(ranks.rank, ranks.world_size)
        return Topology(ranks.rank, ranks.world_size, info.id, info.num_workers)

    def _ranks(self) -> Ranks:
        if self._explicit_ranks is not None:
            return self._explicit_ranks
        # A spawned worker has no torch.distributed of its own and reads for the process that started it.
        inherited = self._parent_ranks if get_worker_info() is not None else None
        return _distributed_ranks() or inherited or ranks_of_environment()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_parent_ranks": _distributed_ranks()}


def _distributed_ranks() -> Ranks | None:
    """Return what torch.distributed says in this process, or in the one from which it was forked."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size())
    return None
