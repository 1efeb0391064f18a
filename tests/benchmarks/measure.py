"""Measurements: wall time, processor time, memory; several interleaved tries."""

from __future__ import annotations

import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Finished:
    """A program that has run: seconds of wall and of processor time, and what it printed."""

    wall_s: float
    cpu_s: float
    output: str


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> Finished:
    """Run a program to its end. Raises RuntimeError with its error output where it fails."""
    cpu_s, started_s = _children_cpu_s(), time.perf_counter()
    (output,) = run_together([command], env)
    return Finished(time.perf_counter() - started_s, _children_cpu_s() - cpu_s, output)


def run_together(commands: Sequence[Sequence[str]], env: Mapping[str, str] | None = None) -> list[str]:
    """Run programs at the same time; return what each printed. Leaves none behind, however this ends."""
    with ExitStack() as stack:
        processes = [stack.enter_context(_started(command, env)) for command in commands]
        return [process.communicate()[0] for process in processes]


@contextmanager
def _started(command: Sequence[str], env: Mapping[str, str] | None) -> Iterator[subprocess.Popen[str]]:
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            process_group=0,
        )
        try:
            yield process
            if process.returncode:
                errors.seek(0)
                raise RuntimeError(f"{' '.join(command)} exited {process.returncode}:\n{errors.read()[-4000:]}")
        finally:
            with suppress(ProcessLookupError):  # the usual case: it has ended, and so have its workers
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def python(module: str, *arguments: str) -> list[str]:
    """Return the command that runs one of the benchmark's modules in a process of its own."""
    return [sys.executable, "-m", f"{__package__}.{module}", *arguments]


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def tree_cpu_s(pid: int) -> float:
    """Return the processor time, user and system, of a process and all its children, ended ones included."""
    process = psutil.Process(pid)
    return sum(sum(member.cpu_times()[:4]) for member in (process, *process.children(recursive=True)))


def thread_cpu_s(pid: int) -> dict[int, float]:
    """Return the processor time, user and system, of each thread of a process; the main thread's id is `pid`."""
    return {thread.id: thread.user_time + thread.system_time for thread in psutil.Process(pid).threads()}


def peak_rss_bytes(pid: int) -> int:
    """Return the most memory that a process had resident at any time."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024
    raise ValueError(f"no VmHWM for process {pid}")


def interleaved(
    contenders: Mapping[Key, Callable[[], Value]], say: Callable[[str], None], rounds: int
) -> dict[Key, list[Value]]:
    """Run every contender once per round, so that other load on the machine affects all of them alike."""
    results: dict[Key, list[Value]] = {name: [] for name in contenders}
    for number in range(1, rounds + 1):
        for name, contender in contenders.items():
            results[name].append(contender())
            say(f"{name}, round {number} of {rounds}: {results[name][-1]}")
    return results


def medians(contenders: Mapping[Key, Callable[[], float]], say: Callable[[str], None], rounds: int) -> dict[Key, float]:
    """Return each contender's median of interleaved tries."""
    return {name: statistics.median(tries) for name, tries in interleaved(contenders, say, rounds).items()}
