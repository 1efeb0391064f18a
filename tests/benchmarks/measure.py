"""Measurements: processes of their own, interleaved tries, processor time, memory and rows."""

import json
import mmap
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import psutil
from rich.table import Table

Key = TypeVar("Key")
Value = TypeVar("Value")


def command(function: Callable[..., Any], **arguments: Any) -> list[str]:
    """Return the command that calls a module's function and prints its result as JSON."""
    return [
        sys.executable,
        "-m",
        __name__,
        function.__module__,
        function.__name__,
        json.dumps(arguments),
    ]


def call(
    function: Callable[..., Any], env: Mapping[str, str] | None = None, **arguments: Any
) -> Any:
    """Call a function in its own process; return its result. Raises RuntimeError if it fails."""
    return call_together([command(function, **arguments)], env)[0]


def call_together(
    commands: Sequence[Sequence[str]], env: Mapping[str, str] | None = None
) -> list[Any]:
    """Call functions at the same time; return their results. Leaves no process behind."""
    with ExitStack() as stack:
        processes = [stack.enter_context(_started(command, env)) for command in commands]
        outputs = [process.communicate()[0] for process in processes]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@contextmanager
def _started(
    command: Sequence[str], env: Mapping[str, str] | None
) -> Iterator[subprocess.Popen[str]]:
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
                raise RuntimeError(
                    f"{' '.join(command)} exited {process.returncode}:\n{errors.read()[-4000:]}"
                )
        finally:
            # The usual case: it has ended, and so have its workers.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def rate(
    read: Callable[[], float],
    expected: float,
    timed_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Read an epoch unmeasured, with the start of any workers in it, then whole epochs for a while.

    Returns what they give per second. Raises RuntimeError where one does not give what it must.
    """

    def checked() -> float:
        found = read()
        if found != expected:
            raise RuntimeError(f"an epoch gave {found:,} instead of {expected:,}")
        return found

    checked()
    got = 0.0
    started_s = clock()
    elapsed_s = 0.0
    while elapsed_s < timed_s:
        got += checked()
        elapsed_s = clock() - started_s
    return round(got / elapsed_s, 1)


def tree_cpu_s(pid: int) -> float:
    """Return the user and system time of a process and all its children, ended ones included."""
    process = psutil.Process(pid)
    return sum(
        sum(member.cpu_times()[:4]) for member in (process, *process.children(recursive=True))
    )


def thread_cpu_s(pid: int) -> dict[int, float]:
    """Return the processor time of each thread of a process; the main thread's id is `pid`."""
    return {
        thread.id: thread.user_time + thread.system_time for thread in psutil.Process(pid).threads()
    }


