"""Disks that are full, fail, turn read-only, vanish, come back, or forget a bit."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as TooLateError
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from campaign.result import Result
from shardcache.errors import ShardcacheError, ShardTimeoutError
from support.cache_rig import LIMIT_S, SHARDS, CacheRig
from support.daemon import eventually
from support.mounts import Bind, Tmpfs, may_mount
from support.raw_session import RawSession
from support.shim import CHANGES, FOR_EVER, Action, Op, Shim

PART = "disks"


def run(scale: float, folder: Path) -> Iterator[Result]:
    """Yield what became of each kind of fault. Those that need mounts are left out where this process may not mount."""
    logging.getLogger("shardcache").setLevel(logging.ERROR)
    rounds = max(2, round(60 * scale))
    for number, fault in enumerate(CALLS):
        yield failing_calls(fault, rounds, folder / f"c{number}")
    for number, (name, act) in enumerate(FOLDERS.items()):
        yield act(Result(PART, name), max(1, round(8 * scale)), folder / f"f{number}")
    if may_mount():
        for number, (name, act) in enumerate(MOUNTS.items()):
            yield act(Result(PART, name), max(1, round(8 * scale)), folder / f"m{number}")


# What every fault has to answer


class Trial:
    """Asks a rig for shards, and counts what it should not answer."""

    def __init__(self, rig: CacheRig, result: Result) -> None:
        self._rig = rig
        self._result = result

    def ask(self, number: int, story: str) -> bool:
        """Ask for a shard; True where it came and was right, False where it failed with a typed error."""
        asked = self._rig.reading(number)
        try:
            exn = asked.exception(LIMIT_S)
        except TooLateError as late:
            exn = late
        match exn:
            case None if asked.result():
                return True
            case None:
                self._result.fail("wrong", f"{story}: other samples than were written")
            case TooLateError() | ShardTimeoutError():
                self._result.fail("hangs", f"{story}: {exn!r}")
            case ShardcacheError() if exn.url and exn.remedy:
                pass
            case _:
                self._result.fail("untyped", f"{story}: {exn!r} lacks type, url or remedy")
        return False

    def ask_cached(self, story: str) -> None:
        """Ask for the shard that is in the cache: it has to come whatever the disk does to writers."""
        if not self.ask(0, f"{story}, cached"):
            self._result.fail("lost", f"{story}: what is cached was not served")

    def recover(self, number: int, story: str) -> None:
        """Ask until it comes; then all has to be as before the fault."""
        begun_s = time.monotonic()
        while not self.ask(number, f"{story}, afterwards"):
            if time.monotonic() - begun_s > LIMIT_S:
                self._result.fail("hangs", f"{story}: no recovery; {self._rig.disk()}")
                return
            time.sleep(0.05)
        self._result.recovery_s.append(time.monotonic() - begun_s)
        self.settle(story)

    def settle(self, story: str) -> None:
        """The daemon has to say that it is well, and know what its files take."""
        try:
            eventually(lambda: self._rig.health() == "ok", limit_s=LIMIT_S)
        except TimeoutError:
            self._result.fail("hangs", f"{story}: still {self._rig.disk()}")
        told, kept = self._rig.accounts()
        if told != kept:
            self._result.fail("wrong", f"{story}: used_bytes says {told}, the files take {kept}")


@contextmanager
def rigged(result: Result, folder: Path, shim: Shim | None = None, *flags: str) -> Iterator[tuple[CacheRig, Trial]]:
    """Run a daemon that has one shard cached."""
    with CacheRig(folder, *flags, env=shim.env() if shim else None) as rig:
        trial = Trial(rig, result)
        trial.ask_cached("before any fault")
        yield rig, trial


# Calls that fail, one after another


@dataclass(frozen=True, slots=True)
class Calls:
    """Which calls fail, and how: once, or from one on until the disk is mended."""

    name: str
    error: int
    times: int = 1
    ops: tuple[Op, ...] = CHANGES
    action: Action = Action.FAIL
    match: str = ""


CALLS = (
    Calls("ENOSPC at each call that changes a file, once", errno.ENOSPC),
    Calls("EIO at each call that changes a file, once", errno.EIO),
    Calls("EDQUOT at each write and allocation, once", errno.EDQUOT, ops=(Op.WRITE, Op.ALLOCATE, Op.CREATE)),
    Calls("each write cut short", 0, FOR_EVER, (Op.WRITE,), Action.SHORT),
    Calls("ENOSPC from each call on", errno.ENOSPC, FOR_EVER),
    Calls("EIO from each call on", errno.EIO, FOR_EVER),
    Calls("EROFS from each call on", errno.EROFS, FOR_EVER),
    Calls("EIO at each call of the catalogue, from it on", errno.EIO, FOR_EVER, match="catalogue"),
    Calls("EIO at reads of what arrives, from each on", errno.EIO, FOR_EVER, (Op.READ, Op.OPEN), match="/partial/"),
)


def failing_calls(fault: Calls, rounds: int, folder: Path) -> Result:
    """Let the first call fail in the first round, the second in the second, until a fetch has no more of them."""
    result = Result(PART, fault.name)
    folder.mkdir()
    shim = Shim(folder / "shim", root=folder / "cache")
    with rigged(result, folder, shim) as (rig, trial):
        at = 1
        for number in itertools.islice(itertools.cycle(range(1, SHARDS)), rounds):
            story = f"{fault.name}: call {at}, shard {number}"
            rig.evict()
            shim.arm(fault.action, at=at, times=fault.times, ops=fault.ops, match=fault.match, error=fault.error)
            trial.ask(number, story)
            if fault.times == FOR_EVER:
                trial.ask_cached(story)
            acted = shim.acted
            shim.disarm()
            result.injected += acted
            trial.recover(number, story)
            at = at + 1 if acted else 1
    return result


# A folder that goes and comes


def deleted(result: Result, rounds: int, folder: Path) -> Result:
    """Remove the cache folder under the daemon: it is made again, and what was in it fetched again."""
    with rigged(result, folder) as (rig, trial):
        for number in itertools.islice(itertools.cycle(range(SHARDS)), rounds):
            shutil.rmtree(rig.daemon.cache_dir, ignore_errors=True)
            result.injected += 1
            trial.recover(number, f"{result.fault}, shard {number}")
    return result


def emptied(result: Result, rounds: int, folder: Path) -> Result:
    """Remove all that is in the folder, but not the folder."""
    with rigged(result, folder) as (rig, trial):
        for number in itertools.islice(itertools.cycle(range(SHARDS)), rounds):
            for path in rig.daemon.cache_dir.iterdir():
                shutil.rmtree(path, ignore_errors=True)
            result.injected += 1
            trial.recover(number, f"{result.fault}, shard {number}")
    return result


def replaced(result: Result, rounds: int, folder: Path) -> Result:
    """Put an empty folder in the place of the cache, then the old one back: its shards are served again."""
    with rigged(result, folder) as (rig, trial):
        aside = folder / "aside"
        for number in itertools.islice(itertools.cycle(range(1, SHARDS)), rounds):
            rig.daemon.cache_dir.rename(aside)
            rig.daemon.cache_dir.mkdir()
            result.injected += 1
            trial.recover(number, f"{result.fault}, shard {number}")
            shutil.rmtree(rig.daemon.cache_dir)
            aside.rename(rig.daemon.cache_dir)
            trial.recover(0, f"{result.fault}, back again")
    return result


def flipped(result: Result, rounds: int, folder: Path) -> Result:
    """Flip a byte of a published file: the scrub finds it, and the next reader gets the shard afresh."""
    with rigged(result, folder, None, "--scrub-rate", "100MB", "--scrub-pause-s", "0") as (rig, trial):
        for number in range(rounds):
            (tar,) = (rig.daemon.cache_dir / "shards").rglob("*.tar")
            flip(tar, 4096 * number + 777)
            begun_s = time.monotonic()
            try:
                eventually(lambda wanted=number + 1: rig.daemon.status()["scrub"]["damaged"] >= wanted)  # type: ignore[misc]
            except TimeoutError:
                result.fail("hangs", f"{result.fault}: byte {4096 * number + 777} was not found")
                break
            result.injected += 1
            if not trial.ask(0, f"{result.fault}: byte {4096 * number + 777}"):
                result.fail("lost", f"{result.fault}: not fetched again")
            result.recovery_s.append(time.monotonic() - begun_s)
            trial.settle(result.fault)
    return result


def flip(tar: Path, at: int) -> None:
    """Change one byte of a file behind everybody's back."""
    mode = tar.stat().st_mode
    tar.chmod(0o600)
    with tar.open("r+b") as file:
        old = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([old[0] ^ 1]), at)
    tar.chmod(mode)


