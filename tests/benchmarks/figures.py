"""Figures of benchmarks, a JSON line per row and run: changes between commits, and pages' tables.

Lines of one row and commit are pooled: two runs give twice the rounds.
"""

import json
import os
import platform
import re
import subprocess
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import distributions, version
from math import comb
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
from rich.table import Table

from benchmarks.measure import Row, shown

Line = dict[str, Any]
Name = tuple[Any, ...]
"""Part, unit, row, peer and scale."""

LEVEL = 0.05
PACKAGES = {
    "torch",
    "awscrt",
    "lancedb",
    "litdata",
    "mosaicml-streaming",
    "obstore",
    "s5cmd",
    "webdataset",
}
_HIGHER_IS_BETTER = ("/s", "/CPU-s", "apart")
_TABLE = re.compile(r"<!--figures:(\S+)-->\n.*?<!--end-->", re.DOTALL)
_HEAD = "||shardcache|compared with|ratio|\n|---|---|---|---|\n"


def origin(root: Path) -> Line:
    """Return the commit of a checkout (or else the version), the time, and this machine."""
    describe = ("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    commit = subprocess.run(
        describe, cwd=root, capture_output=True, text=True, check=False
    ).stdout.strip()
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "python": platform.python_version(),
        **{found.name: found.version for found in distributions() if found.name in PACKAGES},
    }
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"commit": commit or version("shardcache"), "date": now, "machine": machine}


def recorded(
    parts: Mapping[str, Callable[[], Iterable[Row]]], path: Path, **head: Any
) -> Iterator[tuple[str, Row | Exception]]:
    """Measure parts; append each row to a file and yield it, or yield the error of its part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for part, measure in parts.items():
        try:
            for row in measure():
                with path.open("a") as file:
                    file.write(
                        json.dumps({**head, "part": part, **row.to_json()}, ensure_ascii=False)
                        + "\n"
                    )
                yield part, row
        except (RuntimeError, OSError, subprocess.SubprocessError) as exn:
            yield part, exn


def read(where: str, path: Path) -> list[Line]:
    """Return the lines of a file `where`, or those in `path` of a commit that begins with it."""
    file = Path(where)
    lines = [
        json.loads(line) for line in (file if file.is_file() else path).read_text().splitlines()
    ]
    found = [line for line in lines if file.is_file() or line["commit"].startswith(where)]
    if not found:
        raise ValueError(
            f"{where} is neither a file of figures nor a commit with figures in {path}"
        )
    return found


def rounds(lines: Iterable[Line]) -> dict[Name, list[float]]:
    """Return what is compared: each round's ratio to the peer, or its figure without a peer."""
    found: dict[Name, list[float]] = defaultdict(list)
    for line in lines:
        ours = line["rounds"]
        theirs = line["peer_rounds"] or []
        paired = len(ours) == len(theirs) and all(theirs)
        name = (line["part"], line["unit"], line["row"], line["peer"], line["scale"])
        found[name] += (
            [each / other for each, other in zip(ours, theirs, strict=True)] if paired else ours
        )
    return found


def rank_test(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the two-sided p-value of the exact rank-sum test, with midranks for ties."""
    both = sorted([*before, *after])
    # Twice the midrank of each value.
    ranks = {value: bisect_left(both, value) + bisect_right(both, value) + 1 for value in both}
    # Number of choices of ranks, by their size and their sum.
    ways: list[Counter[int]] = [Counter({0: 1}), *(Counter() for _ in before)]
    for value in both:
        for size in range(len(before), 0, -1):
            for total, count in ways[size - 1].items():
                ways[size][total + ranks[value]] += count
    middle = len(before) * (len(both) + 1)
    off = abs(sum(ranks[value] for value in before) - middle)
    return sum(count for total, count in ways[-1].items() if abs(total - middle) >= off) / comb(
        len(both), len(before)
    )


class Change(NamedTuple):
    """Medians of a row at two commits, with a verdict: better, worse, noise, or too few rounds."""

    name: Name
    before: float
    after: float
    p: float
    verdict: str


def compare(before: Iterable[Line], after: Iterable[Line]) -> Iterator[Change]:
    """Yield what became of each row that both have."""
    both = rounds(before), rounds(after)
    for name, old, new in (
        (name, both[0][name], both[1][name]) for name in both[0] if name in both[1]
    ):
        p = rank_test(old, new)
        ends = (median(old), median(new))
        verdict = (
            "better" if (ends[1] > ends[0]) == name[1].endswith(_HIGHER_IS_BETTER) else "worse"
        )
        if p > LEVEL:
            verdict = (
                "noise" if 2 / comb(len(old) + len(new), len(old)) <= LEVEL else "too few rounds"
            )
        yield Change(name, *ends, p, verdict)


def render(changes: Iterable[Change]) -> Table:
    title = f"exact rank-sum test over rounds; {LEVEL:.0%} of the rows change by chance alone"
    table = Table(title=title, title_justify="left")
    for name in ("part", "measure", "peer", "before", "after", "change", "p", "verdict"):
        table.add_column(name)
    for (part, unit, row, peer, _), before, after, p, verdict in changes:
        change = f"{after / before - 1:+.1%}" if before else ""
        style = {"better": "green", "worse": "red"}.get(verdict)
        cells = (
            part,
            f"{unit}, {row}",
            peer,
            f"{before:.4g}",
            f"{after:.4g}",
            change,
            f"{p:.3f}",
            verdict,
        )
        table.add_row(*cells, style=style)
    return table


def page(text: str, lines: Sequence[Line]) -> str:
    """Return a page with each table made anew of its rows' newest lines, if it has any.

    A table stands between `<!--figures:PART,PART-->` and `<!--end-->`; `machine` is a sentence on
    when and where.
    """
    newest = {
        (line["part"], line["unit"], line["row"], line["peer"]): line for line in lines
    }.values()

    def table(match: re.Match[str]) -> str:
        made = "".join(
            _rows(line for part in match[1].split(",") for line in newest if line["part"] == part)
        )
        made = _HEAD + made if made else ""
        if match[1] == "machine":
            where = "on {date:.10} at commit {commit} with {scale:.0%} of the data"
            machine = ", ".join(f"{name} {value}" for name, value in lines[-1]["machine"].items())
            made = (
                f"Measured {'; '.join(dict.fromkeys(map(where.format_map, newest)))}: {machine}.\n"
            )
        return f"<!--figures:{match[1]}-->\n\n{made}\n<!--end-->" if made else match[0]

    return _TABLE.sub(table, text)


def _rows(lines: Iterable[Line]) -> Iterator[str]:
    before = None
    for line in lines:
        what = f"{line['unit']}, {line['row']}"
        ours = f"{what}|{shown(line['ours'])}" if what != before else "|"
        peer = (
            f"{line['peer']}: {shown(line['theirs'])}|{line['ratio']:.2f}" if line["ratio"] else "|"
        )
        yield f"|{ours}|{peer}|\n"
        before = what