def touch(size_bytes: int) -> None:
    """Write to so much of the free memory, right before others are measured that will.

    A virtual machine may return free memory to its host after a second or two; the first to write
    to it again then waits for the host, which takes longer than all else that a download does.
    """
    with mmap.mmap(-1, size_bytes) as memory:
        memory[:: mmap.PAGESIZE] = bytes(-(-size_bytes // mmap.PAGESIZE))


def peak_bytes(pid: int) -> int:
    """Return the most memory that a process had resident at any time."""
    lines = (line.partition(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return next(int(value.split()[0]) * 1024 for found, _, value in lines if found == "VmHWM")


def interleaved(
    contenders: Mapping[Key, Callable[[], Value]], say: Callable[[str], None], rounds: int
) -> dict[Key, list[Value]]:
    """Run every contender once per round, so that other load affects all of them alike."""
    results: dict[Key, list[Value]] = {name: [] for name in contenders}
    for number in range(1, rounds + 1):
        for name, contender in contenders.items():
            results[name].append(contender())
            say(f"{name}, round {number} of {rounds}: {results[name][-1]}")
    return results


class Figure(float):
    """A figure of several rounds, by default their median, that keeps the value of each."""

    rounds: tuple[float, ...]

    def __new__(
        cls,
        rounds: Iterable[float],
        summary: Callable[[Sequence[float]], float] = statistics.median,
    ) -> "Figure":
        values = tuple(rounds)
        figure = super().__new__(cls, summary(values))
        figure.rounds = values
        return figure


def medians(
    contenders: Mapping[Key, Callable[[], float]], say: Callable[[str], None], rounds: int
) -> dict[Key, Figure]:
    return {name: Figure(tries) for name, tries in interleaved(contenders, say, rounds).items()}


def compared(
    contenders: Mapping[str, Callable[[], float]],
    say: Callable[[str], None],
    rounds: int,
    unit: str,
    what: str,
    targets: "Mapping[str, Target]",
) -> "list[Row]":
    """Return a row of medians for each contender after the first, compared with the first."""
    (_, ours), *peers = medians(contenders, say, rounds).items()
    return [Row(unit, what, ours, peer, theirs, targets.get(peer)) for peer, theirs in peers]


def median_of(tries: Mapping[Key, Sequence[Any]], figure: str) -> dict[Key, Figure]:
    """Return each contender's median of one attribute of its tries."""
    return {name: Figure(getattr(one, figure) for one in some) for name, some in tries.items()}


@dataclass(frozen=True, slots=True)
class Target:
    """Limit to be reached: at least (`≥`), at most (`≤`) or exactly (`=`, to two decimals)."""

    sign: str
    limit: float

    def __str__(self) -> str:
        return f"{self.sign} {self.limit:g}"

    def met_by(self, value: float) -> bool:
        if self.sign == "=":
            return round(value, 2) == self.limit
        return value >= self.limit if self.sign == "≥" else value <= self.limit


@dataclass(frozen=True, slots=True)
class Row:
    """One line: our figure, next to a peer's of the same kind (best or median) if there is one.

    Attributes:
        target: for the ratio where there is a peer, else for the figure; None for a mark only.
    """

    unit: str  # a rate ends in "/s", "/CPU-s" or "apart": more of it is better, of all else less
    what: str  # was measured
    ours: float  # a `Figure`, or the figure of a single round
    peer: str | None = None  # who is compared, or None where the figure itself has the target
    theirs: float | None = None
    target: Target | None = None

    @property
    def ratio(self) -> float | None:
        return self.ours / self.theirs if self.theirs else None

    @property
    def met(self) -> bool | None:
        """True if the target is reached; None without a target."""
        judged = self.ours if self.peer is None else self.ratio
        return None if self.target is None or judged is None else self.target.met_by(judged)

    def to_json(self) -> dict[str, Any]:
        """Return the row with every round's values of both."""
        return {
            "row": self.what,
            "unit": self.unit,
            "ours": self.ours,
            "rounds": getattr(self.ours, "rounds", (self.ours,)),
            "peer": self.peer,
            "theirs": self.theirs,
            "peer_rounds": self._peer_rounds(),
            "ratio": self.ratio,
            "target": None if self.target is None else str(self.target),
            "met": self.met,
        }

    def _peer_rounds(self) -> Sequence[float] | None:
        if self.theirs is None:
            return None
        rounds: Sequence[float] = getattr(self.theirs, "rounds", (self.theirs,))
        return rounds


def render(rows: Sequence[tuple[str, Row]], title: str) -> Table:
    """Return a table of rows, each with the part that measured it."""
    table = Table(title=title, title_justify="left")
    for name in ("part", "measure"):
        table.add_column(name)
    for name in ("shardcache", "peer", "peer's", "ratio", "target", ""):
        table.add_column(name, justify="left" if name == "peer" else "right")
    before = None
    for part, row in rows:
        if before not in (None, part):
            table.add_section()
        before = part
        verdict = {True: "[green]met[/]", False: "[red]missed[/]", None: ""}[row.met]
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        target = "" if row.target is None else str(row.target)
        what = f"{row.unit}, {row.what}"
        table.add_row(
            part, what, shown(row.ours), row.peer or "", shown(row.theirs), ratio, target, verdict
        )
    return table


def shown(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


if __name__ == "__main__":
    module, name, arguments = sys.argv[1:]
    print(json.dumps(getattr(import_module(module), name)(**json.loads(arguments)), default=asdict))
