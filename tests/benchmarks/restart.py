"""Starting the daemon over a cache that holds a hundred thousand shards."""

from __future__ import annotations

import os
import random
import tarfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.daemon import Daemon
from benchmarks.data import SHARD_BYTES
from benchmarks.measure import REPEATS, peak_rss_bytes
from benchmarks.table import Row, Target
from benchmarks.workplace import Workplace, settle
from shardcache import tarindex
from shardcache.store.layout import Layout, shard_key
from shardcache.store.shard import Facts

SHARDS = 100_000

_PART_BYTES = 8 * 1024 * 1024
_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a daemon: seconds to its first answer, and the most memory it had resident by then."""

    ready_s: float
    rss_bytes: int

    def __str__(self) -> str:
        return f"ready in {self.ready_s:.2f} s with {self.rss_bytes / 1e6:.0f} MB"


def measure(place: Workplace) -> list[Row]:
    """Return time and memory of the best of three starts; the folder's names are in the kernel's caches."""
    count = max(1, round(SHARDS * place.scale))
    with place.folder() as cache_dir:
        place.say(f"making up {count:,} shards")
        make_shards(Layout(cache_dir), count)
        settle()
        starts = [_start(place, cache_dir, count) for _ in range(REPEATS)]
    return [
        Row("restart", f"s until ready, {count:,} shards", min(s.ready_s for s in starts), target=Target("≤", 2.0)),
        Row("restart", "peak MB of the daemon", min(s.rss_bytes for s in starts) / 1e6, target=Target("≤", 300.0)),
    ]


def _start(place: Workplace, cache_dir: Path, count: int) -> Start:
    with Daemon(cache_dir, "1000TB") as daemon:
        found = daemon.get("/v1/status")["cache"]["shards"]
        start = Start(daemon.ready_s, peak_rss_bytes(daemon.pid))
    if found != count:
        raise RuntimeError(f"the daemon found {found} of {count} shards")
    place.say(str(start))
    return start


def make_shards(layout: Layout, count: int) -> None:
    """Fill a cache folder with published shards: sparse files, each with a sidecar of its own."""
    for folder in layout.folders():
        folder.mkdir(parents=True, exist_ok=True)
    samples = _index(layout.root / "prototype.tar")
    source = random.Random(0)
    # Writing a sidecar flushes it to the disk, which takes a minute for so many; in memory it takes nothing.
    with os.fdopen(os.memfd_create("sidecar"), "rb") as memory:
        in_memory = Path(f"/proc/self/fd/{memory.fileno()}")
        for number in range(count):
            facts = _facts(number, source)
            key = shard_key(facts.url, facts.version)
            tarindex.write(in_memory, facts.to_json(), samples)
            memory.seek(0)
            layout.sidecar(key).write_bytes(memory.read())
            with layout.tar(key).open("wb") as tar:
                tar.truncate(facts.size_bytes)


def _facts(number: int, source: random.Random) -> Facts:
    return Facts(
        url=f"s3://some-bucket/a-dataset/train/shard-{number:06d}.tar",
        version=f'"{source.getrandbits(128):032x}-8"',
        size_bytes=SHARD_BYTES,
        origin_bytes=SHARD_BYTES,
        part_bytes=_PART_BYTES,
        part_crcs=tuple(source.getrandbits(32) for _ in range(SHARD_BYTES // _PART_BYTES)),
        samples=_SAMPLES,
    )


def _index(path: Path) -> tarindex.Samples:
    """Return the index of a small tar; every made-up shard gets it."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(_SAMPLES):
            tar.addfile(tarfile.TarInfo(f"{number:08d}.jpg"))
    samples = tarindex.index_tar(path, "file://prototype.tar")
    path.unlink()
    return samples
