"""Disks that are full, fail, turn read-only, vanish, come back, or forget a bit."""

import errno
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLateError
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from campaign.harness import Result, Row, scaled
from shardcache.errors import ShardcacheError, ShardTimeoutError
from shardcache_client.dataset import ShardDataset
from support.disks.mounts import Bind, Tmpfs, may_mount
from support.disks.shim import CHANGES, FOR_EVER, HAS_CC, Action, Op, Shim
from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S
from support.programs.raw_session import RawSession
from support.shards.tars import random_samples, write_shards

SHARDS = 4
SAMPLES = 6
SIZES = {"bin": 40_000}
PART_BYTES = 64 * 1024
# Whoever waits longer than a reader's patience is stuck.
PATIENCE_S = GUARD_S / 3
LIMIT_S = GUARD_S
_FOLDERS = itertools.count()


@contextmanager
def ground(folder: Path, _scale: float) -> Iterator[Path]:
    yield folder


class CacheRig:
    """Some shards in a folder, a daemon, and readers of one shard each.

    Attributes:
        urls: of the shards; the first is kept in the cache, the others come and go.
    """

    def __init__(
        self, root: Path, *flags: str, env: Mapping[str, str] | None = None, capacity: str = "100MB"
    ) -> None:
        data = root / "data"
        data.mkdir(parents=True)
        self.urls = [f"file://{path}" for path in write_shards(data, SHARDS, SAMPLES, SIZES)]
        common = ("--part-size", str(PART_BYTES), "--scrub-rate", "0", "--listing-ttl-s", "3600")
        self.daemon = Daemon(root, *common, *flags, env=env, capacity=capacity)
        self._threads = ThreadPoolExecutor(4, "reader")

    def __enter__(self) -> Self:
        self.daemon.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.daemon.kill()
        self._threads.shutdown(cancel_futures=True)

    def read(self, number: int) -> bool:
        """Return whether a shard's samples are those that were written; raise what reading them
        raises.

        By then, the shard is published, unless the disk fails.
        """
        dataset = ShardDataset(self.urls[number], socket=self.daemon.socket, timeout_s=PATIENCE_S)
        found = {sample["__key__"]: sample["bin"] for sample in dataset}
        self.daemon.await_publication()
        wanted = random_samples(SAMPLES, SIZES, first=number * SAMPLES)
        return found == {sample["__key__"]: sample["bin"] for sample in wanted}

    def reading(self, number: int) -> Future[bool]:
        """Do so in a thread."""
        return self._threads.submit(self.read, number)

    def evict(self) -> None:
        self.daemon.request("POST", "/v1/evict", {"urls": self.urls[1:]})

    def disk(self) -> dict[str, Any]:
        told: dict[str, Any] = self.daemon.status()["disk"]
        return told

    def await_state(self, *states: str) -> None:
        """Return once the disk is told to be in one of these states."""
        eventually(lambda: self.disk()["state"] in states)

    def health(self) -> str:
        return str(json.loads(self.daemon.request("GET", "/v1/health"))["status"])

    def accounts(self) -> tuple[int, int]:
        """Return the bytes used as the daemon says, and as files take, once it is idle."""
        with suppress(TimeoutError):
            eventually(
                lambda: len(set(self._accounts())) == 1 and not self.daemon.status()["transfers"],
                limit_s=60.0,
            )
        return self._accounts()

    def _accounts(self) -> tuple[int, int]:
        return int(self.daemon.status()["cache"]["used_bytes"]), self.kept_bytes()

    def kept_bytes(self) -> int:
        """Return what the files of shards take, published, arriving and set aside."""
        sizes = []
        for name in ("shards", "partial", "quarantine"):
            for path in (self.daemon.cache_dir / name).rglob("*.*"):
                with suppress(FileNotFoundError):  # it went meanwhile
                    sizes.append(path.stat().st_size)
        return sum(sizes)


class Trial:
    """Asks a rig for shards, and counts what it should not answer."""

    def __init__(self, rig: CacheRig, result: Result) -> None:
        self._rig = rig
        self._result = result

    def ask(self, number: int, story: str) -> bool:
        """Ask for a shard; True if it came and was right, False if it failed with a typed error."""
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
        """Ask for the cached shard, which has to come whatever the disk does to writers."""
        if not self.ask(0, f"{story}, cached"):
            self._result.fail("lost", f"{story}: what is cached was not served")

    def recover(self, number: int, story: str) -> None:
        """Ask until it comes; then all has to be as before the fault."""
        begun_s = time.monotonic()
        try:
            eventually(lambda: self.ask(number, f"{story}, afterwards"), limit_s=LIMIT_S)
        except TimeoutError:
            self._result.fail("hangs", f"{story}: no recovery; {self._rig.disk()}")
            return
        self._result.recovery_s.append(time.monotonic() - begun_s)
        self.settle(story)

    def bad_times(self, number: int, story: str) -> None:
        """Ask while the disk is bad: cached shards come, others fail, and the daemon says why."""
        if self.ask(number, story):
            raise AssertionError(f"{story}: the fault does nothing")
        self.ask_cached(story)
        self._rig.await_state("disk_full", "disk_failed")

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
def rigged(
    result: Result, parent: Path, *flags: str, shim: bool = False
) -> Iterator[tuple[CacheRig, Trial, Shim]]:
    """Run a daemon that has one shard cached, with the cache in `parent`/cache."""
    control = Shim(parent / "shim", root=parent / "cache") if shim else None
    with CacheRig(parent, *flags, env=control.env() if control else None) as rig:
        trial = Trial(rig, result)
        trial.ask_cached("before any fault")
        yield rig, trial, control  # type: ignore[misc]


