"""The ranks of a torch job: known from torch.distributed or the launcher, and in touch over its key-value store."""

import json
import os
import time
import zlib
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from hashlib import blake2b
from secrets import randbits
from typing import Any

from torch.utils.data import get_worker_info

from shardcache.errors import ManifestMismatchError, RanksError, RankTimeoutError, ShardcacheError, from_json
from shardcache.protocol import ShardRef
from shardcache_client.order.manifest import Manifest
from shardcache_client.ranks import distributed
from shardcache_client.ranks.distributed import KeyValueStore, MeetingPlace, attempt
from shardcache_client.ranks.frameworks import MeshRanks
from shardcache_client.ranks.group import RankGroup
from shardcache_client.ranks.one_epoch import OneEpoch
from shardcache_client.topology import Ranks, Topology, ranks_of_environment, ranks_of_ray_train

_PATIENCE_S = 120.0  # for ranks that stay in an epoch; well below the 10-minute timeout of NCCL's collectives
_COMPARE_TIMEOUT_S = 30.0
_PIECE_CHARACTERS = 4 * 2**20  # a key-value store takes values of at most 8 MiB

_made: Counter[tuple[str, Ranks | None]] = Counter()  # by urls, and the ranks that the user named


def in_worker() -> bool:
    """Return True in a DataLoader worker."""
    return get_worker_info() is not None


class TorchRankGroup(RankGroup):
    """Ranks that read rank 0's manifest, or compare theirs, compare options, and agree on the epoch.

    Datasets of different processes are matched by their urls, by whether ranks or a mesh were named, and, among those
    that agree in this, by the order of their creation. What the ranks compare is that of the first one to do so; nobody
    waits. Processes restarted by torchrun may have other options and see other shards than before.

    Can be pickled for workers.
    """

    def __init__(self, given: Ranks | MeshRanks | None, urls: Sequence[str], timeout_s: float) -> None:
        super().__init__(given)
        how = [] if given is None else [type(given).__name__]
        digest = blake2b(json.dumps([*urls, *how]).encode(), digest_size=16).hexdigest()
        kind = digest, None if isinstance(given, MeshRanks) else given
        self._dataset = self._name = self._options_of = f"{digest}/{_made[kind]}"  # of all copies; of this one
        _made[kind] += 1
        self._url = next(iter(urls), "")
        self._timeout_s = timeout_s  # of the wait for rank 0's manifest
        self._place = MeetingPlace()
        self._inherited: Ranks | None = None
        self._compared: dict[str, int] = {}  # by what was compared, the process that has done so
        self._copies = 0

    # This process's place in the job, determined at each call, as datasets are created before their worker processes

    @property
    def ranks_of_job(self) -> Ranks:
        """Rank of the process by torch.distributed, Ray Train or else the launcher, whatever the user named."""
        # A spawned worker has no torch.distributed and reads for the process that started it.
        inherited = self._inherited if in_worker() else None
        return distributed.ranks() or inherited or ranks_of_ray_train() or ranks_of_environment()

    def topology(self) -> Topology:
        """Return the place of this process, or DataLoader worker, among the readers of the job, as of now."""
        ranks, worker = self.ranks, get_worker_info()
        place = () if worker is None else (worker.id, worker.num_workers)
        return Topology(ranks.rank, ranks.world_size, *place)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_inherited": distributed.ranks() or ranks_of_ray_train()}

    # One manifest, seed and order

    def settle(self, resolve: Callable[[], Manifest]) -> Manifest:
        """Return rank 0's manifest, or this process's if torch.distributed is not initialised; see `share`."""
        known = distributed.ranks()
        store = None if self.alone or known is None or known.world_size == 1 else KeyValueStore.of_process_group()
        if store is None:
            return resolve()
        self.settled = True
        name = f"manifest/{self._dataset}/{self.ranks.world_size}"
        return share(store, name, self.ranks, resolve, self._timeout_s, self._url)

    def draw_seed(self) -> int:
        """Return a random seed, the first that any rank has drawn for this dataset; see `RankGroup`."""
        if self.alone:
            return super().draw_seed()
        store = KeyValueStore.of_process_group() or self._place.store()
        return super().draw_seed() if store is None else int(store.first(f"seed/{self._name}", str(randbits(32))))

    def compare(self, manifest: Manifest, *, counted: bool) -> None:
        """Raise ManifestMismatchError if shards or selection differ from those of the first rank to compare.

        Other workers than a rank's first do not compare. Unless samples are dealt, counts are ignored, as one rank may
        know more than another.
        """
        store = None if self.alone or self.topology().worker else self._place.store()
        if store is None:
            return
        if not self.settled and self._compared.get("") != os.getpid():
            self._compare_shards(store, manifest if counted else _without_counts(manifest))
            self._compared[""] = os.getpid()
        if manifest.selection:
            rank, other = self._first(store, "selection", self._name, manifest.selection)
            if other != manifest.selection:
                raise ManifestMismatchError(
                    f"rank {self._own_rank} has selected other samples than rank {rank}",
                    url=self._url,
                    remedy="give select, subset and split the same arguments on all ranks; a predicate must not depend "
                    "on the rank, on chance, or on the order of calls",
                )

    def _compare_shards(self, store: KeyValueStore, mine: Manifest) -> None:
        _upload(store, mine)  # before its fingerprint
        rank, fingerprint = self._first(store, "compare", self._dataset, mine.fingerprint)
        if fingerprint != mine.fingerprint:
            other = _download(store, fingerprint, _COMPARE_TIMEOUT_S)
            raise ManifestMismatchError(
                f"rank {self._own_rank} would read different shards than rank {rank}: {mine.difference(other)}",
                url=self._url,
            )

    def compare_options(self, options: Mapping[str, object]) -> None:
        """Raise RanksError if options, compared by their `repr`, differ from those of the first rank; see `compare`.

        Ranks with other options would each read a share of another order: some samples twice, and others never.
        """
        if not self.topology().worker:
            self._compare_options(options)

    def _compare_options(self, options: Mapping[str, object]) -> None:
        names, mine = ",".join(options), {name: repr(value) for name, value in options.items()}
        known = self.alone or not names or self._compared.get(names) == os.getpid()
        store = None if known else self._place.store()
        if store is None:
            return
        rank, others = self._first(store, f"order/{names}", self._options_of, mine)
        for option, value in mine.items():
            if others.get(option) != value:
                raise RanksError(
                    f"rank {self._own_rank} would read another order or other batches than rank {rank}, as they differ "
                    f"in {option}: {value} here and {others.get(option)} there",
                    remedy="give the dataset the same arguments on all ranks; batch_size may differ with even=None",
                )
        self._compared[names] = os.getpid()

    def _first(self, store: KeyValueStore, kind: str, name: str, mine: Any) -> tuple[int, Any]:
        """Return the rank that was the first to compare something, and its value."""
        key = f"{kind}/{attempt()}/{name}/{self.ranks.world_size}"
        rank, value = json.loads(store.first(key, json.dumps([self._own_rank, mine])))
        return rank, value

    @property
    def _own_rank(self) -> int:
        """The rank that messages name: in a mesh, several processes read for one."""
        return (self.ranks_of_job if isinstance(self.given, MeshRanks) else self.ranks).rank

    def of_copy(self, name: str = "") -> "TorchRankGroup":
        """Return the group of a copy of the dataset, matched across ranks by its name or the order of copies."""
        group = copy(self)
        self._copies += not name
        group._name = f"{self._name}/{name}" if name else f"{self._name}+{self._copies}"
        group._copies = 0
        if not name:
            group._options_of, group._compared = group._name, {}
        return group

    def epochs(self, batches: Mapping[str, object]) -> OneEpoch:
        """Return the count of epochs that all ranks agree on, if they also agree on these options."""
        compare = partial(self._compare_options, batches)
        return OneEpoch(self._name, self._place, self.topology, compare, min(self._timeout_s, _PATIENCE_S))


