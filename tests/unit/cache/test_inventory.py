"""inventory.py: the plan may evict exactly the cached shards that nothing keeps in place."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcache.cache.catalog.aliases import AliasTable
from shardcache.cache.planner import Planner
from shardcache.cache.residency.evictor import NOW
from shardcache.cache.residency.inventory import Inventory
from shardcache.cache.signal import Signal
from shardcache.store.shard import Shard
from shardcache.store.store import Store
from support.shards.stores import open_store

KEYS = [f"key-{number}" for number in range(8)]
SIZE_BYTES = 100
STEPS = 200


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty cache."""
    store = open_store(tmp_path)
    yield store
    store.close()


@pytest.mark.parametrize("seed", range(4))
def test_the_plan_may_evict_what_nothing_keeps(store: Store, seed: int) -> None:
    """Leases, pins, removals that fail and damage of leased shards, in any order."""
    rng, aliases, changed = random.Random(seed), AliasTable(store.shards), Signal()
    planner = Planner(aliases)
    inventory = Inventory(store, planner, aliases, changed)
    leases: list[Shard] = []
    still_open: set[Shard] = set()

    def evictable() -> list[Shard]:
        return [shard for shard in store.shards.values() if not shard.stays and shard not in still_open]

    def remove(key: str, *, fails: bool) -> None:
        shard = store.shards[key]
        with inventory.evicting(shard):
            del store.shards[key]
            check()
            if fails:
                store.shards[key] = shard
        if fails:
            still_open.add(shard)

    def check() -> None:
        wanted_bytes = SIZE_BYTES * len(evictable())
        keys = planner.now.victims(wanted_bytes, NOW, 0.0) if wanted_bytes else []
        assert sorted(keys or ()) == sorted(shard.key for shard in evictable())
        assert planner.now.victims(wanted_bytes + 1, NOW, 0.0) is None
        assert inventory.leased == set(leases)
        assert set(inventory.pinned) == {shard.key for shard in store.shards.values() if shard.pinned}
        assert store.space.pinned_bytes == SIZE_BYTES * len(inventory.pinned)

    for _ in range(STEPS):
        key = rng.choice(KEYS)
        match rng.choice(["publish", "retain", "retain", "release", "pin", "unpin", "remove", "stays", "damage"]):
            case "publish" if key not in store.shards:
                store.restore(Shard(key, SIZE_BYTES, 0, 0.0))
                inventory.published(store.shards[key])
            case "retain" if (shard := inventory.retain_cached(key)) is not None:
                leases.append(shard)
                still_open.discard(shard)
            case "release" if leases:
                inventory.release(leases.pop(rng.randrange(len(leases))))
            case "pin":
                inventory.pin(key)
                still_open.difference_update(inventory.pinned.values())
            case "unpin":
                inventory.unpin(key)
            case "remove" if any(shard.key == key for shard in evictable()):
                remove(key, fails=False)
            case "stays" if any(shard.key == key for shard in evictable()):
                remove(key, fails=True)
            case "damage" if key in store.shards:
                inventory.gone(key)
                del store.shards[key]
        check()