def _new_folder(parent: Path) -> Path:
    folder = parent / f"d{next(_FOLDERS)}"
    folder.mkdir()
    return folder


def _numbers(rounds: int, first: int = 1) -> Iterator[int]:
    """Yield a shard for each round; 0 is the one that stays cached."""
    return itertools.islice(itertools.cycle(range(first, SHARDS)), rounds)


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
    Calls(
        "EDQUOT at each write and allocation, once",
        errno.EDQUOT,
        ops=(Op.WRITE, Op.ALLOCATE, Op.CREATE),
    ),
    Calls("each write cut short", 0, FOR_EVER, (Op.WRITE,), Action.SHORT),
    Calls("ENOSPC from each call on", errno.ENOSPC, FOR_EVER),
    Calls("EIO from each call on", errno.EIO, FOR_EVER),
    Calls("EROFS from each call on", errno.EROFS, FOR_EVER),
    Calls("EIO at each call of the catalogue, from it on", errno.EIO, FOR_EVER, match="catalogue"),
    Calls(
        "EIO at reads of what arrives, from each on",
        errno.EIO,
        FOR_EVER,
        (Op.READ, Op.OPEN),
        match="/partial/",
    ),
)


def failing_calls(fault: Calls, parent: Path, result: Result, scale: float) -> None:
    """Have the nth call fail in the nth round, until a fetch has no more of them."""
    with rigged(result, _new_folder(parent), shim=True) as (rig, trial, shim):
        at = 1
        for number in _numbers(scaled(60, scale, 3)):
            story = f"call {at}, shard {number}"
            rig.evict()
            shim.arm(
                fault.action,
                at=at,
                times=fault.times,
                ops=fault.ops,
                match=fault.match,
                error=fault.error,
            )
            trial.ask(number, story)
            if fault.times == FOR_EVER:
                trial.ask_cached(story)
            acted = shim.acted
            shim.disarm()
            result.injected += acted
            trial.recover(number, story)
            at = at + 1 if acted else 1


# A folder that goes and comes


def removed(parent: Path, result: Result, scale: float) -> None:
    """Remove the cache folder under the daemon: what was in it is fetched again."""
    with rigged(result, _new_folder(parent)) as (rig, trial, _):
        for number in _numbers(scaled(8, scale, 2), first=0):
            shutil.rmtree(rig.daemon.cache_dir, ignore_errors=True)
            result.injected += 1
            trial.recover(number, f"shard {number}")


def replaced(parent: Path, result: Result, scale: float) -> None:
    """Put an empty folder in the cache's place, then the old one, whose shards are served again."""
    folder = _new_folder(parent)
    with rigged(result, folder) as (rig, trial, _):
        aside = folder / "aside"
        for number in _numbers(scaled(8, scale)):
            rig.daemon.cache_dir.rename(aside)
            rig.daemon.cache_dir.mkdir()
            result.injected += 1
            trial.recover(number, f"shard {number}")
            shutil.rmtree(rig.daemon.cache_dir)
            aside.rename(rig.daemon.cache_dir)
            trial.recover(0, "back again")


def _await_damage(rig: CacheRig, wanted: int) -> None:
    """Wait until the scrub has found so much damage."""
    eventually(lambda: rig.daemon.status()["scrub"]["corrupt"] >= wanted)


def flipped(parent: Path, result: Result, scale: float) -> None:
    """Flip a byte of a published file: the scrub finds it, and the next reader gets a new copy."""
    with rigged(result, _new_folder(parent), "--scrub-rate", "100MB", "--scrub-pause-s", "0") as (
        rig,
        trial,
        _,
    ):
        for number in range(scaled(8, scale, 2)):
            (tar,) = (rig.daemon.cache_dir / "shards").rglob("*.tar")
            at = 4096 * number + 777
            flip(tar, at)
            begun_s = time.monotonic()
            try:
                _await_damage(rig, number + 1)
            except TimeoutError:
                result.fail("hangs", f"byte {at} was not found")
                break
            result.injected += 1
            if not trial.ask(0, f"byte {at}"):
                result.fail("lost", f"byte {at}: not fetched again")
            result.recovery_s.append(time.monotonic() - begun_s)
            trial.settle(f"byte {at}")


def flip(tar: Path, at: int) -> None:
    mode = tar.stat().st_mode
    tar.chmod(0o600)
    with tar.open("r+b") as file:
        old = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([old[0] ^ 1]), at)
    tar.chmod(mode)


# Filesystems that do so for real


