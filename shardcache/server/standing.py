"""How the daemon is, for who would end it if it were dead: whether it lives, and a line for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardcache.store.store import Store
from shardcache.units import size

# A disk that is full, read-only or broken still answers; one that hangs takes the readers along. The next daemon finds
# another disk, or none, and then jobs read straight from the store where they may.
_HUNG_S = 120.0


@dataclass(frozen=True, slots=True)
class Standing:
    """How it is now.

    Attributes:
        alive: False where only a new process can help. No store has a say in it.
        line: what it serves, or what is wrong.
    """

    alive: bool
    line: str


def standing(disk: Mapping[str, Any], store: Store, readers: int) -> Standing:
    """Return how a daemon is, given what `Cache.health` says of its disk and how many readers are connected.

    Who calls it on the event loop proves by that alone that the loop turns.
    """
    if disk["silent_s"] > _HUNG_S:
        return Standing(False, f"The cache's disk has not answered for {disk['silent_s']:.0f} s.")
    used, capacity = map(size, (store.space.used_bytes, store.space.capacity_bytes))
    trouble = "" if disk["error"] is None else f" Fetching nothing: {disk['error']['message']}."
    return Standing(True, f"{readers} readers; {len(store.shards)} shards, {used} of {capacity}.{trouble}")
