"""The ranks of a torch job: known from torch.distributed or the launcher, and in touch over its key-value store."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from secrets import randbits
from typing import Any

from torch.utils.data import get_worker_info

from shardcache.errors import RanksError
from shardcache_client.order.manifest import Manifest
from shardcache_client.ranks import distributed
from shardcache_client.ranks.distributed import KeyValueStore, MeetingPlace
from shardcache_client.ranks.group import RankGroup
from shardcache_client.ranks.mesh import MeshRanks
from shardcache_client.ranks.one_epoch import OneEpoch
from shardcache_client.ranks.one_manifest import OneManifest
from shardcache_client.topology import Ranks, Topology, ranks_of_environment, ranks_of_ray_train

_PATIENCE_S = 120.0  # for ranks that stay in an epoch; well below the 10-minute timeout of NCCL's collectives


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


class OneOrder:
    """Compares the options of one dataset across all ranks. Can be pickled for DataLoader workers.

    Ranks with other options would each read a share of another order: some samples twice, and others never.

    Args:
        name: the same on all ranks, and unique to the dataset.
        place: finds the key-value store.
    """

    def __init__(self, name: str, place: MeetingPlace) -> None:
        self._name = name
        self._place = place
        self._compared_by: dict[str, int] = {}  # by names of options, the process that has compared them

    def __repr__(self) -> str:
        return f"OneOrder({self._name}, {self._place!r})"

    def compare(self, options: Mapping[str, object], topology: Topology) -> None:
        """Raise RanksError if these options differ from those of the first rank to compare.

        For the main process or worker 0 of a rank, at the start of an iteration. It compares once, without waiting for
        others. No-op if there are no options, or if the ranks share no key-value store.

        Args:
            options: values by the names of the arguments; they are compared by their `repr`.
        """
        names = ",".join(options)
        if not names or self._compared_by.get(names) == os.getpid() or (store := self._place.store()) is None:
            return
        mine = {name: repr(value) for name, value in options.items()}
        # Processes restarted by torchrun may have other options than before.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        name = f"order/{attempt}/{self._name}/{topology.world_size}/{names}"
        rank, others = json.loads(store.first(name, json.dumps([topology.rank, mine])))
        for option, value in mine.items():
            if others.get(option) != value:
                raise RanksError(
                    f"rank {topology.rank} would read another order or other batches than rank {rank}, as they differ "
                    f"in {option}: {value} here and {others.get(option)} there",
                    remedy="give the dataset the same arguments on all ranks; batch_size may differ with even=None",
                )
        self._compared_by[names] = os.getpid()


class TorchRankGroup(RankGroup):
    """Ranks that read rank 0's manifest, or compare theirs, compare options, and agree on the epoch.

    Can be pickled for workers.

    Args:
        given: the ranks that the user named; None for those of torch.distributed or the launcher.
        urls: of the dataset, as the user gave them.
        timeout_s: how long to wait for rank 0's manifest.
    """

    def __init__(self, given: Ranks | MeshRanks | None, urls: Sequence[str], timeout_s: float) -> None:
        super().__init__(given)
        self._membership = Membership()
        self._manifest = OneManifest(urls, given, timeout_s)
        self._name = self._manifest.name
        self._patience_s = min(timeout_s, _PATIENCE_S)
        self._epoch = OneEpoch(self._name, self._manifest.place, self._patience_s)
        self._order = OneOrder(self._name, self._manifest.place)
        self._copies = 0

    @property
    def ranks_of_job(self) -> Ranks:
        """Rank of the process by torch.distributed or else the launcher."""
        return self._membership.ranks_of_job

    def topology(self) -> Topology:
        """Return the place of this process, or DataLoader worker, among the readers of the job."""
        return self._membership.topology(self.ranks)

    @property
    def settled(self) -> bool:
        """True if all ranks have the manifest of rank 0."""
        return self._manifest.settled

    def settle(self, resolve: Callable[[], Manifest]) -> Manifest:
        """Return rank 0's manifest, or this process's if torch.distributed is not initialised."""
        return resolve() if self.alone else self._manifest.settle(self.ranks, resolve)

    def draw_seed(self) -> int:
        """Return a random seed, the first that any rank has drawn for this dataset; see `RankGroup`."""
        if self.alone:
            return super().draw_seed()
        store = KeyValueStore.of_process_group() or self._manifest.place.store()
        return super().draw_seed() if store is None else int(store.first(f"seed/{self._name}", str(randbits(32))))

    def compare(self, manifest: Manifest, topology: Topology, *, counted: bool) -> None:
        """Raise ManifestMismatchError if shards or selection differ from those of the first rank to compare."""
        if self.alone or topology.worker:
            return
        self._manifest.compare(manifest, self._named(topology), counted=counted)
        if manifest.selection:
            self._manifest.compare_selection(self._name, manifest.selection, self._named(topology))

    def compare_options(self, options: Mapping[str, object], topology: Topology) -> None:
        """Raise RanksError if options of the order differ from those of the first rank to compare."""
        if not self.alone and not topology.worker:
            self._order.compare(options, self._named(topology))

    def _named(self, topology: Topology) -> Topology:
        """Return the topology with the rank that messages name: in a mesh, several processes read for one."""
        return replace(topology, rank=self.ranks_of_job.rank) if isinstance(self.given, MeshRanks) else topology

    def of_copy(self, name: str = "") -> TorchRankGroup:
        """Return the group of a copy of the dataset, matched across ranks by its name or the order of copies."""
        group = copy(self)
        self._copies += not name
        group._name = f"{self._name}/{name}" if name else f"{self._name}+{self._copies}"
        group._epoch = OneEpoch(group._name, self._manifest.place, self._patience_s)
        group._order = self._order if name else OneOrder(group._name, self._manifest.place)
        group._copies = 0
        return group

    def follows(self, epoch: int, left: int) -> int:
        """Return the epoch that follows on all ranks; see `OneEpoch`."""
        return self._epoch.follows(self.ranks, epoch, left)

    def begin(self, epoch: int) -> None:
        """Note that this rank reads an epoch, beyond a look."""
        self._epoch.begin(self.ranks, epoch)

    def leave(self, epoch: int) -> None:
        """Note that this rank has ended an epoch early."""
        self._epoch.leave(self.ranks, epoch)

    def end(self, epoch: int) -> None:
        """Note that this rank has read an epoch to its end."""
        self._epoch.end(self.ranks, epoch)
