"""One harness for all that is broken on purpose: rows in tables, which `make faults` plays."""

import importlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import pytest
from rich.table import Table

PARTS = (
    "store",
    "kills",
    "part_churn",
    "power",
    "disks",
    "restarts",
    "access",
    "load",
    "memory",
    "fuzz",
)
QUICK = 0.001
"""Scale of the tests: rows do the least that they can do."""


@dataclass(slots=True)
class Result:
    """The count of one kind of fault.

    Attributes:
        recovery_s: from the end of the fault until all was well again, each time; empty if nothing
            has to recover.
    """

    fault: str  # what was done, in a few words
    injected: int = 0  # how often it really happened, not how often it was asked for
    wrong: int = 0  # shards, samples or answers of which a byte was not the one in the store
    hangs: int = 0  # what neither ended nor failed within its limit
    lost: int = 0  # samples that should have come and did not, or came twice
    untyped: int = (
        0  # failures that were no error of `shardcache.errors`; a process that died counts as one
    )
    recovery_s: list[float] = field(default_factory=list)
    first_failure: str = (
        ""  # how to see the first thing that went wrong again; empty when nothing did
    )
    part: str = ""

    @property
    def passed(self) -> bool:
        return self.injected > 0 and not (self.wrong or self.hangs or self.lost or self.untyped)

    def fail(self, kind: str, how: str) -> None:
        """Count one `wrong`, `hangs`, `lost` or `untyped`, and keep the first story."""
        setattr(self, kind, getattr(self, kind) + 1)
        self.first_failure = self.first_failure or how

    def cells(self) -> tuple[str, ...]:
        """Return its line of the table."""
        harm = (self.wrong, self.hangs, self.lost, self.untyped)
        recovery = (
            f"{median(self.recovery_s):.2f} / {max(self.recovery_s):.2f}" if self.recovery_s else ""
        )
        verdict = "[green]ok[/]" if self.passed else "[red]FAILED[/]"
        return (self.part, self.fault, f"{self.injected:,}", *map(str, harm), recovery, verdict)


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of fault.

    Attributes:
        act: breaks something on the part's ground, at a scale, and counts in the result what came
            of it.
    """

    fault: str
    act: Callable[[Any, Result, float], None]
    slow: bool = False  # whether the quick tests leave it out
    skip: str = ""  # why it cannot be played here, if it cannot

    def __str__(self) -> str:
        return self.fault

    def play(self, ground: Any, scale: float) -> Result:
        """Do it, and return what came of it."""
        result = Result(self.fault)
        self.act(ground, result, scale)
        return result

    def check(self, ground: Any, scale: float = QUICK) -> Result:
        """Do it in a test. Raises AssertionError when harm was done, or nothing at all."""
        result = self.play(ground, scale)
        assert result.passed, result.first_failure or result
        return result


def scaled(full: float, scale: float, least: int = 1) -> int:
    """Return how often to do what is done `full` times at scale 1."""
    return max(least, round(full * scale))


def rows(table: Iterable[Row]) -> pytest.MarkDecorator:
    """Return the decorator of a test that has the rows of a table as `row`."""
    params = [
        pytest.param(
            row,
            id=row.fault,
            marks=[pytest.mark.slow] * row.slow
            + [pytest.mark.skipif(bool(row.skip), reason=row.skip)],
        )
        for row in table
    ]
    return pytest.mark.parametrize("row", params)


def run(part: str, scale: float, folder: Path) -> Iterator[Result]:
    """Yield a result for each row of a part: a module with `ROWS` and `ground(folder, scale)`."""
    module: ModuleType = importlib.import_module(f"campaign.{part}")
    ground: AbstractContextManager[Any] = module.ground(folder, scale)
    logging.getLogger("shardcache").setLevel(
        logging.ERROR
    )  # what clients say of each fault would hide the table
    with ground as entered:
        for row in module.ROWS:
            if not row.skip:
                result = row.play(entered, scale)
                result.part = part
                yield result


def render(results: Sequence[Result], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("part", "fault"):
        table.add_column(name)
    for name in ("injected", "wrong", "hangs", "lost", "untyped", "recovery s (median / most)", ""):
        table.add_column(name, justify="right")
    for before, result in zip((None, *results), results, strict=False):
        if before is not None and before.part != result.part:
            table.add_section()
        table.add_row(*result.cells())
    return table
