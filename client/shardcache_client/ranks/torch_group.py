"""The ranks of a torch job, which agree on manifest and options over its key-value store.

A ShardDataset has one TorchRankGroup. A copy is a dataset made from another one, such as the result
of its `filter` or `select`. It has a group of its own, under another name in the store.
"""

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from secrets import randbits
from typing import Any

from torch.utils.data import get_worker_info

from shardcache.shared import exceptions
from shardcache.shared.urls.signed_urls import without_signature
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.order.topology import Topology
from shardcache_client.ranks import distributed
from shardcache_client.ranks.agreed_epochs import AgreedEpochs
from shardcache_client.ranks.agreement import agreement_of
from shardcache_client.ranks.environment import ranks_of_environment, ranks_of_ray_train
from shardcache_client.ranks.group import Epochs, RankGroup
from shardcache_client.ranks.key_value_store import KeyValueStore, StoreLocator, restart_count
from shardcache_client.ranks.mesh import MeshRanks
from shardcache_client.ranks.shared_manifest import download, share_manifest, upload
from shardcache_client.stages.stage import Agree

log = logging.getLogger("shardcache")

# Maximum time for which a rank that has ended an epoch early waits for the others. It is well below
# the 10-minute timeout of NCCL's collectives.
_PATIENCE_S = 120.0
_COMPARE_TIMEOUT_S = 30.0

# Key in `_compared` of the comparison of shards. Options are compared under their names.
_SHARDS = ""

# Each rank numbers its datasets and agreements in the order of creation. Those with the same number
# on different ranks belong together.

# Number of datasets made in this process, by the digest of what identifies them (see
# `_next_dataset_name`) and the rank. The rank is None unless the user has named it by its number.
_datasets_made: Counter[tuple[str, Topology | None]] = Counter()
# Number of agreements made in this process, by the agreement's name and the rank. The name consists
# of the dataset's name and the subject of the agreement.
_agreements_made: Counter[tuple[str, Topology]] = Counter()


def in_worker() -> bool:
    """Return True in a DataLoader worker."""
    return get_worker_info() is not None


