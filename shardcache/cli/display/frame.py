"""One frame of `shardcache top`: a status page and the rates since the previous one, cut to the screen. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardcache.cli.display import cells
from shardcache.cli.display.job_rows import JobRows, without_readers
from shardcache.cli.display.output import Tail, one_line
from shardcache.cli.display.page import headline, transfer_table
from shardcache.cli.display.rates import Page, Rates
from shardcache.errors import ShardcacheError
from shardcache.units import size

Row = Mapping[str, Any]

_BAR_COLUMNS = 12
# A narrower screen needs the columns of the transfers' bars for their names.
_BAR_FROM_COLUMNS = 100
# A table's heading and the blank line above it.
_HEADING_LINES = 2


@dataclass(frozen=True, slots=True)
class Moment:
    """The data of one frame.

    Attributes:
        page: the latest status page.
        rates: the rates since the previous page; None without one.
        trouble: the reason that there is no newer page; None while the daemon answers.
    """

    page: Page
    rates: Rates | None = None
    trouble: ShardcacheError | None = None

    def to_json(self) -> Page:
        """Return the JSON that `shardcache top --json` prints."""
        if self.trouble:
            return {"error": self.trouble.to_json()}
        return self.page | {"rates": self.rates and self.rates.to_json()}


def frame(moment: Moment, width: int, height: int | None = None) -> RenderableType:
    """Return the rendered frame for a width, at most `height` lines of it if given."""
    head, page = _head(moment), moment.page
    jobs = sorted(page["jobs"], key=_job_order)
    rows = JobRows.of([job for job in jobs if job["sessions"]], moment.rates, width)
    idle = _idle([job for job in jobs if not job["sessions"]], width, below_jobs=bool(rows.heights))
    transfers = sorted(page["transfers"], key=_transfer_order)
    headings = sum(_HEADING_LINES for section in (rows.heights, transfers) if section)
    room = None if height is None else max(0, height - 1 - head.row_count - headings - len(idle))
    for_jobs, for_transfers = share(room, sum(rows.heights), len(transfers))
    bar_columns = _BAR_COLUMNS if width >= _BAR_FROM_COLUMNS else 0
    return Group(
        headline(page),
        head,
        *_jobs(rows, for_jobs),
        *idle,
        *_transfers(transfers, for_transfers, partial(transfer_table, bar_columns=bar_columns, url=Tail)),
    )


def share(lines: int | None, jobs: int, transfers: int) -> tuple[int, int]:
    """Divide lines between two lists: half for each, plus any that the other does not need; None means no limit."""
    if lines is None:
        return jobs, transfers
    for_jobs = min(jobs, max(lines // 2, lines - transfers))
    return for_jobs, min(transfers, lines - for_jobs)


def _jobs(rows: JobRows, lines: int) -> list[RenderableType]:
    """Return a table of the jobs that fit; if some do not, the last line says how many are hidden."""
    if not rows.heights or not lines:
        return []
    shown = rows.fitting(lines) if sum(rows.heights) <= lines else rows.fitting(lines - 1)
    return ["", rows.table(shown), *_hidden(len(rows.heights) - shown)]


def _idle(jobs: Sequence[Row], width: int, *, below_jobs: bool) -> list[RenderableType]:
    """Return the line about jobs without readers, after a blank one if no table of jobs is above it."""
    if not jobs:
        return []
    return [*([] if below_jobs else [""]), without_readers(jobs, width)]


def _transfers(rows: Sequence[Row], lines: int, table: Callable[[Sequence[Row]], Table]) -> list[RenderableType]:
    """Return a table of the transfers that fit; if some do not, the last line says how many are hidden."""
    if not rows or not lines:
        return []
    shown = rows if len(rows) <= lines else rows[: lines - 1]
    return ["", table(shown), *_hidden(len(rows) - len(shown))]


def _hidden(number: int) -> list[RenderableType]:
    return [Text(f"… and {number:,} more", "dim")] if number else []


def _head(moment: Moment) -> Table:
    cache, counters = moment.page["cache"], moment.page["counters"]
    head = Table.grid(padding=(0, 2))
    head.add_row("cache", one_line(str(cache["dir"])))
    fullness = Table.grid(padding=(0, 2))
    fullness.add_row(cells.bar(cache["used_bytes"], cache["capacity_bytes"]), one_line(cells.free(cache)))
    head.add_row("", fullness)
    head.add_row("", one_line(cells.fill(cache)))
    if trouble := cells.disk(moment.page):
        trouble.no_wrap, trouble.overflow = True, "ellipsis"
        head.add_row(Text("disk", "red"), trouble)
    head.add_row("origin", one_line(_store(counters, moment.rates)))
    for heading, text in {"retrying": cells.retrying(moment.page), "tier": cells.tier(moment.page)}.items():
        if text:
            text.no_wrap, text.overflow = True, "ellipsis"
            head.add_row(heading, text)
    head.add_row("leases", one_line(_leases(counters, moment.rates)))
    head.add_row("since start", one_line(cells.troubles(counters)))
    if moment.trouble:
        head.add_row(Text("daemon", "red"), one_line(f"{moment.trouble.message}; retrying", "red"))
    return head


def _store(counters: Row, rates: Rates | None) -> str:
    now = f"{cells.speed(rates.origin_bytes_per_s)} · {rates.origin_requests_per_s:,.1f} requests/s · " if rates else ""
    return f"{now}{size(counters['origin_bytes'])} since start"


def _leases(counters: Row, rates: Rates | None) -> str:
    asked = f"{rates.hits_per_s + rates.misses_per_s:,.1f}/s · " if rates else ""
    return f"{asked}{cells.leases(counters)}"


# Jobs: waiting ones first, those without readers last


def _job_order(job: Row) -> tuple[bool, bool, float, str]:
    ahead_s = job.get("ahead_s")
    return not job["sessions"], not job.get("waiting"), math.inf if ahead_s is None else ahead_s, job["name"]


# Transfers: those being waited for first, then by when they are needed


def _transfer_order(transfer: Row) -> tuple[bool, bool, float, str]:
    needed_in_s = transfer.get("needed_in_s")
    needed_s = math.inf if needed_in_s is None else needed_in_s
    return transfer["class"] != "waiting", transfer["class"] == "warm", needed_s, transfer["url"]