def bad_filesystem(
    spoil: Callable[[Tmpfs], object],
    mend: Callable[[Tmpfs], object],
    parent: Path,
    result: Result,
    scale: float,
    *,
    inodes: int = 0,
    held: bool = False,
    apart: bool = False,
) -> None:
    """Spoil the filesystem, and mend it again.

    Args:
        held: while the cached shard is in a reader's hands.
        apart: the catalogue lies elsewhere: a filesystem on which a database is open for writing
            cannot be remounted read-only, unless it fails itself.
    """
    folder = _new_folder(parent)
    with ExitStack() as stack:
        disk = stack.enter_context(Tmpfs(folder / "cache", size_bytes=8_000_000, inodes=inodes))
        if apart:
            (folder / "catalogue").mkdir()
            (folder / "cache" / "catalogue").symlink_to(folder / "catalogue")
        rig, trial, _ = stack.enter_context(rigged(result, folder))
        if held:
            holder = stack.enter_context(RawSession(rig.daemon))
            holder.plan(rig.urls[:1], [0])
            holder.take(0)
        for number in _numbers(scaled(8, scale)):
            rig.evict()
            spoil(disk)
            result.injected += 1
            trial.bad_times(number, result.fault)
            mend(disk)
            trial.recover(number, result.fault)


def gives_way(parent: Path, result: Result, scale: float) -> None:
    """Others fill the filesystem: what nobody reads goes, and there is room for what is read."""
    folder = _new_folder(parent)
    with (
        Tmpfs(folder / "cache", size_bytes=8_000_000) as disk,
        rigged(result, folder) as (rig, trial, _),
    ):
        for number in _numbers(scaled(8, scale), first=0):
            for other in range(SHARDS):
                trial.ask(other, result.fault)
            rig.daemon.request("POST", "/v1/evict", {"urls": [rig.urls[number]]})
            disk.fill()
            result.injected += 1
            trial.recover(number, result.fault)
            disk.relieve()
            trial.settle(result.fault)


def unmounted(parent: Path, result: Result, scale: float) -> None:
    """The filesystem goes and comes back; nothing is written to the folder below it."""
    folder = _new_folder(parent)
    with (
        Tmpfs(folder / "disk", size_bytes=8_000_000),
        Bind(folder / "disk", folder / "cache") as disk,
        rigged(result, folder) as (rig, trial, _),
    ):
        for number in _numbers(scaled(8, scale)):
            rig.evict()
            disk.detach()
            result.injected += 1
            rig.await_state("cache_dir")
            if trial.ask(number, result.fault) or any((folder / "cache").iterdir()):
                result.fail("wrong", "the filesystem below was written to")
            disk.attach()
            trial.recover(number, result.fault)
            trial.ask_cached("back again")


def crowded(parent: Path, result: Result, scale: float) -> None:
    """Others fill the filesystem until less is free than --min-free: the cache gives way."""
    folder = _new_folder(parent)
    with (
        Tmpfs(folder / "cache", size_bytes=8_000_000) as disk,
        rigged(result, folder, "--min-free", "3MB") as (rig, trial, _),
    ):
        for _ in range(scaled(8, scale)):
            for number in range(SHARDS):
                trial.ask(number, result.fault)
            disk.fill(leave_bytes=2_700_000)
            result.injected += 1
            begun_s = time.monotonic()
            try:
                eventually(lambda: disk.free_bytes() >= 3_000_000)
            except TimeoutError:
                result.fail("hangs", f"{disk.free_bytes()} free; {rig.disk()}")
            result.recovery_s.append(time.monotonic() - begun_s)
            disk.relieve()
            trial.settle(result.fault)


_NEEDS_CC = "" if HAS_CC else "needs a C compiler"
_NEEDS_MOUNTS = "" if may_mount() else "needs root, who may mount"
_QUICK_CALL = "ENOSPC at each call that changes a file, once"
ROWS = (
    *(
        Row(call.name, partial(failing_calls, call), call.name != _QUICK_CALL, _NEEDS_CC)
        for call in CALLS
    ),
    Row("cache folder deleted", removed, slow=True),
    Row("cache folder replaced and put back", replaced),
    Row("a byte flipped in a published shard", flipped),
    *(
        Row(name, act, skip=_NEEDS_MOUNTS)
        for name, act in (
            (
                "filesystem full, and nothing can go",
                partial(bad_filesystem, Tmpfs.fill, Tmpfs.relieve, held=True),
            ),
            ("filesystem full, and the cache can give way", gives_way),
            (
                "no inodes left",
                partial(bad_filesystem, Tmpfs.use_up_inodes, Tmpfs.relieve, inodes=600),
            ),
            (
                "remounted read-only",
                partial(
                    bad_filesystem,
                    lambda disk: eventually(disk.turn_read_only),
                    Tmpfs.turn_writable,
                    apart=True,
                ),
            ),
        )
    ),
    Row("unmounted and mounted again", unmounted, slow=True, skip=_NEEDS_MOUNTS),
    Row("others take the free space", crowded, slow=True, skip=_NEEDS_MOUNTS),
)
