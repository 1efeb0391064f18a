"""The ranks of a torch job, in touch over its key-value store: they agree on manifest, options and epoch."""

import json
import logging
import os
import time
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from secrets import randbits
from typing import Any

from torch.utils.data import get_worker_info

from shardcache import errors
from shardcache.shards import Shards
from shardcache_client.order.manifest import Manifest
from shardcache_client.order.rounds import Topology
from shardcache_client.ranks import distributed
from shardcache_client.ranks.distributed import KeyValueStore, MeetingPlace, attempt
from shardcache_client.ranks.environment import ranks_of_environment, ranks_of_ray_train
from shardcache_client.ranks.group import Epochs, MeshRanks, RankGroup
from shardcache_client.stages.stage import Agree

log = logging.getLogger("shardcache")

_PATIENCE_S = 120.0  # for ranks that stay in an epoch; well below the 10-minute timeout of NCCL's collectives
_COMPARE_TIMEOUT_S = 30.0
_PIECE_CHARACTERS = 4 * 2**20  # a key-value store takes values of at most 8 MiB
_LOG_AFTER_S = 10.0
_MAX_PASSES = 3
_NEXT, _AGAIN = "next", "again"

_made: Counter[tuple[str, Topology | None]] = Counter()  # by urls, and the ranks that the user named
_agreed_on: Counter[tuple[str, Topology]] = Counter()  # by dataset and what its ranks agree on, and the rank


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

    def __init__(self, given: Topology | MeshRanks | None, urls: Sequence[str], timeout_s: float) -> None:
        super().__init__(given)
        how = [] if given is None else [type(given).__name__]
        digest = blake2b(json.dumps([*urls, *how]).encode(), digest_size=16).hexdigest()
        kind = digest, None if isinstance(given, MeshRanks) else given
        self._dataset = self._name = self._options_of = f"{digest}/{_made[kind]}"  # of all copies; of this one
        _made[kind] += 1
        self._url = next(iter(urls), "")
        self._timeout_s = timeout_s  # of the wait for rank 0's manifest
        self._place = MeetingPlace()
        self._inherited: Topology | None = None
        self._compared: dict[str, int] = {}  # by what was compared, the process that has done so
        self._copies = 0

    # This process's place in the job, determined at each call, as datasets are created before their worker processes

    @property
    def ranks_of_job(self) -> Topology:
        """Rank of the process by torch.distributed, Ray Train or else the launcher, whatever the user named."""
        # A spawned worker has no torch.distributed and reads for the process that started it.
        inherited = self._inherited if in_worker() else None
        return distributed.ranks() or inherited or ranks_of_ray_train() or ranks_of_environment()

    def topology(self) -> Topology:
        """Return the place of this process, or DataLoader worker, among the readers of the job, as of now."""
        worker = get_worker_info()
        return self.ranks if worker is None else replace(self.ranks, worker=worker.id, workers=worker.num_workers)

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
            planned, uncounted = manifest.planned, [-1] * len(manifest.planned)
            self._compare_shards(store, planned if counted else Manifest(planned.shards.with_samples(uncounted)))
            self._compared[""] = os.getpid()
        if manifest.selection:
            rank, other = self._first(store, "selection", self._name, manifest.selection)
            if other != manifest.selection:
                raise errors.ManifestMismatchError(
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
            raise errors.ManifestMismatchError(
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
                raise errors.RanksError(
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

    def agreements(self, what: str, timeout_s: float) -> Callable[[Topology], Agree]:
        """Return how a reader agrees with those of other ranks; see `RankGroup`."""
        kind = f"{self._dataset}/{what}"
        own = (kind, self.ranks)
        _agreed_on[own] += 1
        return partial(distributed.agreement_of, f"{kind}/{_agreed_on[own]}", timeout_s, self._place)

    def epochs(self, batches: Mapping[str, object]) -> Epochs:
        """Return the count of epochs that all ranks agree on, if they also agree on these options."""
        compare = partial(self._compare_options, batches)
        return OneEpoch(self._name, self._place, self.topology, compare, min(self._timeout_s, _PATIENCE_S))


# Manifests in the key-value store, where they outlive a restart


def share(
    store: KeyValueStore, name: str, ranks: Topology, resolve: Callable[[], Manifest], timeout_s: float, url: str = ""
) -> Manifest:
    """Return the manifest that rank 0 resolves and publishes under a name, and the others wait for; also its error."""
    if ranks.rank == 0:
        return _publish(store, name, resolve, timeout_s)
    answer = store.get(name, timeout_s)
    if answer is None:
        raise errors.RankTimeoutError(
            f"rank {ranks.rank} waited {timeout_s:g} s for rank 0 to list the shards of this dataset ({name})", url=url
        )
    return _take(store, answer, timeout_s)


def _publish(store: KeyValueStore, name: str, resolve: Callable[[], Manifest], timeout_s: float) -> Manifest:
    if store.has(name):
        earlier = store.get(name, timeout_s) or "{}"
        if "error" not in json.loads(earlier):
            return _take(store, earlier, timeout_s)
        store.delete(name)
    try:
        manifest = resolve()
    except errors.ShardcacheError as exn:
        store.first(name, json.dumps({"error": exn.to_json()}))
        raise
    _upload(store, manifest)
    mine = json.dumps({"fingerprint": manifest.fingerprint, "versions_named": manifest.versions_named})
    stays = store.first(name, mine)  # several processes may be rank 0
    return manifest if stays == mine else _take(store, stays, timeout_s)


def _take(store: KeyValueStore, answer: str, timeout_s: float) -> Manifest:
    found = json.loads(answer)
    if "error" in found:
        raise errors.from_json(found["error"])
    manifest = _download(store, found["fingerprint"], timeout_s)
    return replace(manifest, versions_named=bool(found.get("versions_named", True)))


def _upload(store: KeyValueStore, manifest: Manifest) -> None:
    """Store the rows under the manifest's fingerprint, for all datasets with the same rows."""
    name = f"rows/{manifest.fingerprint}"
    if store.has(name):
        return
    packed = b64encode(manifest.shards.packed).decode()
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
        manifest = Manifest(Shards.unpack(b64decode("".join(pieces))))
    except (ValueError, errors.ProtocolError) as exn:
        raise errors.RanksError(f"the list of shards from another rank is incomplete or damaged: {exn}") from exn
    if manifest.fingerprint != fingerprint:
        raise errors.RanksError("another rank made its list of shards with another release of shardcache")
    return manifest


# The epoch of all ranks if `set_epoch` is not called, even if one rank reads some samples alone


@dataclass(frozen=True, eq=False, slots=True)
class OneEpoch(Epochs):
    """Decides which epoch follows after a rank ends one early. Can be pickled for DataLoader workers.

    If all ranks end it early (a loop with a fixed number of steps), the next epoch follows. If a single rank does, that
    rank begins the epoch again, in step with the others, which are in it or have yet to begin it. A rank that takes a
    single batch does not end here: that is a look. If it was the first to begin the epoch, it waits some seconds to see
    if others do, too. One that reads an epoch to its end never waits, but logs a warning
    if some rank has not begun that epoch.

    Ranks communicate over the job's key-value store, under keys made of the epoch and each rank's number of passes over
    it; the first rank to decide decides for all. If ranks share no store, each one counts for itself.
    """

    name: str  # the same on all ranks, and unique to the dataset
    place: MeetingPlace
    topology: Callable[[], Topology]
    compare: Callable[[], None]  # raises RanksError if this rank makes other batches than others
    # How long a rank that has ended an epoch early waits for the others to do so. If it was the only one, they wait for
    # it in turn, so this must be well below the timeout of a collective.
    patience_s: float

    def __repr__(self) -> str:
        return f"OneEpoch({self.name}, {self.place!r})"

    def follows(self, epoch: int, left: int, *, is_held: bool = False) -> int:
        """See `Epochs`. Raises EpochMismatchError if this has repeatedly been the only rank to end an epoch early."""
        return left if self._noted(left, _follows_held if is_held else self._follows) == _AGAIN else epoch

    def begin(self, epoch: int | None) -> None:
        """Note that this rank reads an epoch, beyond a look. Raises what `compare` raises."""
        self.compare()
        if epoch is not None:
            self._noted(epoch, self._begin)

    def leave(self, epoch: int) -> None:
        """Note that this rank has ended an epoch early: a look of another rank need not wait until this one goes on."""
        self._noted(epoch, _Passes.leave)

    def end(self, epoch: int) -> None:
        """Note that this rank has read an epoch to its end: those that have left it need not wait for this one."""
        self._noted(epoch, lambda passes: passes.close() if passes.by_all() else None)

    def _noted(self, epoch: int, act: "Callable[[_Passes], str | None]") -> str | None:
        """Return what `act` makes of the ranks' passes; None if they share no record of these, or the store fails."""
        topology = self.topology()
        store = None if topology.world_size == 1 else self.place.store()
        if store is None:
            return None
        try:
            return act(_Passes(store, self._prefix(store, topology), topology, epoch))
        except errors.EpochMismatchError:
            raise
        except errors.RanksError as exn:
            log.warning("cannot check that all ranks read epoch %d: %s", epoch, exn.message)
            return None

    def _prefix(self, store: KeyValueStore, topology: Topology) -> str:
        name = f"{self.name}/{topology.world_size}"
        return f"epochs/{attempt()}/{name}/{store.replica(name, topology.rank, topology.world_size)}"

    def _begin(self, passes: "_Passes") -> None:
        if passes.epoch:
            before = passes.of(passes.epoch - 1)
            if before.number and not before.by_all():
                log.warning(
                    "rank %d begins epoch %d, but not all ranks have begun epoch %d: they may train on different "
                    "epochs; call set_epoch on every rank before each iteration",
                    passes.rank,
                    passes.epoch,
                    before.epoch,
                )
            before.close()
        passes.begin()

    def _follows(self, passes: "_Passes") -> str:
        """Return what follows an epoch that this rank has ended early: the same again, or the next one."""
        if passes.closed():
            return _NEXT
        if passes.alone() and not passes.is_joined_within(min(_LOG_AFTER_S, self.patience_s)):
            log.info("only rank %d has read from epoch %d; it begins the epoch again", passes.rank, passes.epoch)
            return passes.decide(_AGAIN)
        return passes.decided() or passes.leave() or self._wait(passes)

    def _wait(self, passes: "_Passes") -> str:
        waiting = f"rank {passes.rank} has ended epoch {passes.epoch} early, but not all other ranks have"
        soon_s = min(_LOG_AFTER_S, self.patience_s)
        if passes.comes_to_close(soon_s):
            return _NEXT
        log.warning("%s; waiting up to %g s for them", waiting, self.patience_s)
        if passes.comes_to_close(self.patience_s - soon_s):
            return _NEXT
        if passes.number >= _MAX_PASSES:
            raise errors.EpochMismatchError(f"{waiting}; this has happened {passes.number} times")
        log.warning("%s within %g s; beginning epoch %d again", waiting, self.patience_s, passes.epoch)
        return passes.decide(_AGAIN)


def _follows_held(passes: "_Passes") -> str:
    """Return what is read while an iterator of the epoch is held: a look, or all ranks replace their iterators."""
    return _AGAIN if passes.alone() and not passes.closed() else _NEXT


class _Passes:
    """The ranks' passes over an epoch, recorded in the key-value store; `number` counts those that this rank began."""

    def __init__(self, store: KeyValueStore, prefix: str, topology: Topology, epoch: int) -> None:
        self._store, self._prefix, self._topology = store, prefix, topology
        self.rank, self.epoch = topology.rank, epoch
        self._key = f"{prefix}/{epoch}"
        self._mine = f"{self._key}/of/{self.rank}"
        self.number = store.add(self._mine, 0)

    def of(self, epoch: int) -> "_Passes":
        return _Passes(self._store, self._prefix, self._topology, epoch)

    def begin(self) -> None:
        """Note that this rank begins the epoch; no-op if its last pass, of nested iterations, has not ended."""
        if self.number and not (self._has_left() or self.decided()):
            return
        self.number = self._store.add(self._mine, 1)
        if self.number == 1 and self._store.add(f"{self._key}/ranks", 1) > 1:
            self._store.set(f"{self._key}/joined", "1")

    def _has_left(self) -> bool:
        return self._store.has(f"{self._mine}/{self.number}/left")

    def alone(self) -> bool:
        """Return True if no other rank has begun the epoch."""
        return self._begun() == min(1, self.number)

    def is_joined_within(self, timeout_s: float) -> bool:
        """Return True as soon as a second rank has begun the epoch, False if none does within the timeout."""
        return self._store.get(f"{self._key}/joined", timeout_s) is not None

    def by_all(self) -> bool:
        """Return True if all ranks have begun the epoch."""
        return self._begun() == self._topology.world_size

    def _begun(self) -> int:
        return self._store.add(f"{self._key}/ranks", 0)

    def leave(self) -> str | None:
        """Note that this rank has ended its pass early; return what follows if all ranks have."""
        first = self._store.add(f"{self._mine}/{self.number}/left", 1) == 1
        left = self._store.add(f"{self._key}/{self.number}/left", int(first))
        return self.decide(_NEXT) if left == self._topology.world_size else None

    def decided(self) -> str | None:
        """Return what follows the ranks' passes of this number, None if undecided."""
        key = f"{self._key}/{self.number}/follows"
        return self._store.first(key, "") if self._store.has(key) else None

    def decide(self, follows: str) -> str:
        """Decide what follows, unless another rank has; return the decision."""
        decided = self._store.first(f"{self._key}/{self.number}/follows", follows)
        if decided == _NEXT:
            self.close()
        return decided

    def close(self) -> None:
        """Note that this rank is past the epoch."""
        self._store.set(f"{self._key}/closed", "1")

    def comes_to_close(self, timeout_s: float) -> bool:
        """Return True as soon as a rank is past the epoch, False if none is within the timeout."""
        return self._store.get(f"{self._key}/closed", timeout_s) is not None

    def closed(self) -> bool:
        return self._store.has(f"{self._key}/closed")
