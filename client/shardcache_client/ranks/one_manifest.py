"""One manifest for all ranks: rank 0's, or, if datasets are created before torch.distributed, a comparison."""

from __future__ import annotations

import hashlib
import json
import os
import time
import zlib
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Sequence

from shardcache.errors import ManifestMismatchError, RanksError, RankTimeoutError, ShardcacheError, from_json
from shardcache.protocol import ShardRef
from shardcache_client.order.manifest import Manifest
from shardcache_client.ranks import distributed
from shardcache_client.ranks.distributed import KeyValueStore, MeetingPlace
from shardcache_client.ranks.mesh import MeshRanks
from shardcache_client.topology import Ranks, Topology

_PIECE_CHARACTERS = 4 * 2**20  # a key-value store takes values of at most 8 MiB
_COMPARE_TIMEOUT_S = 30.0

_made: Counter[tuple[str, Ranks | None]] = Counter()  # by urls, and the ranks that the user named


class OneManifest:
    """The manifest of one dataset, across all ranks. Can be pickled for DataLoader workers.

    Datasets of different processes are matched by their urls, by whether ranks or a mesh were named, and, among those
    that agree in this, by the order of their creation. The manifest stays in the key-value store, so a process
    restarted by torchrun gets the same one.

    Args:
        urls: as the user gave them.
        given: the ranks that the user named, if any.
        timeout_s: how long to wait for rank 0's manifest.

    Attributes:
        settled: True if all ranks have the manifest of rank 0.
        name: name of the dataset, the same on all ranks and unique.
        place: finds the key-value store.
    """

    def __init__(self, urls: Sequence[str], given: Ranks | MeshRanks | None, timeout_s: float) -> None:
        how = [] if given is None else [type(given).__name__]
        digest = hashlib.blake2b(json.dumps([*urls, *how]).encode(), digest_size=16).hexdigest()
        kind = digest, None if isinstance(given, MeshRanks) else given
        self.name = f"{digest}/{_made[kind]}"
        _made[kind] += 1
        self._first_url = next(iter(urls), "")
        self._timeout_s = timeout_s
        self.place = MeetingPlace()
        self.settled = False
        self._compared_by = 0

    def __repr__(self) -> str:
        return f"OneManifest({self.name}, settled={self.settled})"

    def settle(self, ranks: Ranks, resolve: Callable[[], Manifest]) -> Manifest:
        """Return the result of `resolve` on rank 0, or in this process if torch.distributed is not initialised.

        An error on rank 0 is raised on every rank. Raises RankTimeoutError if rank 0's manifest does not come in time,
        RanksError if the connection to the key-value store breaks.
        """
        known = distributed.ranks()
        store = None if known is None or known.world_size == 1 else KeyValueStore.of_process_group()
        if store is None:
            return resolve()
        self.settled = True
        return self.share(store, ranks, resolve)

    def share(self, store: KeyValueStore, ranks: Ranks, resolve: Callable[[], Manifest]) -> Manifest:
        """Share a manifest over a key-value store: rank 0 resolves and publishes it, the others wait for it."""
        name = f"manifest/{self.name}/{ranks.world_size}"
        if ranks.rank == 0:
            return self._publish(store, name, resolve)
        answer = store.get(name, self._timeout_s)
        if answer is None:
            raise RankTimeoutError(
                f"rank {ranks.rank} waited {self._timeout_s:g} s for rank 0 to list the shards of this dataset "
                f"(number {self._number} with these urls)",
                url=self._first_url,
            )
        return self._take(store, answer)

    @property
    def _number(self) -> int:
        return int(self.name.rpartition("/")[2]) + 1

    def _publish(self, store: KeyValueStore, name: str, resolve: Callable[[], Manifest]) -> Manifest:
        if store.has(name):
            earlier = store.get(name, self._timeout_s) or ""
            if not _is_error(earlier):
                return self._take(store, earlier)
            store.delete(name)
        try:
            manifest = resolve()
        except ShardcacheError as exn:
            store.first(name, json.dumps({"error": exn.to_json()}))
            raise
        _upload(store, manifest)
        told = json.dumps({"fingerprint": manifest.fingerprint})
        # Several processes may be rank 0.
        stays = store.first(name, told)
        return manifest if stays == told else self._take(store, stays)

    def _take(self, store: KeyValueStore, answer: str) -> Manifest:
        said = json.loads(answer)
        if "error" in said:
            raise from_json(said["error"])
        return _download(store, said["fingerprint"], self._timeout_s)

    def compare(self, manifest: Manifest, topology: Topology, *, counted: bool) -> None:
        """Raise ManifestMismatchError if this manifest differs from that of the first rank to compare.

        For the main process or worker 0 of a rank, at the start of an iteration. It compares once, without waiting for
        others. No-op if the manifest came from rank 0, or if the ranks share no key-value store.

        Args:
            counted: True if samples are dealt. Otherwise counts are ignored, as one rank may know more than another.
        """
        if self.settled or self._compared_by == os.getpid() or (store := self.place.store()) is None:
            return
        self._compare(store, manifest if counted else _without_counts(manifest), topology)
        self._compared_by = os.getpid()

    def compare_selection(self, name: str, selection: str, topology: Topology) -> None:
        """Raise ManifestMismatchError if the first rank to compare has selected other samples of the shards.

        As `compare`, but each time, and also if the manifest came from rank 0.

        Args:
            name: of the dataset, the same on all ranks; datasets that are derived from one have names of their own.
            selection: identifies the selected samples.
        """
        store = self.place.store()
        if store is None:
            return
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        key = f"selection/{attempt}/{name}/{topology.world_size}"
        rank, _, other = store.first(key, f"{topology.rank} {selection}").partition(" ")
        if other != selection:
            raise ManifestMismatchError(
                f"rank {topology.rank} has selected other samples than rank {rank}",
                url=self._first_url,
                remedy="give select, subset and split the same arguments on all ranks; a predicate must not depend on "
                "the rank, on chance, or on the order of calls",
            )

    def _compare(self, store: KeyValueStore, mine: Manifest, topology: Topology) -> None:
        # Processes restarted by torchrun may see other shards than before.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        name = f"compare/{attempt}/{self.name}/{topology.world_size}"
        if not store.has(name):
            _upload(store, mine)
        rank, _, fingerprint = store.first(name, f"{topology.rank} {mine.fingerprint}").partition(" ")
        if fingerprint == mine.fingerprint:
            return
        other = _download(store, fingerprint, _COMPARE_TIMEOUT_S)
        raise ManifestMismatchError(
            f"rank {topology.rank} would read different shards than rank {rank}: {mine.difference(other)}",
            url=self._first_url,
        )


def _is_error(answer: str) -> bool:
    return "error" in json.loads(answer or "{}")


def _without_counts(manifest: Manifest) -> Manifest:
    return Manifest.of(ShardRef(shard.url, shard.version, shard.size_bytes) for shard in manifest)


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
    pieces: list[str] = []
    name = f"rows/{fingerprint}"
    count = store.get(name, timeout_s)
    for number in range(int(count or 0)):
        piece = store.get(f"{name}/{number}", deadline_s - time.monotonic())
        pieces.append(piece or "")
    try:
        manifest = Manifest.from_json(json.loads(zlib.decompress(b64decode("".join(pieces)))))
    except (ValueError, zlib.error) as exn:
        raise RanksError(f"the list of shards from another rank is incomplete or damaged: {exn}") from exn
    if manifest.fingerprint != fingerprint:
        raise RanksError("another rank made its list of shards with another release of shardcache")
    return manifest
