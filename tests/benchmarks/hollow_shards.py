"""A cache folder of any number of shards that take no space: sparse files with sidecars."""

import os
import random
import tarfile
from collections.abc import Iterable
from pathlib import Path

from shardcache.shared.protocol import ShardRef
from shardcache.shared.tarindex import grouping, tables
from shardcache.store.folder.layout import Layout
from shardcache.store.keys import shard_key
from shardcache.store.shard import Facts

_PART_BYTES = 8 * 1024 * 1024
_SAMPLES = 8


def make_hollow_shards(cache_dir: Path, urls: Iterable[str], size_bytes: int) -> list[ShardRef]:
    """Fill a cache folder with sparse files and their sidecars; return their names in plans.

    They can be leased, evicted and listed. Whoever reads one finds it damaged: set `--scrub-rate
    0`.
    """
    layout = Layout(cache_dir)
    source = random.Random(0)
    for folder in layout.folders():
        folder.mkdir(parents=True, exist_ok=True)
    samples = _index(layout.root / "prototype.tar")
    # Writing a sidecar flushes it to the disk, which takes a minute for so many; in memory it takes
    # nothing.
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
