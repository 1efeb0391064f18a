"""Starting the daemon over a cache that holds a hundred thousand shards."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.data import SHARD_BYTES
from benchmarks.hollow_shards import make_hollow_shards
from benchmarks.measure import Figure, Row, Target, peak_bytes
from benchmarks.workplace import Daemon, Workplace, settle

SHARDS = 100_000
_URL = "s3://some-bucket/a-dataset/train/shard-{:06d}.tar"


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a daemon: seconds to its first answer, and its peak memory by then."""

    ready_s: float
    rss_bytes: int

    def __str__(self) -> str:
        return f"ready in {self.ready_s:.2f} s with {self.rss_bytes / 1e6:.0f} MB"


def measure(place: Workplace) -> list[Row]:
    """Return time and memory of the best start, with the folder's names in kernel caches."""
    count = max(1, round(SHARDS * place.scale))
    with place.folder() as cache_dir:
        place.say(f"making up {count:,} shards")
        make_hollow_shards(cache_dir, map(_URL.format, range(count)), SHARD_BYTES)
        settle()
        starts = [_start(place, cache_dir, count) for _ in range(place.rounds)]
    return [
        Row(
            "s",
            f"until ready, {count:,} shards",
            Figure((s.ready_s for s in starts), min),
            target=Target("≤", 2.0),
        ),
        Row(
            "MB",
            "of the daemon at its peak",
            Figure((s.rss_bytes / 1e6 for s in starts), min),
            target=Target("≤", 300.0),
        ),
    ]


def _start(place: Workplace, cache_dir: Path, count: int) -> Start:
    with Daemon(cache_dir, "1000TB") as daemon:
        found = daemon.get("/v1/status")["cache"]["shards"]
        start = Start(daemon.ready_s, peak_bytes(daemon.pid))
    if found != count:
        raise RuntimeError(f"the daemon found {found} of {count} shards")
    place.say(str(start))
    return start
