"""Stands between a daemon and its disk: kills it, or fails its n-th call that changes a file.

The C half, `shim.c`, is compiled at first use and loaded with LD_PRELOAD. Both halves share a
control block, so what the shim does can be changed while its processes run, and what it counted
outlives them.
"""

import ctypes
import enum
import functools
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

SOURCE = Path(__file__).with_suffix(".c")
CONTROL_ENV = "SHIM_CONTROL"
_CHILD_ENV = "SHIM_CHILD"  # set once the victim is known
HAS_CC = shutil.which("cc") is not None


class Op(enum.IntEnum):
    """Kinds of calls, as numbered in shim.c. OPEN and READ are matched only when asked for."""

    CREATE = 0  # open with O_CREAT or O_TRUNC
    WRITE = 1
    TRUNCATE = 2
    ALLOCATE = 3
    FSYNC = 4
    RENAME = 5
    UNLINK = 6
    MKDIR = 7
    RMDIR = 8
    CHMOD = 9
    UTIME = 10
    OPEN = 11
    READ = 12


CHANGES = tuple(op for op in Op if op < Op.OPEN)


class Action(enum.IntEnum):
    """Action on the chosen calls, as numbered in shim.c."""

    COUNT = 0  # nothing
    KILL_BEFORE = 1
    KILL_AFTER = 2
    KILL_HALF = 3  # in the middle of a write or an allocation; before any other call
    FAIL = 4
    SHORT = 5  # a write takes half of what it was given, and says so
    HOLD = 6  # the call waits until `release`


FOR_EVER = 2**62


class _Control(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("seen", "acted", "at", "times")),
        ("ops", ctypes.c_uint64),
        *(
            (name, ctypes.c_int32)
            for name in ("action", "error", "victim", "holder", "logging", "last_op")
        ),
        ("root", ctypes.c_char * 512),
        ("match", ctypes.c_char * 128),
        ("log", ctypes.c_char * 512),
    )


_RECORD = struct.Struct("=IIIIqqq")


@functools.cache
def library() -> Path:
    """Return the path of the compiled shim. Raises CalledProcessError."""
    tag = f"{SOURCE.stem}-{os.getuid()}-{SOURCE.stat().st_mtime_ns:x}"
    built = Path(tempfile.gettempdir()) / f"shardcache-{tag}.so"
    if not built.exists():
        unfinished = built.with_suffix(f".{os.getpid()}")
        subprocess.run(
            ["cc", "-O2", "-fPIC", "-shared", "-o", unfinished, SOURCE, "-ldl"], check=True
        )
        unfinished.rename(built)
    return built


class Shim:
    """The control block of a process tree, of which the first to start is the one that dies."""

    def __init__(self, control_path: Path, root: Path) -> None:
        """Make the block; `root` is the folder whose files count."""
        self.path = control_path
        control_path.write_bytes(bytes(ctypes.sizeof(_Control)))
        with control_path.open("r+b") as file:
            self._block = _Control.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(_Control)))
        self._block.root = os.fsencode(root)

    def env(self) -> dict[str, str]:
        """Return the variables that put a process, and all that it starts, under this shim."""
        return {"LD_PRELOAD": str(library()), CONTROL_ENV: str(self.path)}

    def arm(
        self,
        action: Action,
        *,
        at: int = 1,
        times: int = 1,
        ops: tuple[Op, ...] = CHANGES,
        match: str = "",
        error: int = 0,
    ) -> None:
        """Count again, and act on the calls from the `at`-th to the `at + times - 1`-th.

        Args:
            match: only calls on paths that hold this text.
            error: errno with which FAIL lets calls fail.
        """
        self._block.ops = 0  # no call matches meanwhile
        self._block.match = os.fsencode(match)
        self._block.seen = 0
        self._block.acted = 0
        self._block.at = at
        self._block.times = times
        self._block.action = action
        self._block.error = error
        self._block.ops = sum(1 << op for op in ops)

    def disarm(self) -> None:
        self._block.ops = 0

    def release(self, error: int = 0) -> None:
        """Let held calls go on, or fail with an errno, and those that would have been held, too."""
        self._block.error = error
        self._block.action = Action.FAIL if error else Action.COUNT

    def log_to(self, path: Path) -> None:
        """Append a record of each armed call that succeeds to a file; `read_log` reads it."""
        self._block.log = os.fsencode(path)
        self._block.logging = 1

    @property
    def seen(self) -> int:
        return int(self._block.seen)

    @property
    def acted(self) -> int:
        return int(self._block.acted)


def rule_this_process(control_path: Path) -> None:
    """Put this process, which loaded the shim at its start, under another control block.

    What it starts is ruled by the same block, and dies with it.
    """
    shim = ctypes.CDLL(str(library()))
    if shim.shim_use(os.fsencode(control_path)) != 0:
        raise OSError(f"the shim cannot use {control_path}")
    shim.shim_be_victim()
    os.environ |= {"LD_PRELOAD": str(library()), CONTROL_ENV: str(control_path), _CHILD_ENV: "1"}


@dataclass(frozen=True, slots=True)
class Call:
    """One logged call.

    Attributes:
        path, path2: what it was on; of a rename, from and to.
        offset, length: bytes of a write or an allocation; `length` is the new size of a truncation.
    """

    op: Op
    path: str
    path2: str
    offset: int
    length: int
    flags: int  # of an open; the mode of an allocation
    data: bytes  # what a write wrote

    @classmethod
    def read(cls, log: memoryview, at: int) -> tuple[Self, int]:
        """Return the call whose record begins at an offset of the log, and the offset behind it."""
        op, *sizes, offset, length, flags = _RECORD.unpack_from(log, at)
        at += _RECORD.size
        texts = []
        for size in sizes:
            texts.append(bytes(log[at : at + size]))
            at += size
        return cls(
            Op(op), os.fsdecode(texts[0]), os.fsdecode(texts[1]), offset, length, flags, texts[2]
        ), at


def read_log(path: Path) -> Iterator[Call]:
    """Yield the logged calls, in the order in which they were finished."""
    log = memoryview(path.read_bytes())
    at = 0
    while at < len(log):
        call, at = Call.read(log, at)
        yield call
