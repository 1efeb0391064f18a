"""The ranks of a torch job: known from torch.distributed or the launcher, and in touch over its key-value store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from secrets import randbits

from shardcache_client.order.manifest import Manifest
from shardcache_client.ranks.distributed import KeyValueStore
from shardcache_client.ranks.group import RankGroup
from shardcache_client.ranks.membership import Membership
from shardcache_client.ranks.mesh import MeshRanks
from shardcache_client.ranks.one_epoch import OneEpoch
from shardcache_client.ranks.one_manifest import OneManifest
from shardcache_client.ranks.one_order import OneOrder
from shardcache_client.topology import Ranks, Topology

_PATIENCE_S = 120.0  # for ranks that stay in an epoch; well below the 10-minute timeout of NCCL's collectives


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
