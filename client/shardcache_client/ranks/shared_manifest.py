"""Manifests in the job's key-value store, where they outlive a restart of the ranks.

A manifest is the list of a dataset's shards. Rank 0 gets it from the daemon and publishes it, so
that all ranks read the same shards, even if the bucket changes at this moment. Three things are
stored:

- The rows of the manifest, one for each shard, under the manifest's fingerprint.
- The fingerprint, under the name of the dataset. It stays valid after a restart.
- Rank 0's answer to the other ranks: the fingerprint, or the error if there is no manifest. It has
  a key of its own for each restart, so that no rank gets an error from before the restart.
"""

import json
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import replace

from shardcache.shared import exceptions
from shardcache.shared.lists.shard_columns import Shards
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.order.topology import Topology
from shardcache_client.ranks.key_value_store import KeyValueStore, restart_count

# Number of characters of a manifest that are stored under one key. A key-value store takes values
# of at most 8 MiB.
_PIECE_CHARACTERS = 4 * 2**20
_POLL_S = 1.0  # interval at which a waiting rank looks for an already published manifest


def share_manifest(
    store: KeyValueStore,
    name: str,
    ranks: Topology,
    resolve: Callable[[], Manifest],
    timeout_s: float,
    url: str = "",
) -> Manifest:
    """Return the manifest that rank 0 resolves and publishes. The other ranks wait for it.

    If rank 0 cannot resolve the manifest, all ranks raise the error.

    Args:
        store: the job's key-value store.
        name: name under which the manifest is published.
        ranks: rank of this process.
        resolve: returns the manifest; called on rank 0 only.
        timeout_s: maximum time for which the other ranks wait.
        url: url that the error of a timeout names.
    """
    if ranks.rank == 0:
        return _publish(store, name, resolve, timeout_s)
    answer = _await_answer(store, name, timeout_s)
    if answer is None:
        raise exceptions.RankTimeoutError(
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
    """Return the manifest that was published before, or resolve and publish one. Rank 0 only.

    For the arguments, see `share_manifest`.
    """
    published_before = store.peek(name)
    if published_before is not None:
        store.set(_answer_key(name), published_before)
        return _published_manifest(store, published_before, timeout_s)
    try:
        manifest = resolve()
    except exceptions.ShardcacheError as exn:
        store.set_if_unset(_answer_key(name), json.dumps({"error": exn.to_json()}))
        raise

    upload(store, manifest)
    # The rows that are uploaded do not have the manifest's `versions_named`.
    own = json.dumps(
        {"fingerprint": manifest.fingerprint, "versions_named": manifest.versions_named}
    )
    # Several processes may read for rank 0: all of them use the manifest of the first.
    published = store.set_if_unset(name, own)
    store.set(_answer_key(name), published)
    if published != own:
        return _published_manifest(store, published, timeout_s)
    return manifest


def _await_answer(store: KeyValueStore, name: str, timeout_s: float) -> str | None:
    """Return rank 0's answer as soon as there is one; None if there is none within the timeout.

    The fingerprint may also be found under the name of the dataset. This is necessary because the
    answer's key has the number of restarts, which may differ between the nodes of a job: torchrun
    counts only restarts on the node whose worker failed.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        published = store.peek(name)
        if published is not None:
            return published
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            return None
        answer = store.get(_answer_key(name), min(_POLL_S, remaining_s))
        if answer is not None:
            return answer


def _answer_key(name: str) -> str:
    """Return the key of rank 0's answer since the last restart of the ranks."""
    return f"{name}/{restart_count()}"


def _published_manifest(store: KeyValueStore, answer: str, timeout_s: float) -> Manifest:
    """Return the manifest that a published answer names; raise the error if it has one instead.

    Args:
        store: the job's key-value store.
        answer: the published JSON text, with a manifest's fingerprint or an error.
        timeout_s: maximum time to wait for the manifest's rows.
    """
    fields = json.loads(answer)
    if "error" in fields:
        raise exceptions.from_json(fields["error"])
    manifest = download(store, fields["fingerprint"], timeout_s)
    return replace(manifest, versions_named=bool(fields.get("versions_named", True)))


def upload(store: KeyValueStore, manifest: Manifest) -> None:
    """Store a manifest's rows under its fingerprint, unless they are there already.

    A row is a shard's url, version, size and number of samples. Datasets with the same rows share
    them.
    """
    name = f"rows/{manifest.fingerprint}"
    if store.has(name):
        return
    packed = b64encode(manifest.shards.packed).decode()
    starts = range(0, len(packed), _PIECE_CHARACTERS)
    for number, start in enumerate(starts):
        store.set(f"{name}/{number}", packed[start : start + _PIECE_CHARACTERS])
    # The number of pieces is stored last: if it is there, all pieces are.
    store.set(name, str(len(starts)))


def download(store: KeyValueStore, fingerprint: str, timeout_s: float) -> Manifest:
    """Return the manifest with this fingerprint, which another rank stores.

    Raises RanksError if the manifest is not there within the timeout, or if it is damaged.
    """
    deadline_s = time.monotonic() + timeout_s
    name = f"rows/{fingerprint}"
    # If the count or a piece is missing, the text is incomplete, and unpacking it fails.
    count = int(store.get(name, timeout_s) or 0)
    pieces = []
    for number in range(count):
        remaining_s = deadline_s - time.monotonic()
        pieces.append(store.get(f"{name}/{number}", remaining_s) or "")
    try:
        manifest = Manifest(Shards.unpack(b64decode("".join(pieces))))
    except (ValueError, exceptions.ProtocolError) as exn:
        raise exceptions.RanksError(
            f"the list of shards from another rank is incomplete or damaged: {exn}"
        ) from exn
    if manifest.fingerprint != fingerprint:
        raise exceptions.RanksError(
            "another rank made its list of shards with another release of shardcache"
        )
    return manifest
