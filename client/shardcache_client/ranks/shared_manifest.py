"""Manifests in the job's key-value store, where they outlive a restart of the ranks."""

import json
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import replace

from shardcache import errors
from shardcache.shared.lists.shard_columns import Shards
from shardcache_client.order.sequences.rounds import Topology
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.ranks.key_value_store import KeyValueStore

_PIECE_CHARACTERS = 4 * 2**20  # a key-value store takes values of at most 8 MiB


def share(
    store: KeyValueStore,
    name: str,
    ranks: Topology,
    resolve: Callable[[], Manifest],
    timeout_s: float,
    url: str = "",
) -> Manifest:
    """Return the manifest that rank 0 resolves and publishes, and the others wait for.

    If resolving it fails, all get the error.

    Args:
        name: under which it is published.
        timeout_s: how long the others wait.
        url: for the error of that wait.
    """
    if ranks.rank == 0:
        return _publish(store, name, resolve, timeout_s)
    answer = store.get(name, timeout_s)
    if answer is None:
        raise errors.RankTimeoutError(
            f"rank {ranks.rank} waited {timeout_s:g} s for rank 0 to list the shards of this "
            f"dataset ({name})",
            url=url,
        )
    return _published_manifest(store, answer, timeout_s)


def _publish(
    store: KeyValueStore,
    name: str,
    resolve: Callable[[], Manifest],
    timeout_s: float,
) -> Manifest:
    """On rank 0, return the manifest that is published already, or else resolve and publish one."""
    if store.has(name):
        earlier = store.get(name, timeout_s) or "{}"
        if "error" not in json.loads(earlier):
            return _published_manifest(store, earlier, timeout_s)
        store.delete(name)  # the error of an attempt before a restart
    try:
        manifest = resolve()
    except errors.ShardcacheError as exn:
        store.first(name, json.dumps({"error": exn.to_json()}))
        raise

    upload(store, manifest)
    facts = {"fingerprint": manifest.fingerprint, "versions_named": manifest.versions_named}
    own = json.dumps(facts)
    published = store.first(name, own)  # several processes may be rank 0
    if published != own:
        return _published_manifest(store, published, timeout_s)
    return manifest


def _published_manifest(store: KeyValueStore, answer: str, timeout_s: float) -> Manifest:
    """Return the manifest of a published answer; raise the error if it has one instead."""
    facts = json.loads(answer)
    if "error" in facts:
        raise errors.from_json(facts["error"])
    manifest = download(store, facts["fingerprint"], timeout_s)
    return replace(manifest, versions_named=bool(facts.get("versions_named", True)))


def upload(store: KeyValueStore, manifest: Manifest) -> None:
    """Store the rows under the manifest's fingerprint, for all datasets with the same rows."""
    name = f"rows/{manifest.fingerprint}"
    if store.has(name):
        return
    packed = b64encode(manifest.shards.packed).decode()
    starts = range(0, len(packed), _PIECE_CHARACTERS)
    for number, start in enumerate(starts):
        store.set(f"{name}/{number}", packed[start : start + _PIECE_CHARACTERS])
    store.set(name, str(len(starts)))  # last, so that its presence implies that of all pieces


def download(store: KeyValueStore, fingerprint: str, timeout_s: float) -> Manifest:
    """Return the manifest with a fingerprint that a rank has stored.

    Raises RanksError if it is not there within the timeout, or damaged.
    """
    deadline_s = time.monotonic() + timeout_s
    name = f"rows/{fingerprint}"
    count = int(store.get(name, timeout_s) or 0)
    pieces = []
    for number in range(count):
        remaining_s = deadline_s - time.monotonic()
        pieces.append(store.get(f"{name}/{number}", remaining_s) or "")
    try:
        manifest = Manifest(Shards.unpack(b64decode("".join(pieces))))
    except (ValueError, errors.ProtocolError) as exn:
        raise errors.RanksError(
            f"the list of shards from another rank is incomplete or damaged: {exn}"
        ) from exn
    if manifest.fingerprint != fingerprint:
        raise errors.RanksError(
            "another rank made its list of shards with another release of shardcache"
        )
    return manifest
