"""Lives of a daemon: a story is told to it until it is killed, and it is started again."""

import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path

from campaign.harness import Result
from campaign.kill_audit import Found, Source, audit, look
from campaign.range_reads import Span
from shardcache_client.daemon.websocket import HandshakeError
from support.disks.shim import CHANGES, HAS_CC, Action, Op, Shim
from support.programs.daemon import Daemon
from support.programs.zygote import Zygote

PART_BYTES = 64 * 1024
SAMPLES = 10  # of a tar, where nothing else is said
FLAGS = (
    "--part-size",
    str(PART_BYTES),
    "--range-part-size",
    str(PART_BYTES),
    "--whole-from-percent",
    "100",
    "--listing-ttl-s",
    "0",
    "--log-format",
    "json",
)
AMPLE = "1GB"
NEEDS_CC = "" if HAS_CC else "the shim needs a C compiler"
OWN = "own"
"""Name of the file, beside the cache folder, of an object of this life: its url and its bytes."""
# A start asks for every folder again; where they are all there, that changes nothing.
WITHOUT_FOLDERS = tuple(op for op in CHANGES if op is not Op.MKDIR)
WRITES = (Op.WRITE, Op.ALLOCATE)
# What a reader or a tool meets when the daemon dies under it.
GONE = (OSError, HTTPException, HandshakeError)


@dataclass(frozen=True, slots=True)
class Story:
    """A daemon's story up to its kill.

    Attributes:
        name: in the table.
        source: what it fetches from.
        template: cache folder to begin with, copied for each life; None for none at all.
        tell: does the reading and asking; it must end.
        capacity: of the cache while the story is told.
        ops: the calls that are points to die at.
        stride: how many calls lie from one such point to the next, where most of them are alike.
        is_of_ranges: whether its daemon keeps parts of objects, which are then read as ranges.
        spoilt: how many parts of the template have a wrong byte.
        samples: how many each tar has.
        editions: contents, one after another, of the object of a life alone.
    """

    name: str
    source: Source
    template: Path | None
    tell: Callable[[Daemon, Source], None]
    capacity: str
    ops: tuple[Op, ...] = WITHOUT_FOLDERS
    stride: int = 1
    is_of_ranges: bool = False
    spoilt: int = 0
    samples: int = SAMPLES
    editions: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Death:
    """The call at which the daemon dies.

    Attributes:
        action: in which moment of the call. In the middle of one it can die in writes and
            allocations only: then it is the `at`-th of these.
        at: number of the call, from 1.
        again: number of the call at which it dies once more after its restart, 0 for not.
    """

    action: Action
    at: int
    again: int = 0

    def __str__(self) -> str:
        words = f"{self.action.name} at {self.at}"
        if self.again:
            words += f" and {self.again}"
        return words


@dataclass(frozen=True, slots=True)
class Ground:
    """Stories, and a folder for their lives."""

    zygote: Zygote
    stories: dict[str, Story]
    folder: Path


def copy_folder(folder: Path, copy: Path) -> Path:
    """Copy a cache folder, with the holes in its files; return the copy."""
    subprocess.run(["cp", "-a", folder, copy], check=True)
    return copy


class Life:
    """One run of a story in a folder of its own."""

    def __init__(self, zygote: Zygote, story: Story, root: Path) -> None:
        self._story = story
        self._zygote = zygote
        root.mkdir()
        self._root = root
        self.cache = root / "cache"
        if story.template is not None:
            copy_folder(story.template, self.cache)
        self.shim = Shim(root / "shim", self.cache)

    def _daemon(self, capacity: str) -> Daemon:
        env = self._story.source.env | {"SHIM_CONTROL": str(self.shim.path)}
        return Daemon(self._root, *FLAGS, capacity=capacity, env=env, spawn=self._zygote.spawn)

    def live(self, death: Death, ops: tuple[Op, ...] = ()) -> bool:
        """Tell the story until it ends or the daemon is killed; return whether it was.

        Raises what goes wrong for another reason.
        """
        if not ops:
            ops = WRITES if death.action is Action.KILL_HALF else self._story.ops
        self.shim.arm(death.action, at=death.at, ops=ops)
        daemon = self._daemon(self._story.capacity)
        try:
            daemon.start()
            self._story.tell(daemon, self._story.source)
        except (*GONE, RuntimeError):
            if not self.shim.acted:
                raise
        finally:
            daemon.kill()
        return bool(self.shim.acted)

    def recover(self, result: Result, how: str, *, may_fetch: bool = False) -> None:
        """Start it once more, undisturbed, and count what is not as it must be.

        Args:
            may_fetch: whether finished parts may have been lost. All parts are then read as ranges,
                if its story is of such.
        """
        self.shim.disarm()
        source = self._source()
        found = look(self.cache, source, may_fetch=may_fetch)
        if may_fetch and self._story.is_of_ranges:
            found = replace(found, spans=_all_parts(source))
        self._judge(found, result, how)
        daemon = self._daemon(AMPLE)
        begun_s = time.monotonic()
        daemon.start()
        try:
            result.recovery_s.append(time.monotonic() - begun_s)
            problems = audit(daemon, source, found, reads_ranges=self._story.is_of_ranges)
            for kind, problem in problems:
                result.fail(kind, f"{how}: {problem}")
        finally:
            daemon.kill()
        if "Traceback" in daemon.log.read_text():
            result.fail("untyped", f"{how}: a bug shows in the log: {daemon.tail()}")

    def _source(self) -> Source:
        """Return the story's source, with the object that only this life has."""
        source = self._story.source
        own = self._root / OWN
        if not own.exists():
            return source
        line, _, tar = own.read_bytes().partition(b"\n")
        url = line.decode()
        return Source(source.tars | {url: tar}, source.stored_bytes | {url: len(tar)}, source.env)

    def _judge(self, found: Found, result: Result, how: str) -> None:
        """Count parts that a killed daemon has spoilt or lost."""
        if len(found.spoilt) > self._story.spoilt:
            result.fail("wrong", f"{how}: finished parts with other bytes: {found.spoilt}")
        if found.forgotten:
            result.fail("lost", f"{how}: ranges were granted and are gone: {found.forgotten}")


def _all_parts(source: Source) -> tuple[Span, ...]:
    """Return the ranges of all parts of all objects."""
    return tuple(
        Span(url, start, min(start + PART_BYTES, size_bytes))
        for url, size_bytes in source.stored_bytes.items()
        for start in range(0, size_bytes, PART_BYTES)
    )


def die_and_recover(zygote: Zygote, story: Story, death: Death, root: Path, result: Result) -> None:
    """Live a story to the given death, restart, and count in the result what came of it."""
    how = f"{story.name}, {death}"
    try:
        life = Life(zygote, story, root)
        killed = life.live(death)
        if killed and death.again:
            killed = life.live(Death(Action.KILL_BEFORE, death.again))
        result.injected += killed
        life.recover(result, how)
    except TimeoutError as exn:
        result.fail("hangs", f"{how}: {exn!r}")
    except (*GONE, RuntimeError, AssertionError) as exn:
        result.fail("untyped", f"{how}: {exn!r}")
    finally:
        with suppress(OSError):
            shutil.rmtree(root)
