"""Disks that are full, fail, turn read-only, vanish, come back, or forget a bit."""

from __future__ import annotations

import errno
import gzip
import itertools
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from campaign.result import Result
from campaign.trial import Trial, rigged
from shardcache.errors import CapacityError
from support.disks.cache_rig import LIMIT_S, SHARDS, CacheRig
from support.disks.mounts import Bind, Tmpfs, may_mount
from support.disks.shim import CHANGES, FOR_EVER, Action, Op, Shim
from support.programs.daemon import eventually
from support.programs.raw_session import RawSession

PART = "disks"
_ROOM = "670KB"  # for two shards and what is set aside for their sidecars


def run(scale: float, folder: Path) -> Iterator[Result]:
    """Yield what became of each kind of fault. Those that need mounts are left out where this process may not mount."""
    logging.getLogger("shardcache").setLevel(logging.ERROR)
    rounds = max(2, round(60 * scale))
    for number, fault in enumerate(CALLS):
        yield failing_calls(fault, rounds, folder / f"c{number}")
    for number, (name, act) in enumerate(FOLDERS.items()):
        yield act(Result(PART, name), max(1, round(8 * scale)), folder / f"f{number}")
    yield without_room(max(1, round(8 * scale)), folder / "room")
    if may_mount():
        for number, (name, act) in enumerate(MOUNTS.items()):
            yield act(Result(PART, name), max(1, round(8 * scale)), folder / f"m{number}")


# Calls that fail, one after another


@dataclass(frozen=True, slots=True)
class Calls:
    """Selection of failing calls: once, or from one on until the disk is repaired."""

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
                eventually(lambda wanted=number + 1: rig.daemon.status()["scrub"]["corrupt"] >= wanted)  # type: ignore[misc]
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


# Room that a job takes for itself


def without_room(rounds: int, folder: Path) -> Result:
    """Let a job fill the cache with inflated shards and want another: it is told, and the job behind it goes on."""
    result = Result(PART, "no room to inflate a shard that is needed")
    with rigged(result, folder, None, "--capacity", _ROOM) as (rig, trial):
        rig.urls = [_compressed(url) for url in rig.urls]
        for number in range(rounds):
            story = f"{result.fault}, round {number}"
            with RawSession(rig.daemon, job="greedy") as greedy:
                greedy.plan(rig.urls, [0, 1, 2])
                for position in (0, 1):
                    greedy.take(position)
                behind = rig.reading(3)
                _is_told(result, greedy, story)
                result.injected += 1
            begun_s = time.monotonic()
            if behind.exception(LIMIT_S) is not None or not behind.result():
                result.fail("lost", f"{story}: the job behind got {behind.exception()!r}")
            result.recovery_s.append(time.monotonic() - begun_s)
            trial.settle(story)
            rig.evict()
    return result


def _is_told(result: Result, greedy: RawSession, story: str) -> None:
    """Have a reader that holds all that there is room for want another shard."""
    greedy.send(type="lease", id=99, position=2)
    greedy.send(type="need", of=99)
    try:
        code = greedy.receive().get("error", {}).get("code")
    except (AssertionError, TimeoutError) as exn:
        result.fail("hangs", f"{story}: {exn!r}")
    else:
        if code != CapacityError.code:
            result.fail("untyped", f"{story}: {code} in place of an error of capacity")


def _compressed(url: str) -> str:
    """Write a shard's gzip beside it; return its url."""
    path = Path(url.removeprefix("file://"))
    Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes()))
    return f"{url}.gz"


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
