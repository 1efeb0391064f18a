"""Many readers of one job over a hundred thousand shards: first samples, and the daemon's costs.

All shards are one small tar, which nginx serves under as many names. Each rank is a process that
makes the dataset from an index file and forks its readers. The cache holds a few shards for each,
so that fetching ends soon.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

from benchmarks.measure import Figure, Row, Target, peak_bytes, thread_cpu_s
from benchmarks.node.rank import READERS
from benchmarks.workplace import PREPARED_S, Daemon, Workplace
from shardcache.shared.lists import shardlist
from shardcache.shared.protocol import ShardRef
from support.cluster.tier import Nginx
from support.network.ports import free_port
from support.shards.tars import write_shards

SHARDS = 100_000
RANKS = 8
_SAMPLES = 4  # of each shard
_CAPACITY = "20MB"
_CONFIG = """
daemon off;
worker_processes 1;
pid {folder}/pid;
user root;
events {{ }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    server {{
        listen 127.0.0.1:{port};
        root {folder};
        location /train/ {{ try_files /shard-000000.tar =404; }}
    }}
}}
"""

TARGETS = {
    "s until the first samples of all": 4.0,
    "s until that of one that joins": 0.5,
    "CPU-s of the event loop": 3.0,
    "ms longest turn of the loop": 50.0,
    "MB more of the daemon at its peak": 30.0 + READERS,
    "s to make the dataset": 0.3,
    "MB of a reader at its peak": 60.0,
}


def measure(place: Workplace) -> list[Row]:
    """Return the medians of all rounds, each over a new daemon."""
    shards = round(SHARDS * place.scale)
    with _store(shards) as index:
        rounds = [_round(place, index) for _ in range(place.rounds)]
    what = f"{READERS} readers, {shards:,} shards"
    return [
        Row(unit, f"{name}, {what}", Figure(each[at] for each in rounds), target=Target("≤", limit))
        for at, ((unit, _, name), limit) in enumerate(
            (name.partition(" "), limit) for name, limit in TARGETS.items()
        )
    ]


@contextmanager
def _store(shards: int) -> Iterator[str]:
    """Serve the shards; yield the url of their index."""
    with tempfile.TemporaryDirectory(prefix="shardcache-scale-") as name:
        folder = Path(name)
        port = free_port()
        folder.chmod(0o755)
        (path,) = write_shards(folder, 1, _SAMPLES)
        config = folder / "nginx.conf"
        config.write_text(_CONFIG.format(folder=folder, port=port))
        with Nginx(None, config, [("127.0.0.1", port)]):
            url = f"http://127.0.0.1:{port}"
            with urlopen(Request(f"{url}/train/000000.tar", method="HEAD")) as answer:
                version = answer.headers["ETag"]
                size_bytes = path.stat().st_size
            urls = (
                f"{url}/train/laion-high-resolution-{number:06d}.tar" for number in range(shards)
            )
            refs = (ShardRef(each, version, size_bytes, _SAMPLES) for each in urls)
            (folder / "index.json").write_text(shardlist.write(refs))
            yield f"{url}/index.json"


def _round(place: Workplace, index: str) -> list[float]:
    """Return the figures of `TARGETS`, for readers that start together and for a later one.

    The start of the interpreters does not count, nor that of the daemon.
    """
    with (
        place.folder() as cache_dir,
        tempfile.TemporaryDirectory() as name,
        Daemon(cache_dir, _CAPACITY) as daemon,
    ):
        time.sleep(PREPARED_S)
        folder = Path(name)
        idle_bytes = peak_bytes(daemon.pid)
        idle_s = thread_cpu_s(daemon.pid)[daemon.pid]
        where = (index, str(daemon.socket), str(folder))
        readers = READERS // RANKS
        command = [sys.executable, "-m", "benchmarks.node.rank", *where]
        ranks = [subprocess.Popen([*command, str(rank), str(readers)]) for rank in range(RANKS)]
        while len(list(folder.glob("*.ready"))) < RANKS:
            time.sleep(0.01)
        begun_s = time.time()
        (folder / "go").touch()
        firsts = [_first(folder, number) for number in range(READERS)]
        loop_s = thread_cpu_s(daemon.pid)[daemon.pid] - idle_s
        ranks.append(subprocess.Popen([*command, str(READERS), "1"]))
        joined = _first(folder, READERS)
        lag_s = daemon.status()["loop_lag"]["max_s"]
        more_bytes = peak_bytes(daemon.pid) - idle_bytes
        (folder / "end").touch()
        for rank in ranks:
            rank.wait()
    figures = [
        max(first["at_s"] for first in firsts) - begun_s,
        joined["first_s"],
        loop_s,
        1e3 * lag_s,
    ]
    figures += [more_bytes / 1e6, joined["made_s"], joined["bytes"] / 1e6]
    place.say(
        "; ".join(f"{figure:.2f} {name}" for figure, name in zip(figures, TARGETS, strict=True))
    )
    return figures


def _first(folder: Path, number: int) -> dict[str, float]:
    """Wait until a reader has had its first sample; return what it wrote."""
    while not (folder / f"{number}.json").exists():
        time.sleep(0.01)
    found: dict[str, float] = json.loads((folder / f"{number}.json").read_text())
    return found