FOLDERS: dict[str, Callable[[Result, int, Path], Result]] = {
    "cache folder deleted": deleted,
    "cache folder emptied": emptied,
    "cache folder replaced and put back": replaced,
    "a byte flipped in a published shard": flipped,
}


# Filesystems that do so for real


def filled(result: Result, rounds: int, folder: Path) -> Result:
    """Others fill the filesystem to its last byte, and what is cached is in a reader's hands."""
    with (
        Tmpfs(folder / "cache", size_bytes=8_000_000) as disk,
        rigged(result, folder) as (rig, trial),
        RawSession(rig.daemon) as holder,
    ):
        holder.plan(rig.urls[:1], [0])
        holder.take(0)
        for number in itertools.islice(itertools.cycle(range(1, SHARDS)), rounds):
            rig.evict()
            disk.fill()
            result.injected += 1
            _bad_times(rig, trial, number, result.fault)
            disk.relieve()
            trial.recover(number, result.fault)
    return result


def gives_way(result: Result, rounds: int, folder: Path) -> Result:
    """Others fill the filesystem to its last byte: what nobody reads goes, and there is room for what is read."""
    with Tmpfs(folder / "cache", size_bytes=8_000_000) as disk, rigged(result, folder) as (rig, trial):
        for number in itertools.islice(itertools.cycle(range(SHARDS)), rounds):
            for other in range(SHARDS):
                trial.ask(other, result.fault)
            rig.daemon.request("POST", "/v1/evict", {"urls": [rig.urls[number]]})
            disk.fill()
            result.injected += 1
            trial.recover(number, result.fault)
            disk.relieve()
            trial.settle(result.fault)
    return result


