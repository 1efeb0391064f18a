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
from shardcache.cli.display.output import Tail, make_table, one_line
from shardcache.cli.display.page import headline, transfer_table
from shardcache.cli.display.rates import Page, Rates, job_key
from shardcache.errors import ShardcacheError
from shardcache.units import size

Row = Mapping[str, Any]

_BAR_COLUMNS = 12
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


def frame(moment: Moment, height: int | None = None) -> RenderableType:
    """Return the rendered frame, at most `height` lines of it if given."""
    head, page = _head(moment), moment.page
    jobs, transfers = sorted(page["jobs"], key=_job_order), sorted(page["transfers"], key=_transfer_order)
    headings = (bool(jobs) + bool(transfers)) * _HEADING_LINES
    room = None if height is None else max(0, height - 1 - head.row_count - headings)
    for_jobs, for_transfers = share(room, len(jobs), len(transfers))
    return Group(
        headline(page),
        head,
        *_section(jobs, for_jobs, partial(_job_table, rates=moment.rates)),
        *_section(transfers, for_transfers, partial(transfer_table, bar_columns=_BAR_COLUMNS, url=Tail)),
    )


def share(lines: int | None, jobs: int, transfers: int) -> tuple[int, int]:
    """Divide lines between two lists: half for each, plus any that the other does not need; None means no limit."""
    if lines is None:
        return jobs, transfers
    for_jobs = min(jobs, max(lines // 2, lines - transfers))
    return for_jobs, min(transfers, lines - for_jobs)


def _section(rows: Sequence[Row], lines: int, table: Callable[[Sequence[Row]], Table]) -> list[RenderableType]:
    """Return a table of the rows that fit; if some do not, the last line says how many are hidden."""
    if not rows or not lines:
        return []
    shown = rows if len(rows) <= lines else rows[: lines - 1]
    hidden = len(rows) - len(shown)
    return ["", table(shown), *([Text(f"… and {hidden:,} more", "dim")] if hidden else [])]


def _head(moment: Moment) -> Table:
    cache, counters = moment.page["cache"], moment.page["counters"]
    head = Table.grid(padding=(0, 2))
    head.add_row("cache", one_line(str(cache["dir"])))
    head.add_row("", cells.bar(cache["used_bytes"], cache["capacity_bytes"]))
    head.add_row("", one_line(cells.fill(cache)))
    if trouble := cells.disk(moment.page):
        trouble.no_wrap, trouble.overflow = True, "ellipsis"
        head.add_row(Text("disk", "red"), trouble)
    head.add_row("origin", one_line(_store(counters, moment.rates)))
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


# Jobs: waiting ones first, ended ones last


def _job_order(job: Row) -> tuple[bool, bool, float, str]:
    ahead_s = job.get("ahead_s")
    return not job["sessions"], not job.get("waiting"), math.inf if ahead_s is None else ahead_s, job["name"]


def _job_table(jobs: Sequence[Row], rates: Rates | None) -> Table:
    numbers = ("readers", "shards read", "shards/s", "ahead", "waits")
    columns = ("job", "readers", "", *numbers[1:], "waited", "waiting now")
    table = make_table(*columns, numbers=numbers)
    shares = rates.waiting_share if rates else {}
    for job in jobs:
        who = one_line(job["name"]), f"{job['sessions']:,}"
        done = cells.bar(job["shards_done"], job["shards_planned"], _BAR_COLUMNS), cells.progress(job)
        waits = f"{shares[job_key(job)]:.0%}" if job_key(job) in shares else ""
        words = one_line(cells.waited(job)), one_line(cells.waiting_now(job))
        style = None if job["sessions"] else "dim"
        table.add_row(*who, *done, cells.pace(job), cells.ahead(job), waits, *words, style=style)
    return table


# Transfers: those being waited for first, then by when they are needed


def _transfer_order(transfer: Row) -> tuple[bool, bool, float, str]:
    needed_in_s = transfer.get("needed_in_s")
    needed_s = math.inf if needed_in_s is None else needed_in_s
    return transfer["class"] != "waiting", transfer["class"] == "warm", needed_s, transfer["url"]
