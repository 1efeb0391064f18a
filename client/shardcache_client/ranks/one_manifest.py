"""Manifests in the key-value store: rank 0's for all ranks, or one to compare with. They outlive a restart."""

from __future__ import annotations

import json
import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable

from shardcache.errors import RanksError, RankTimeoutError, ShardcacheError, from_json
from shardcache.protocol import ShardRef
from shardcache_client.order.manifest import Manifest
from shardcache_client.ranks.distributed import KeyValueStore
from shardcache_client.topology import Ranks

_PIECE_CHARACTERS = 4 * 2**20  # a key-value store takes values of at most 8 MiB


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
    upload(store, manifest)
    mine = json.dumps({"fingerprint": manifest.fingerprint})
    stays = store.first(name, mine)  # several processes may be rank 0
    return manifest if stays == mine else _take(store, stays, timeout_s)


def _take(store: KeyValueStore, answer: str, timeout_s: float) -> Manifest:
    found = json.loads(answer)
    if "error" in found:
        raise from_json(found["error"])
    return download(store, found["fingerprint"], timeout_s)


def without_counts(manifest: Manifest) -> Manifest:
    """Return a manifest without its numbers of samples."""
    return Manifest.of(ShardRef(shard.url, shard.version, shard.size_bytes) for shard in manifest)


def upload(store: KeyValueStore, manifest: Manifest) -> None:
    """Store the rows under the manifest's fingerprint, for all datasets with the same rows."""
    name = f"rows/{manifest.fingerprint}"
    if store.has(name):
        return
    packed = b64encode(zlib.compress(json.dumps(manifest.to_json()).encode(), 1)).decode()
    starts = range(0, len(packed), _PIECE_CHARACTERS)
    for number, start in enumerate(starts):
        store.set(f"{name}/{number}", packed[start : start + _PIECE_CHARACTERS])
    store.set(name, str(len(starts)))  # last, so that its presence implies that of all pieces


def download(store: KeyValueStore, fingerprint: str, timeout_s: float) -> Manifest:
    """Return the manifest whose rows were stored. Raises RanksError if they are incomplete or damaged."""
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
