"""Resources that an idle daemon holds: to be the same before and after."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from support.programs.daemon import Daemon

# What no shard is: the catalogue may grow by what it remembers of each url.
_COUNTED = ("shards", "partial", "quarantine")

_TO_STORES = "connections to stores"
# The daemon's pool of 32, one for the catalogue, and what libraries run.
_THREADS = 48
# --max-connections, by each of the two ways to S3.
_CONNECTIONS = 32


@dataclass(frozen=True, slots=True)
class Remains:
    """A quiet daemon.

    Attributes:
        fds: open file descriptors, by what they are of.
        threads, tasks, rss_bytes: as in status.
    """

    fds: dict[str, int]
    threads: int
    tasks: int
    rss_bytes: int

    @classmethod
    def of(cls, daemon: Daemon) -> Remains:
        """Look at one."""
        own = daemon.status()["process"]
        return cls(_descriptors(daemon.pid), own["threads"], own["tasks"], own["rss_bytes"])

    def __str__(self) -> str:
        fds = ", ".join(f"{count} {kind}" for kind, count in self.fds.items())
        return f"{self.threads} threads, {self.tasks} tasks, {self.rss_bytes / 1e6:.0f} MB, {fds}"

    def is_as(self, before: Remains) -> bool:
        """Return whether nothing has grown but memory and what is kept for reuse: threads, connections to stores."""
        kept = {_TO_STORES: 0}
        bounded = self.threads <= _THREADS and self.fds.get(_TO_STORES, 0) <= _CONNECTIONS
        return self.fds | kept == before.fds | kept and self.tasks <= before.tasks and bounded


def _descriptors(pid: int) -> dict[str, int]:
    """Return how many file descriptors there are of each kind."""
    to_stores = {line.split()[9] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]}
    kinds: Counter[str] = Counter()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(fd.readlink())
        except FileNotFoundError:
            continue  # closed meanwhile
        kind, _, inode = target.partition(":")
        kinds[_TO_STORES if inode.strip("[]") in to_stores else kind] += 1
    return dict(sorted(kinds.items()))


def is_quiet(daemon: Daemon) -> bool:
    """True without sessions, transfers, promises and leases."""
    status = daemon.status()
    sessions = sum(job["sessions"] for job in status["jobs"])
    reserved_bytes = status["cache"]["reserved_bytes"]
    return not (sessions or status["transfers"] or reserved_bytes or status["cache"]["leased_bytes"])


def on_disk_bytes(daemon: Daemon) -> int:
    """Return the bytes of all files that count against the capacity."""
    folders = (daemon.cache_dir / name for name in _COUNTED)
    return sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())
