"""From the store to local files: `shardcache warm` compared with s5cmd, awscrt and obstore.

Speed is measured into memory, over http and https; then, over http, until everything is on disk. No
contender's wall time includes the start of an interpreter; ours is that of the request that `warm`
sends to a running daemon, and the processor time is that of the daemon with all of its processes.

Most of a download can be spread over more threads and processes. The daemon's event loop cannot:
its processor time per gigabyte bounds the throughput of a node, however many cores it has.

Google's and Azure's stores are compared with a web server: one nginx serves the same files as all
three.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks.data import LARGE
from benchmarks.downloads.downloaders import TOOLS, Spent, download
from benchmarks.measure import (
    Row,
    Target,
    call,
    interleaved,
    median_of,
    thread_cpu_s,
    touch,
    tree_cpu_s,
)
from benchmarks.servers import Endpoint, endpoints
from benchmarks.workplace import BUCKET, PREPARED_S, Daemon, Workplace, settle

OURS = "shardcache"
MEMORY = Path("/dev/shm")
LOOP_CPU_S_PER_GB = 0.08  # what 100 Gbit/s leave the event loop
_SLACK_BYTES = (
    200_000_000  # the cache's own files, and what others put into memory at the same time
)


@dataclass(frozen=True, slots=True)
class Download:
    """Time and processor time of one download of the dataset.

    Attributes:
        size_bytes: of the dataset.
        spent: until all was fetched; its thread is the event loop for shardcache, the busiest one
            for a peer.
        sync_s: until everything was on disk, after that; 0 in memory.
    """

    size_bytes: int
    spent: Spent
    sync_s: float

    @property
    def mb_per_s(self) -> float:
        return self.size_bytes / 1e6 / (self.spent.wall_s + self.sync_s)

    @property
    def cpu_s_per_gb(self) -> float:
        return self.spent.cpu_s / self.size_bytes * 1e9

    @property
    def thread_cpu_s_per_gb(self) -> float:
        return self.spent.thread_cpu_s / self.size_bytes * 1e9

    def __str__(self) -> str:
        return (
            f"{self.mb_per_s:.0f} MB/s, {self.cpu_s_per_gb:.2f} CPU-s/GB, "
            f"one thread {self.thread_cpu_s_per_gb:.3f}, {self.sync_s:.1f} s of sync"
        )


def measure(place: Workplace) -> Iterator[Row]:
    """Yield throughput and processor time over each endpoint, medians of all rounds."""
    with endpoints(place, LARGE) as found:
        for endpoint in found if _memory_suffices(place) else ():
            yield from _speed(place, endpoint)
            if endpoint.name == "nginx, http":
                yield from _stores(place, endpoint)
        yield from _until_on_disk(place)


def _memory_suffices(place: Workplace) -> bool:
    wanted_bytes = place.dataset(LARGE).tar_bytes + _SLACK_BYTES
    free_bytes = shutil.disk_usage(MEMORY).free
    if free_bytes < wanted_bytes:
        place.say(
            f"{MEMORY} has {free_bytes / 1e9:.1f} GB free, "
            f"downloads into memory take {wanted_bytes / 1e9:.1f} GB: their rows are left out"
        )
    return free_bytes >= wanted_bytes


def _speed(place: Workplace, endpoint: Endpoint) -> list[Row]:
    tries = _tries(place, endpoint, TOOLS, on_disk=False)
    where = f"in memory, {endpoint.name}"
    mb_per_s = Target("≥", 0.8 if endpoint.tls else 0.9)
    cpu_s_per_gb = Target("≤", 1.3 if endpoint.tls else 1.1)
    thread_s = median_of(tries, "thread_cpu_s_per_gb")
    return [
        *_rows("MB/s", where, median_of(tries, "mb_per_s"), dict.fromkeys(TOOLS, mb_per_s)),
        *_rows("CPU-s/GB", where, median_of(tries, "cpu_s_per_gb"), {"s5cmd": cpu_s_per_gb}),
        Row(
            "CPU-s/GB",
            f"of the event loop, {where}",
            thread_s[OURS],
            target=Target("≤", LOOP_CPU_S_PER_GB),
        ),
        *_rows("CPU-s/GB", f"of the busiest thread, {where}", thread_s),
    ]


def _stores(place: Workplace, endpoint: Endpoint) -> list[Row]:
    """Return what gs:// and az:// take, if their packages are installed, and http:// as well."""
    web = endpoint.env["AWS_ENDPOINT_URL"]
    google = {"STORAGE_EMULATOR_HOST": web, "NO_GCE_CHECK": "true"}
    azure = {
        "AZURE_STORAGE_CONNECTION_STRING": f"BlobEndpoint={web}/;SharedAccessSignature=sig=any"
    }
    contenders = {"http": partial(_shardcache, place, Endpoint("http", {}), False, web)}
    for protocol, package, env in (("gs", "gcsfs", google), ("az", "adlfs", azure)):
        if find_spec(package):
            contenders[protocol] = partial(
                _shardcache, place, Endpoint(protocol, env), False, f"{protocol}:/"
            )
        else:
            place.say(f"{package} is not installed, the rows of {protocol}:// are left out")
    tries = interleaved(contenders, lambda text: place.say(f"nginx, http · {text}"), place.rounds)
    limits = {"MB/s": Target("≥", 0.87), "CPU-s/GB": Target("≤", 1.15)}
    figures = {"mb_per_s": ("MB/s", ""), "cpu_s_per_gb": ("CPU-s/GB", "")}
    figures |= {"thread_cpu_s_per_gb": ("CPU-s/GB", " of the event loop")}
    medians = {figure: median_of(tries, figure) for figure in figures}
    return [
        Row(
            unit,
            f"{protocol}://{of}",
            ours,
            "http://",
            medians[figure]["http"],
            None if of else limits[unit],
        )
        for figure, (unit, of) in figures.items()
        for protocol, ours in medians[figure].items()
        if protocol != "http"
    ]


