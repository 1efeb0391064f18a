"""Liveness report for the service manager: whether the daemon is alive, and a status line for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardcache.store.store import Store
from shardcache.units import size

# A disk that is full, read-only or broken still responds; one that hangs blocks the readers too. After a restart the
# daemon finds another disk, or fails to start, and jobs that may read directly from the object store do so.
_HUNG_S = 120.0


@dataclass(frozen=True, slots=True)
class Liveness:
    """The daemon's liveness at one moment.

    Attributes:
        alive: False if only a restart can help. Does not depend on any origin.
        line: status line: what the daemon serves, or what is wrong.
    """

    alive: bool
    line: str


def liveness(disk: Mapping[str, Any], store: Store, readers: int) -> Liveness:
    """Return the daemon's liveness, given the disk's state from `Cache.health` and the number of connected readers.

    Calling it on the event loop is itself the proof that the loop is running.
    """
    if disk["silent_s"] > _HUNG_S:
        return Liveness(False, f"The cache disk has not responded for {disk['silent_s']:.0f} s.")
    used, capacity = map(size, (store.space.used_bytes, store.space.capacity_bytes))
    trouble = "" if disk["error"] is None else f" Not fetching: {disk['error']['message']}."
    return Liveness(True, f"{readers} readers; {len(store.shards)} shards, {used} of {capacity}.{trouble}")
