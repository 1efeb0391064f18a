"""The jobs of `top`: names whole, and as many other columns as the screen has room for. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, chop_cells
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardcache.cli.display import cells
from shardcache.cli.display.output import count, make_table, one_line
from shardcache.cli.display.rates import Rates, job_key

Row = Mapping[str, Any]
Cell = Text | ProgressBar | str

_GAP_COLUMNS = 2
_BAR_COLUMNS = 12
_BAR = ""
_NUMBERS = ("readers", "shards read", "shards/s", "ahead", "waits")
# Given up one after another until the rest fits.
_DISPENSABLE = ("waited", _BAR, "shards/s", "waits", "readers")
# Cut rather than given up, down to this width.
_ELASTIC = "waiting now"
_LEAST_ELASTIC_COLUMNS = 12
# For longer names no column is given up: they are folded, whatever the screen's width leaves them.
_USUAL_NAME_COLUMNS = 32
_LEAST_NAME_COLUMNS = 16


@dataclass(frozen=True, slots=True)
class JobRows:
    """The jobs with readers, laid out for a width.

    Attributes:
        columns: the cells of each column, by its heading.
        heights: lines that each job takes: more than one if its name is folded.
    """

    columns: Mapping[str, Sequence[Cell]]
    heights: Sequence[int]

    @classmethod
    def of(cls, jobs: Sequence[Row], rates: Rates | None, width: int) -> JobRows:
        """Lay out jobs, in their order."""
        columns = _columns(jobs, rates)
        nobody_waits = not any(map(str, columns[_ELASTIC]))
        for heading in (*([_ELASTIC] if nobody_waits else []), *_DISPENSABLE):
            if _least_width(columns, _USUAL_NAME_COLUMNS) <= width:
                break
            del columns[heading]
        for_names = max(_LEAST_NAME_COLUMNS, width - _least_width(columns, 0))
        names = [chop_cells(job["name"], for_names) or [""] for job in jobs]
        return cls(columns | {"job": [Text("\n".join(lines)) for lines in names]}, list(map(len, names)))

    def table(self, shown: int) -> Table:
        """Return a table of the first jobs."""
        table = make_table(*self.columns, numbers=_NUMBERS)
        for column in table.columns:
            column.no_wrap = str(column.header) != _ELASTIC  # rich narrows this one alone
        for cells_of_job in list(zip(*self.columns.values(), strict=True))[:shown]:
            table.add_row(*cells_of_job)
        return table

    def fitting(self, lines: int) -> int:
        """Return the number of jobs that fit into a number of lines, below the heading."""
        shown = 0
        for height in self.heights:
            lines -= height
            if lines < 0:
                break
            shown += 1
        return shown


def _columns(jobs: Sequence[Row], rates: Rates | None) -> dict[str, list[Cell]]:
    shares = rates.waiting_share if rates else {}
    return {
        "job": [Text(job["name"]) for job in jobs],
        "user": [one_line(cells.user(job)) for job in jobs],
        "readers": [f"{job['sessions']:,}" for job in jobs],
        _BAR: [cells.bar(job["shards_done"], job["shards_planned"], _BAR_COLUMNS) for job in jobs],
        "shards read": [cells.progress(job) for job in jobs],
        "shards/s": [cells.pace(job) for job in jobs],
        "ahead": [cells.ahead(job) for job in jobs],
        "waits": [f"{shares[job_key(job)]:.0%}" if job_key(job) in shares else "" for job in jobs],
        "waited": [one_line(cells.waited(job)) for job in jobs],
        _ELASTIC: [one_line(cells.waiting_now(job)) for job in jobs],
    }


def _least_width(columns: Mapping[str, Sequence[Cell]], most_for_names: int) -> int:
    """Return the width of the columns with their gaps."""
    most = {"job": most_for_names, _ELASTIC: _LEAST_ELASTIC_COLUMNS}
    widths = {heading: max(map(_width, (heading, *found))) for heading, found in columns.items()}
    gaps = _GAP_COLUMNS * (len(widths) - 1)
    return gaps + sum(min(width, most.get(heading, width)) for heading, width in widths.items())


def _width(cell: Cell) -> int:
    return _BAR_COLUMNS if isinstance(cell, ProgressBar) else cell_len(str(cell))


def without_readers(jobs: Sequence[Row], width: int) -> Text:
    """Return one line about jobs that have ended or are between two epochs, with as many whole names as fit."""
    head = f"{count(len(jobs), 'job')} without readers: "
    shortest, *lines = _lists(head, [job["name"] for job in jobs])
    return one_line(next((line for line in reversed(lines) if cell_len(line) <= width), shortest), "dim")


def _lists(head: str, names: Sequence[str]) -> Iterator[str]:
    """Yield the line with no names, then with more and more of them."""
    yield head.rstrip(": ")
    for shown in range(1, len(names) + 1):
        rest = f" and {len(names) - shown:,} more" if shown < len(names) else ""
        yield f"{head}{', '.join(names[:shown])}{rest}"