def _until_on_disk(place: Workplace) -> list[Row]:
    tries = _tries(
        place, Endpoint("SeaweedFS, http, disk", place.store.env()), ["s5cmd"], on_disk=True
    )
    ours, theirs = median_of(tries, "mb_per_s").values()
    return [
        Row("MB/s", "until on disk, SeaweedFS, http", ours, "s5cmd, sync", theirs, Target("≥", 1.0))
    ]


def _tries(
    place: Workplace, endpoint: Endpoint, peers: Iterable[str], *, on_disk: bool
) -> dict[str, list[Download]]:
    contenders: dict[str, Callable[[], Download]] = {
        OURS: partial(_shardcache, place, endpoint, on_disk),
        **{peer: partial(_peer, peer, place, endpoint, on_disk) for peer in peers},
    }
    return interleaved(
        contenders, lambda text: place.say(f"{endpoint.name} · {text}"), place.rounds
    )


def _rows(
    unit: str, what: str, figures: Mapping[str, float], targets: Mapping[str, Target] | None = None
) -> list[Row]:
    peers = [tool for tool in figures if tool != OURS]
    return [
        Row(unit, what, figures[OURS], peer, figures[peer], (targets or {}).get(peer))
        for peer in peers
    ]


def _shardcache(
    place: Workplace, endpoint: Endpoint, on_disk: bool, store: str = "s3:/"
) -> Download:
    url = f"{store}/{BUCKET}/{LARGE.name}/{place.dataset(LARGE).names}"
    with _folder(place, on_disk) as folder, Daemon(folder, "100GB", endpoint.env) as daemon:
        daemon.warm(url)
        daemon.request("POST", "/v1/evict", {"urls": [url]})
        before = _at_rest(daemon)
        touch(place.dataset(LARGE).tar_bytes)
        started_s = time.perf_counter()
        daemon.warm(url)
        wall_s = time.perf_counter() - started_s
        after = _cpu_s(daemon.pid)
        sync_s = settle() if on_disk else 0.0
        files = daemon.get("/v1/status")["cache"]["shards"]
    spent = Spent(wall_s, after[0] - before[0], after[1] - before[1])
    return _download(place, spent, sync_s, files)


def _peer(tool: str, place: Workplace, endpoint: Endpoint, on_disk: bool) -> Download:
    objects = {
        f"{LARGE.name}/{path.name}": path.stat().st_size for path in place.dataset(LARGE).shards
    }
    with _folder(place, on_disk) as folder:
        how = {"tool": tool, "bucket": BUCKET, "objects": objects, "folder": str(folder)}
        spent = Spent(**call(download, endpoint.env, **how))
        sync_s = settle() if on_disk else 0.0
        files = sum(
            objects[f"{LARGE.name}/{path.name}"] == path.stat().st_size for path in folder.iterdir()
        )
    return _download(place, spent, sync_s, files)


@contextmanager
def _folder(place: Workplace, on_disk: bool) -> Iterator[Path]:
    if on_disk:
        with place.folder() as folder:
            yield folder
    else:
        with tempfile.TemporaryDirectory(prefix="shardcache-bench-", dir=MEMORY) as name:
            yield Path(name)


def _cpu_s(pid: int) -> tuple[float, float]:
    """Return the processor time of a daemon with its children, and of its event loop alone."""
    return tree_cpu_s(pid), thread_cpu_s(pid)[pid]


def _at_rest(daemon: Daemon) -> tuple[float, float]:
    """Return the same once the daemon is idle, as one is that has been up for long."""
    before = -1.0, -1.0
    while True:
        now = _cpu_s(daemon.pid)
        is_prepared = daemon.get("/v1/status")["uptime_s"] >= PREPARED_S
        if now == before and is_prepared:
            return now
        before = now
        time.sleep(0.5)


def _download(place: Workplace, spent: Spent, sync_s: float, files: int) -> Download:
    """Return a download of all files of the dataset. Raises RuntimeError if some are missing."""
    dataset = place.dataset(LARGE)
    if files != len(dataset.shards):
        raise RuntimeError(f"{files} of {len(dataset.shards)} shards were downloaded")
    return Download(dataset.tar_bytes, spent, sync_s)