class TorchRankGroup(RankGroup):
    """Ranks that have one manifest, and agree on options and epoch.

    If torch.distributed is initialised, all ranks read rank 0's manifest. Otherwise each rank has
    its own manifest, and the ranks compare them. To compare a value, the first rank stores its own,
    and each later rank compares its own with the stored one. No rank waits. If `is_alone` is True,
    there is nothing to compare.

    Datasets of different processes are matched by their urls, and by whether the user named a rank,
    a mesh or neither. Datasets that agree in these are matched by the order of their creation.

    A group can be pickled for DataLoader workers.
    """

    def __init__(
        self,
        named_ranks: Topology | MeshRanks | None,
        urls: Sequence[str],
        timeout_s: float,
    ) -> None:
        """Make the group of one dataset.

        Args:
            named_ranks: the ranks that the user named; None for the ranks of the job.
            urls: urls of the dataset.
            timeout_s: maximum time to wait for rank 0's manifest.
        """
        super().__init__(named_ranks)
        # The name under which the ranks share the manifest. All copies of a dataset have it.
        self._dataset_name = _next_dataset_name(named_ranks, urls)
        # The name of this group. `of_copy` gives each copy another one.
        self._name = self._dataset_name
        # The name under which options are compared. Copies with the same options share it.
        self._options_name = self._dataset_name
        self._url = next(iter(urls), "")  # the url that errors name
        self._timeout_s = timeout_s
        self._locator = StoreLocator()
        self._inherited: Topology | None = None  # ranks of the process that pickled this group
        # For each comparison that was made, the id of the process that made it. The key is
        # `_SHARDS`, or the names of the options that were compared. A forked process finds its
        # parent's id, and so compares again.
        self._compared: dict[str, int] = {}
        self._unnamed_copies = 0  # number of unnamed copies that were made of this dataset

    # This process's rank in the job. It is determined at each call, as a dataset is created before
    # its worker processes.

    @property
    def ranks_of_job(self) -> Topology:
        """The rank that torch.distributed, Ray Train, or else the launcher gives this process."""
        # In a spawned worker, torch.distributed is not initialised. The worker reads for the rank
        # of the process that started it.
        inherited = self._inherited if in_worker() else None
        return distributed.ranks() or inherited or ranks_of_ray_train() or ranks_of_environment()

    def topology(self) -> Topology:
        """Return the number of this process, or DataLoader worker, among the job's readers."""
        worker = get_worker_info()
        if worker is None:
            return self.ranks
        return replace(self.ranks, worker=worker.id, workers=worker.num_workers)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_inherited": distributed.ranks() or ranks_of_ray_train()}

    # The manifest, the seed and the order, which are the same on all ranks.

    def agree_on_manifest(self, resolve: Callable[[], Manifest]) -> Manifest:
        """Return rank 0's manifest, or this process's if torch.distributed is not initialised.

        See `share_manifest`.
        """
        torch_ranks = distributed.ranks()
        has_other_ranks = torch_ranks is not None and torch_ranks.world_size > 1
        store = None
        if has_other_ranks and not self.is_alone:
            store = KeyValueStore.of_process_group()
        if store is None:
            return resolve()
        self.has_manifest_of_rank_0 = True
        name = f"manifest/{self._dataset_name}/{self.ranks.world_size}"
        return share_manifest(store, name, self.ranks, resolve, self._timeout_s, self._url)

    def draw_seed(self) -> int:
        """Return a random seed, the first that any rank has drawn for this dataset.

        See `RankGroup`.
        """
        if self.is_alone:
            return super().draw_seed()
        store = KeyValueStore.of_process_group() or self._locator.store()
        if store is None:
            return super().draw_seed()
        own = str(randbits(32))
        return int(store.set_if_unset(f"seed/{self._name}", own))

    def compare_manifest(self, manifest: Manifest, *, counted: bool) -> None:
        """Raise ManifestMismatchError if another rank has other shards or another selection.

        This rank compares with the first rank that did. Of a rank's workers, only the first worker
        compares.

        Args:
            manifest: this rank's manifest.
            counted: True if samples are dealt to readers. False if whole shards are dealt: then
                numbers of samples are ignored, as one rank may know more of them than another.
        """
        if self.is_alone or not self._is_first_worker():
            return
        store = self._locator.store()
        if store is None:
            return
        # Each process compares the shards once, as all copies of the dataset have the same. A
        # selection may be a copy's own, so it is always compared.
        are_shards_compared = self._compared.get(_SHARDS) == os.getpid()
        may_differ = self.may_join_other_shards or not self.has_manifest_of_rank_0
        if may_differ and not are_shards_compared:
            self._compare_shards(store, _compared_part(manifest, counted=counted))
            self._compared[_SHARDS] = os.getpid()
        if manifest.selection:
            self._compare_selection(store, manifest.selection)

    def _compare_selection(self, store: KeyValueStore, mine: str) -> None:
        """Compare the identifier of the selected samples with that of the first rank."""
        rank, other = self._first_rank_and_value(store, "selection", self._name, mine)
        if other != mine:
            raise exceptions.ManifestMismatchError(
                f"rank {self._own_rank} has selected other samples than rank {rank}",
                url=self._url,
                remedy="give select, subset and split the same arguments on all ranks; a predicate "
                "must not depend on the rank, on chance, or on the order of calls",
            )

    def _compare_shards(self, store: KeyValueStore, mine: Manifest) -> None:
        """Compare a manifest with that of the first rank."""
        # The manifest is stored before its fingerprint, so that a rank with another fingerprint can
        # download the manifest and name the difference.
        upload(store, mine)
        rank, fingerprint = self._first_rank_and_value(
            store, "compare", self._dataset_name, mine.fingerprint
        )
        if fingerprint != mine.fingerprint:
            other = download(store, fingerprint, _COMPARE_TIMEOUT_S)
            raise exceptions.ManifestMismatchError(
                f"rank {self._own_rank} would read different shards than rank {rank}: "
                f"{mine.difference(other)}",
                url=self._url,
            )

    def compare_options(self, options: Mapping[str, object]) -> None:
        """Raise RanksError if options differ from those of the first rank that compared.

        Options are compared by their `repr`. If ranks had different options, each would read its
        share of another order: some samples would be read twice, and others never.
        """
        if self._is_first_worker():
            self._compare_with_first(options)

    def _is_first_worker(self) -> bool:
        """Return True in the first of a rank's workers, and in a process that is not a worker."""
        return self.topology().worker == 0

    def _compare_with_first(self, options: Mapping[str, object]) -> None:
        """Compare options with those of the first rank, once in each process."""
        names = ",".join(options)
        if self.is_alone or not names or self._compared.get(names) == os.getpid():
            return
        store = self._locator.store()
        if store is None:
            return

        mine = {name: repr(value) for name, value in options.items()}
        rank, others = self._first_rank_and_value(store, f"order/{names}", self._options_name, mine)
        for name, value in mine.items():
            if others.get(name) != value:
                raise exceptions.RanksError(
                    f"rank {self._own_rank} would read another order or other batches than rank "
                    f"{rank}, as they differ in {name}: {value} here and {others.get(name)} there",
                    remedy="give the dataset the same arguments on all ranks; batch_size may "
                    "differ with even=None",
                )
        self._compared[names] = os.getpid()

    def _first_rank_and_value(
        self, store: KeyValueStore, kind: str, name: str, mine: Any
    ) -> tuple[int, Any]:
        """Store a value unless another rank has stored one; return the first rank and its value.

        Values from before a restart by torchrun do not count: since then, options and shards may
        have changed.

        Args:
            store: the job's store.
            kind: kind of the value.
            name: name of the dataset or of one of its copies.
            mine: this rank's value, which JSON can hold.
        """
        key = f"{kind}/{restart_count()}/{name}/{self.ranks.world_size}"
        own = json.dumps([self._own_rank, mine])
        rank, value = json.loads(store.set_if_unset(key, own))
        return rank, value

    @property
    def _own_rank(self) -> int:
        """The rank by which messages name this process.

        In a mesh it is the rank in the job, since several processes may read for one rank.
        """
        if isinstance(self.named_ranks, MeshRanks):
            return self.ranks_of_job.rank
        return self.ranks.rank

    def of_copy(self, name: str = "") -> "TorchRankGroup":
        """Return the group of a copy of the dataset.

        Ranks match copies by their name, and unnamed copies by the order in which they are made.
        """
        group = copy(self)
        if name:
            # A named copy, such as a loader's, has the dataset's options. So both share `_compared`
            # and the options are compared once for both.
            group.rename(f"{self._name}/{name}")
            return group
        self._unnamed_copies += 1
        group.rename(f"{self._name}+{self._unnamed_copies}")
        group.compare_options_separately()
        return group

    def rename(self, name: str) -> None:
        """Give this group another name in the store, among the copies of the dataset."""
        self._name = name
        self._unnamed_copies = 0

    def compare_options_separately(self) -> None:
        """Compare options under the name of this copy, as they may differ from the dataset's."""
        self._options_name = self._name
        self._compared = {}

    def agreements(self, subject: str, timeout_s: float) -> Callable[[Topology], Agree]:
        """Return a function that makes a reader's `Agree`; see `RankGroup`."""
        name = f"{self._dataset_name}/{subject}"
        _agreements_made[name, self.ranks] += 1
        nth = _agreements_made[name, self.ranks]
        return partial(agreement_of, f"{name}/{nth}", timeout_s, self._locator)

    def epochs(self, batches: Mapping[str, object]) -> Epochs:
        """Return the ranks' agreement on epochs, which also compares these options of batches."""
        return AgreedEpochs(
            name=self._name,
            locator=self._locator,
            topology=self.topology,
            compare_options=partial(self._compare_with_first, batches),
            patience_s=min(self._timeout_s, _PATIENCE_S),
        )


