"""Processes that tests start, the children of processes, and open files of this one."""

import os
import platform
import select
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.programs.guard import GUARD_S


def logged(command: Sequence[str | Path], log: Path, **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that has no input; what it prints goes to the end of a file."""
    with log.open("ab") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, **options
        )


def printed_by(command: str | Sequence[str], **options: Any) -> str:
    """Run a command and return its output. Raises AssertionError with its errors on failure."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command, capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def children(pid: int) -> list[int]:
    """Return the processes that a process has started, by whichever of its threads."""
    return [child.pid for child in psutil.Process(pid).children()]


def kill_tree(pid: int) -> None:
    """Kill a process and all of its descendants; return once all have ended."""
    tree = [pid]
    for each in tree:
        with suppress(ProcessLookupError, psutil.NoSuchProcess):  # it has ended
            os.kill(each, signal.SIGSTOP)  # so that it starts no more of them
            tree += children(each)
    for each in tree:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    for each in tree:
        wait_until_ended(each)


def transport_workers(pid: int) -> set[int]:
    """Return those of them that are transport workers by now."""
    return running(pid, "shardcache.transport.worker")


def running(pid: int, module: str) -> set[int]:
    """Return those of them that now run a module's program, executed or forked."""
    found = set()
    for child in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):  # it has ended
            if module in child.cmdline() or child.name() == comm_of(module):
                found.add(child.pid)
    return found


def comm_of(module: str) -> str:
    """Return the name of a forked module's process, at most 15 bytes (/proc/PID/comm)."""
    return module[-15:]


def memfds() -> dict[int, str]:
    """Return the names of this process's files without a path, by their descriptors."""
    names = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            names[int(link.name)] = str(link.readlink())
    return {fd: name for fd, name in names.items() if "memfd" in name}


def has_ended(pidfd: int, limit_s: float | None = GUARD_S) -> bool:
    """Return whether a process ends within the limit, whoever its parent is. Blocks until then."""
    ended = select.poll()  # select() takes no descriptor above 1,023
    ended.register(pidfd, select.POLLIN)
    return bool(ended.poll(None if limit_s is None else limit_s * 1000))


def wait_until_ended(pid: int) -> None:
    """Return once a process has ended, whoever its parent is. Blocks; raises TimeoutError."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if not has_ended(fd):
            raise TimeoutError(f"process {pid} has not ended")
    finally:
        os.close(fd)


MB = 1_000_000

glibc_only = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="the C library is not glibc"
)


def kept_bytes(freed_bytes: int, value_bytes: int) -> int:
    """Make values, free all, and return how much memory the process has more than before.

    What a process freed before changes what its allocator does: call it once per process.
    """
    before_bytes = _anonymous_bytes()
    values = [b"x" * value_bytes for _ in range(freed_bytes // value_bytes)]
    assert _anonymous_bytes() - before_bytes > 0.9 * freed_bytes
    del values
    return _anonymous_bytes() - before_bytes


def _anonymous_bytes() -> int:
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon:")
    )
    return int(line.split()[1]) * 1024
