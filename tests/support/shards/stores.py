"""A cache folder with shards in it, made by the product's own code."""

from dataclasses import dataclass, replace
from pathlib import Path

from awscrt import checksums

from shardcache.cache.disk_health import DiskHealth
from shardcache.cache.planner import Planner
from shardcache.cache.space.pins import Pins
from shardcache.cache.space.residency import Residency
from shardcache.cache.waiting.signals import Signal
from shardcache.cache.waiting.turns import Turns
from shardcache.config.amounts import DiskAmount
from shardcache.store.folder.layout import SIDECAR, TAR
from shardcache.store.indexing.indexer import IndexRequest, index_shard
from shardcache.store.keys import place_of, shard_key
from shardcache.store.shard import Facts, Shard
from shardcache.store.store import Store
from shardcache.telemetry.metrics import Counters
from support.shards.tars import make_tar, random_samples

PIECE_BYTES = 64 * 1024


def open_store(root: Path) -> Store:
    return Store.open(root, DiskAmount(10**9), DiskAmount(0))


@dataclass(frozen=True, slots=True)
class Kept:
    """The cached shards of a store, and what keeps them."""

    planner: Planner
    pins: Pins
    changed: Signal
    residency: Residency


def kept_in(store: Store, pin_limit_bytes: int = 10**9) -> Kept:
    """Return the cached shards of a store; they are in no plan."""
    planner = Planner(store.shards)
    pins = Pins(store, Turns(), DiskAmount(pin_limit_bytes))
    changed = Signal()
    residency = Residency(store, planner, pins, Counters(), changed)
    return Kept(planner, pins, changed, residency)


def health_of(store: Store) -> DiskHealth:
    """Return the watch over a store's disk."""
    kept = kept_in(store)
    return DiskHealth(store, kept.residency, kept.pins, kept.changed)


async def publish(
    store: Store, url: str, *, version: str = '"1"', samples: int = 20, is_file: bool = False
) -> Shard:
    """Put a shard into the store as the fetcher does, accounting included."""
    data = make_tar(random_samples(samples))
    key = shard_key(place_of(url, is_file=is_file), version)
    tar, sidecar = (store.layout.unpublished(key, suffix) for suffix in (TAR, SIDECAR))
    tar.write_bytes(data)
    crcs = tuple(
        checksums.crc32c(data[at : at + PIECE_BYTES]) for at in range(0, len(data), PIECE_BYTES)
    )
    facts = Facts(url, version, len(data), len(data), PIECE_BYTES, crcs, samples=0)
    indexed = index_shard(
        IndexRequest(str(tar), str(sidecar), facts.to_json(), url, True, allowed_bytes=len(data))
    )
    files = await store.seal(tar, sidecar, replace(facts, samples=indexed.samples))
    shard = await store.publish(key, files)
    store.space.kept_bytes += shard.kept_bytes
    return shard