def _next_dataset_name(named_ranks: Topology | MeshRanks | None, urls: Sequence[str]) -> str:
    """Count a dataset; return its name, by which the ranks match their datasets.

    For the arguments, see `TorchRankGroup.__init__`.
    """
    # Signatures are left out, as each rank may have signed its urls by itself.
    identity = [without_signature(url) for url in urls]
    if named_ranks is not None:
        identity.append(type(named_ranks).__name__)  # tells a rank from a mesh
    digest = blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest()
    # A process may make datasets for several ranks that it names by number, so each rank's datasets
    # are counted separately.
    named_rank = named_ranks if isinstance(named_ranks, Topology) else None
    nth = _datasets_made[digest, named_rank]
    _datasets_made[digest, named_rank] += 1
    return f"{digest}/{nth}"


def _compared_part(manifest: Manifest, *, counted: bool) -> Manifest:
    """Return the part of a manifest that ranks compare: all shards, with counts if `counted`.

    A manifest may have the shards of joined datasets. They are compared without counts, since their
    samples are not dealt.
    """
    if counted and not manifest.columns:
        return manifest
    planned = manifest.planned
    counts = list(manifest.shards.samples) if counted else []
    counts += [-1] * (len(planned) - len(counts))
    return Manifest(planned.shards.with_samples(counts))