# Manifests in the key-value store, where they outlive a restart


def share(
    store: KeyValueStore, name: str, ranks: Ranks, resolve: Callable[[], Manifest], timeout_s: float, url: str = ""
) -> Manifest:
    """Return the manifest that rank 0 resolves and publishes under a name, and the others wait for.

    An error on rank 0 is raised on every rank. Raises RankTimeoutError if rank 0's manifest does not come in time,
    RanksError if the connection to the key-value store breaks.
    """
    if ranks.rank == 0:
        return _publish(store, name, resolve, timeout_s)
    answer = store.get(name, timeout_s)
    if answer is None:
        raise RankTimeoutError(
            f"rank {ranks.rank} waited {timeout_s:g} s for rank 0 to list the shards of this dataset ({name})", url=url
        )
    return _take(store, answer, timeout_s)


def _without_counts(manifest: Manifest) -> Manifest:
    return Manifest.of(ShardRef(shard.url, shard.version, shard.size_bytes) for shard in manifest)


def _publish(store: KeyValueStore, name: str, resolve: Callable[[], Manifest], timeout_s: float) -> Manifest:
    if store.has(name):
        earlier = store.get(name, timeout_s) or "{}"
        if "error" not in json.loads(earlier):
            return _take(store, earlier, timeout_s)
        store.delete(name)
    try:
        manifest = resolve()
    except ShardcacheError as exn:
        store.first(name, json.dumps({"error": exn.to_json()}))
        raise
    _upload(store, manifest)
    mine = json.dumps({"fingerprint": manifest.fingerprint})
    stays = store.first(name, mine)  # several processes may be rank 0
    return manifest if stays == mine else _take(store, stays, timeout_s)


def _take(store: KeyValueStore, answer: str, timeout_s: float) -> Manifest:
    found = json.loads(answer)
    if "error" in found:
        raise from_json(found["error"])
    return _download(store, found["fingerprint"], timeout_s)


def _upload(store: KeyValueStore, manifest: Manifest) -> None:
    """Store the rows under the manifest's fingerprint, for all datasets with the same rows."""
    name = f"rows/{manifest.fingerprint}"
    if store.has(name):
        return
    packed = b64encode(zlib.compress(json.dumps(manifest.to_json()).encode(), 1)).decode()
    starts = range(0, len(packed), _PIECE_CHARACTERS)
    for number, start in enumerate(starts):
        store.set(f"{name}/{number}", packed[start : start + _PIECE_CHARACTERS])
    store.set(name, str(len(starts)))  # last, so that its presence implies that of all pieces


def _download(store: KeyValueStore, fingerprint: str, timeout_s: float) -> Manifest:
    deadline_s = time.monotonic() + timeout_s
    name = f"rows/{fingerprint}"
    count = int(store.get(name, timeout_s) or 0)
    pieces = [store.get(f"{name}/{number}", deadline_s - time.monotonic()) or "" for number in range(count)]
    try:
        manifest = Manifest.from_json(json.loads(zlib.decompress(b64decode("".join(pieces)))))
    except (ValueError, zlib.error) as exn:
        raise RanksError(f"the list of shards from another rank is incomplete or damaged: {exn}") from exn
    if manifest.fingerprint != fingerprint:
        raise RanksError("another rank made its list of shards with another release of shardcache")
    return manifest
