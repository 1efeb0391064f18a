"""A cache folder with shards in it, made by the product's own code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from awscrt import checksums

from shardcache.cache.pins import Pins
from shardcache.cache.planner import Planner
from shardcache.cache.residency import Residency
from shardcache.cache.waits import Turns
from shardcache.config import Amount
from shardcache.metrics import Counters
from shardcache.store.folder import SIDECAR, TAR, shard_key
from shardcache.store.indexing import IndexRequest, index_shard
from shardcache.store.shard import Facts, Shard
from shardcache.store.store import Store
from support.shards.tars import make_tar, random_samples

PIECE_BYTES = 64 * 1024


def open_store(root: Path, capacity_bytes: int = 10**9) -> Store:
    return Store.open(root, Amount(capacity_bytes), Amount(0))


def residency_of(store: Store, pin_limit_bytes: int = 10**9) -> Residency:
    """Return the cached shards of a store; they are in no plan."""
    pins = Pins(store, Turns(), Amount(pin_limit_bytes))
    return Residency(store, Planner(store.shards), pins, Counters())


async def publish(store: Store, url: str, *, version: str = '"1"', samples: int = 20) -> Shard:
    """Put a shard into the store as the fetcher does, accounting included."""
    data = make_tar(random_samples(samples))
    key = shard_key(url, version)
    tar, sidecar = (store.layout.in_progress(key, suffix) for suffix in (TAR, SIDECAR))
    tar.write_bytes(data)
    crcs = tuple(checksums.crc32c(data[at : at + PIECE_BYTES]) for at in range(0, len(data), PIECE_BYTES))
    facts = Facts(url, version, len(data), len(data), PIECE_BYTES, crcs, samples=0)
    indexed = index_shard(IndexRequest(str(tar), str(sidecar), facts.to_json(), url, True, allowed_bytes=len(data)))
    shard = await store.publish(key, tar, sidecar, replace(facts, samples=indexed.samples))
    store.space.kept_bytes += shard.kept_bytes
    return shard