def without_inodes(result: Result, rounds: int, folder: Path) -> Result:
    """There is room, and no inode for another file."""
    with Tmpfs(folder / "cache", size_bytes=8_000_000, inodes=600) as disk, rigged(result, folder) as (rig, trial):
        for number in itertools.islice(itertools.cycle(range(1, SHARDS)), rounds):
            rig.evict()
            disk.use_up_inodes()
            result.injected += 1
            _bad_times(rig, trial, number, result.fault)
            disk.relieve()
            trial.recover(number, result.fault)
    return result


def read_only(result: Result, rounds: int, folder: Path) -> Result:
    """The filesystem is remounted read-only, as the kernel does when the disk fails."""
    with Tmpfs(folder / "cache", size_bytes=8_000_000) as disk:
        # A filesystem on which a database is open for writing cannot be remounted read-only, unless it fails itself.
        (folder / "catalogue").mkdir()
        (folder / "cache" / "catalogue").symlink_to(folder / "catalogue")
        _read_only(result, rounds, folder, disk)
    return result


def _read_only(result: Result, rounds: int, folder: Path, disk: Tmpfs) -> None:
    with rigged(result, folder) as (rig, trial):
        for number in itertools.islice(itertools.cycle(range(1, SHARDS)), rounds):
            rig.evict()
            eventually(disk.turn_read_only)
            result.injected += 1
            _bad_times(rig, trial, number, result.fault)
            disk.turn_writable()
            trial.recover(number, result.fault)


def unmounted(result: Result, rounds: int, folder: Path) -> Result:
    """The filesystem goes, and comes back with all that was on it; nothing is written to the folder below."""
    with (
        Tmpfs(folder / "disk", size_bytes=8_000_000),
        Bind(folder / "disk", folder / "cache") as disk,
        rigged(result, folder) as (rig, trial),
    ):
        for number in itertools.islice(itertools.cycle(range(1, SHARDS)), rounds):
            rig.evict()
            disk.detach()
            result.injected += 1
            rig.await_state("cache_dir")
            if trial.ask(number, result.fault) or any((folder / "cache").iterdir()):
                result.fail("wrong", f"{result.fault}: the filesystem below was written to")
            disk.attach()
            trial.recover(number, result.fault)
            trial.ask_cached(f"{result.fault}, back again")
    return result


def crowded(result: Result, rounds: int, folder: Path) -> Result:
    """Others fill the filesystem until less is free than --min-free: the cache gives way."""
    flags = ("--min-free", "3MB")
    with Tmpfs(folder / "cache", size_bytes=8_000_000) as disk, rigged(result, folder, None, *flags) as (rig, trial):
        for _ in range(rounds):
            for number in range(SHARDS):
                trial.ask(number, result.fault)
            disk.fill(leave_bytes=2_700_000)
            result.injected += 1
            begun_s = time.monotonic()
            try:
                eventually(lambda: disk.free_bytes() >= 3_000_000)
            except TimeoutError:
                result.fail("hangs", f"{result.fault}: {disk.free_bytes()} free; {rig.disk()}")
            result.recovery_s.append(time.monotonic() - begun_s)
            disk.relieve()
            trial.settle(result.fault)
    return result


def _bad_times(rig: CacheRig, trial: Trial, number: int, story: str) -> None:
    if trial.ask(number, story):
        raise AssertionError(f"{story}: the fault does nothing")
    trial.ask_cached(story)
    rig.await_state("disk_full", "disk_failed")


MOUNTS: dict[str, Callable[[Result, int, Path], Result]] = {
    "filesystem full, and nothing can go": filled,
    "filesystem full, and the cache can give way": gives_way,
    "no inodes left": without_inodes,
    "remounted read-only": read_only,
    "unmounted and mounted again": unmounted,
    "others take the free space": crowded,
}
