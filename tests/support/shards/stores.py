"""A cache folder with shards in it, made by the product's own code, or with sparse files for shards."""

import os
import random
import tarfile
from collections.abc import Iterable
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
from shardcache.shared.protocol import ShardRef
from shardcache.store.folder.layout import SIDECAR, TAR, Layout
from shardcache.store.indexing.indexer import IndexRequest, index_shard
from shardcache.store.keys import place_of, shard_key
from shardcache.store.shard import Facts, Shard
from shardcache.store.store import Store
from shardcache.tarindex import grouping, tables
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


async def publish(store: Store, url: str, *, version: str = '"1"', samples: int = 20, is_file: bool = False) -> Shard:
    """Put a shard into the store as the fetcher does, accounting included."""
    data = make_tar(random_samples(samples))
    key = shard_key(place_of(url, is_file=is_file), version)
    tar, sidecar = (store.layout.unpublished(key, suffix) for suffix in (TAR, SIDECAR))
    tar.write_bytes(data)
    crcs = tuple(checksums.crc32c(data[at : at + PIECE_BYTES]) for at in range(0, len(data), PIECE_BYTES))
    facts = Facts(url, version, len(data), len(data), PIECE_BYTES, crcs, samples=0)
    indexed = index_shard(IndexRequest(str(tar), str(sidecar), facts.to_json(), url, True, allowed_bytes=len(data)))
    files = await store.seal(tar, sidecar, replace(facts, samples=indexed.samples))
    shard = await store.publish(key, files)
    store.space.kept_bytes += shard.kept_bytes
    return shard


_PART_BYTES = 8 * 1024 * 1024
_SAMPLES = 8


def make_hollow_shards(cache_dir: Path, urls: Iterable[str], size_bytes: int) -> list[ShardRef]:
    """Fill a cache folder with sparse files, each with a sidecar of its own; return how plans call them.

    They can be leased, evicted and listed. Whoever reads one finds it damaged: set `--scrub-rate 0`.
    """
    layout, source = Layout(cache_dir), random.Random(0)
    for folder in layout.folders():
        folder.mkdir(parents=True, exist_ok=True)
    samples = _index(layout.root / "prototype.tar")
    # Writing a sidecar flushes it to the disk, which takes a minute for so many; in memory it takes nothing.
    with os.fdopen(os.memfd_create("sidecar"), "rb") as memory:
        in_memory = Path(f"/proc/self/fd/{memory.fileno()}")
        refs = []
        for url in urls:
            facts = _facts(url, size_bytes, source)
            tables.write(in_memory, facts.to_json(), samples)
            memory.seek(0)
            _publish(layout, facts, memory.read())
            refs.append(ShardRef(url, facts.version, size_bytes, _SAMPLES))
    return refs


def _publish(layout: Layout, facts: Facts, sidecar: bytes) -> None:
    key = shard_key(facts.url, facts.version)
    layout.sidecar(key).write_bytes(sidecar)
    with layout.tar(key).open("wb") as tar:
        tar.truncate(facts.size_bytes)


def _facts(url: str, size_bytes: int, source: random.Random) -> Facts:
    return Facts(
        url=url,
        version=f'"{source.getrandbits(128):032x}-8"',
        size_bytes=size_bytes,
        origin_bytes=size_bytes,
        part_bytes=_PART_BYTES,
        part_crcs=tuple(source.getrandbits(32) for _ in range(-(-size_bytes // _PART_BYTES))),
        samples=_SAMPLES,
    )


def _index(path: Path) -> tables.Samples:
    """Return the index of a small tar; every hollow shard gets it."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(_SAMPLES):
            tar.addfile(tarfile.TarInfo(f"{number:08d}.jpg"))
    samples = grouping.index_tar(path, "file://prototype.tar")
    path.unlink()
    return samples
