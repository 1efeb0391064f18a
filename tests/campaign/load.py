"""Sixty-four readers of ten thousand shards in a cache for some hundred, for ten minutes in which nothing is spared."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

from campaign.harness import Result, Row
from campaign.load_readers import Crowd, Datasets
from campaign.load_troubles import Troubles
from support.programs.daemon import Daemon, eventually
from support.programs.idle_loop import idle_loop
from support.stores.moody_s3 import Store

_BROKEN_SHARE = 0.05
_QUIET_S = 120.0
# On a machine that does other things, some trouble may be longer in coming.
_PATIENCE_S = 120.0
_LAG_S = 0.05
# What the allocator keeps of memory that is free again.
_SLACK_BYTES = 48 * 1024 * 1024
# What no shard is: the catalogue may grow by what it remembers of each url.
_COUNTED = ("shards", "partial", "quarantine")

_TO_STORES = "connections to stores"
# The daemon's pool of 32, one for the catalogue, and what libraries run.
_THREADS = 48
# --max-connections, by each of the two ways to S3.
_CONNECTIONS = 32
_FLAGS = ("--stall-timeout-s", "2", "--log-level", "error", "--max-transfers", "8")


@dataclass(frozen=True, slots=True)
class Load:
    """Size of the load.

    Attributes:
        duration_s: how long all of them read while everything goes wrong, until each thing has at least once.
        warm_up_s: how long they do so before, with a store that is well, until the daemon has what it keeps for good.
    """

    crowd: int = 56  # sessions of readers that speak the protocol themselves
    datasets: int = 8  # processes that read a dataset; half of them are killed again and again
    duration_s: float = 600.0
    warm_up_s: float = 60.0

    def scaled(self, scale: float) -> Load:
        """Return a share of it; never so little that nothing would meet anything."""
        share = min(1.0, scale)
        return Load(
            max(10, round(share * self.crowd)),
            max(2, round(share * self.datasets)),
            max(10.0, share * self.duration_s),
            max(5.0, share * self.warm_up_s),
        )


@contextlib.contextmanager
def ground(folder: Path, scale: float) -> Iterator[list[Result]]:
    """Load a daemon for ten minutes, or a share of them; the rows take what became of each thing."""
    yield list(endure(Load().scaled(scale), folder))


def _take(number: int, results: list[Result], result: Result, _scale: float) -> None:
    for each in fields(Result):
        setattr(result, each.name, getattr(results[number], each.name))


def endure(load: Load, folder: Path) -> Iterator[Result]:
    """Load a daemon; yield what became of each trouble, of what is left behind, and, at last, of its event loop.

    As on a node, where one is always free, the daemon has a core for itself: its loop would else wait for the store and
    the readers, who take all that there is.
    """
    own, others = _cores()
    with contextlib.ExitStack() as stack, _on(others):
        store = stack.enter_context(Store())
        with _on(own):
            daemon = stack.enter_context(Daemon(folder, *_FLAGS, capacity="16MB", env=store.env))
        asyncio.run(_bear(load, load.warm_up_s, daemon))
        _settle(daemon)
        before = Remains.of(daemon)
        store.break_share(_BROKEN_SHARE)
        with idle_loop() as idle:
            results = asyncio.run(_bear(load, load.duration_s, daemon))
            lag, idle_lag = daemon.status()["loop_lag"], idle.lag()
        yield Result("answer of the store broken", injected=store.break_share(0.0))
        yield from results
        yield _nothing_left(results[0].injected, before, daemon)
        yield _judge(lag, idle_lag)


async def _bear(load: Load, duration_s: float, daemon: Daemon) -> list[Result]:
    """Have everybody read, and everything go wrong, for a while."""
    crowd, datasets = Crowd(daemon.socket, load.crowd), Datasets(daemon.socket)
    troubles = Troubles(daemon.socket, datasets)
    results = [crowd.torn, datasets.epochs, *troubles.results]
    for number in range(load.datasets):
        await asyncio.to_thread(datasets.start, spared=number % 2 == 0)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(act()) for act in (crowd.run, datasets.listen, troubles.run)]
        await asyncio.sleep(duration_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.to_thread(eventually, lambda: all(each.injected for each in results), limit_s=_PATIENCE_S)
        for task in tasks:
            task.cancel()
    await asyncio.to_thread(datasets.end)
    return results


def _cores() -> tuple[set[int], set[int]]:
    """Return the daemon's core, and those of everybody else; on a machine with only one they share it."""
    cores = os.sched_getaffinity(0)
    own = {min(cores)}
    return own, cores - own or own


@contextlib.contextmanager
def _on(cores: set[int]) -> Iterator[None]:
    """Keep the calling thread, and all that it starts in the block, on some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _settle(daemon: Daemon) -> float:
    """Wait until nothing is going on; return how long that took, in seconds. Raises TimeoutError."""
    begun_s = time.monotonic()
    eventually(lambda: is_quiet(daemon), limit_s=_QUIET_S)
    return time.monotonic() - begun_s


def _nothing_left(sessions: int, before: Remains, daemon: Daemon) -> Result:
    left = Result("sessions that came and went: nothing is left", injected=sessions)
    try:
        left.recovery_s.append(_settle(daemon))
    except TimeoutError:
        left.fail("hangs", f"not quiet after {_QUIET_S:g} s: {daemon.status()}")
    try:
        eventually(lambda: Remains.of(daemon).is_as(before))  # files are open for a moment whatever it does
    except TimeoutError:
        left.fail("hangs", f"before: {before}; after: {Remains.of(daemon)}")
    rss_bytes = Remains.of(daemon).rss_bytes
    left.fault += f" ({before.rss_bytes / 1e6:.0f} → {rss_bytes / 1e6:.0f} MB)"
    if rss_bytes > before.rss_bytes + _SLACK_BYTES:
        left.fail("hangs", f"memory does not come back: {before}; {Remains.of(daemon)}")
    used_bytes, found_bytes = daemon.status()["cache"]["used_bytes"], on_disk_bytes(daemon)
    if used_bytes != found_bytes:
        left.fail("wrong", f"{used_bytes} bytes are said to be used, {found_bytes} are")
    return left


def _judge(lag: dict[str, float], idle_lag: dict[str, float]) -> Result:
    """Hold the daemon's loop against one that has nothing to do on the same machine at the same time."""
    figures = " / ".join(f"{1e3 * lag[name]:.0f} ({1e3 * idle_lag[name]:.0f})" for name in lag)
    result = Result(f"loop lag in ms, median / 99 % / most (of an idle one): {figures}", injected=1)
    if lag["p99_s"] > _LAG_S + idle_lag["p99_s"]:
        result.fail("hangs", f"the event loop comes too late: {lag}, an idle one: {idle_lag}")
    return result


@dataclass(frozen=True, slots=True)
class Remains:
    """A quiet daemon. `threads`, `tasks` and `rss_bytes` are as in status."""

    fds: dict[str, int]  # open file descriptors, by what they are of
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


_ROWS = (
    *("broken answers", "torn sessions", "datasets", "killed readers", "frozen readers", "flood", "deaf readers"),
    *("half-open connections", "warm given up", "evictions", "nothing is left", "loop lag"),
)
ROWS = tuple(Row(name, partial(_take, number), slow=True) for number, name in enumerate(_ROWS))
