"""One frame of `shardcache top`: a status page and the rates since the previous one, cut to the screen. Pure.

Jobs have their names whole, and as many other columns as the screen has room for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.cells import cell_len, chop_cells
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardcache.cli import page as cells
from shardcache.cli.output import Tail, count, make_table, one_line
from shardcache.cli.page import Row, headline, transfer_table
from shardcache.errors import ShardcacheError
from shardcache.units import size

Cell = Text | ProgressBar | str
Page = dict[str, Any]
JobKey = tuple[str, int]

_BAR_COLUMNS = 12
# A narrower screen needs the columns of the transfers' bars for their names.
_BAR_FROM_COLUMNS = 100
# A table's heading and the blank line above it.
_HEADING_LINES = 2
_GAP_COLUMNS = 2
_BAR = ""
_NUMBERS = ("readers", "shards read", "shards/s", "ahead", "waits")
# Given up one after another until the rest fits.
_DISPENSABLE = ("waited", _BAR, "shards/s", "waits", "readers")
# Cut rather than given up, down to this width.
_ELASTIC = "waiting now"
_MIN_ELASTIC_COLUMNS = 12
# For longer names no column is given up: they are folded, whatever the screen's width leaves them.
_USUAL_NAME_COLUMNS = 32
_MIN_NAME_COLUMNS = 16


@dataclass(frozen=True, slots=True)
class Rates:
    """A daemon's rates over one interval.

    Attributes:
        interval_s: time between the two pages by the daemon's clock.
        hits_per_s: leases of shards that were cached; `misses_per_s`: of shards that were not.
        waiting_share: by job, the fraction of the interval in which its readers waited for data, 0 to 1.
    """

    interval_s: float
    origin_bytes_per_s: float
    origin_requests_per_s: float
    tier_bytes_per_s: float
    hits_per_s: float
    misses_per_s: float
    waiting_share: Mapping[JobKey, float]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON that `shardcache top --json` adds to the page."""
        jobs = [{"name": n, "uid": uid, "waiting_share": round(s, 4)} for (n, uid), s in self.waiting_share.items()]
        return {
            "interval_s": round(self.interval_s, 3),
            "origin_bytes_per_s": round(self.origin_bytes_per_s, 1),
            "origin_requests_per_s": round(self.origin_requests_per_s, 3),
            "tier_bytes_per_s": round(self.tier_bytes_per_s, 1),
            "hits_per_s": round(self.hits_per_s, 3),
            "misses_per_s": round(self.misses_per_s, 3),
            "jobs": jobs,
        }


def rates_between(former: Page | None, page: Page) -> Rates | None:
    """Return the rates between two pages; None if they come from different daemons or the same moment."""
    if former is None or former["pid"] != page["pid"] or former["uptime_s"] >= page["uptime_s"]:
        return None
    interval_s = float(page["uptime_s"] - former["uptime_s"])

    def per_s(counter: str) -> float:
        new, old = (int(each["counters"].get(counter, 0)) for each in (page, former))
        return (new - old) / interval_s

    return Rates(
        interval_s,
        origin_bytes_per_s=per_s("origin_bytes"),
        origin_requests_per_s=per_s("origin_requests"),
        tier_bytes_per_s=per_s("tier_bytes"),
        hits_per_s=per_s("hits"),
        misses_per_s=per_s("misses"),
        waiting_share=_waiting_shares(former, page, interval_s),
    )


def job_key(job: Mapping[str, Any]) -> JobKey:
    """Return a job's unique key."""
    return job["name"], job["uid"]


def _waiting_shares(former: Page, page: Page, interval_s: float) -> dict[JobKey, float]:
    before_s = {job_key(job): job["waited_s"] for job in former["jobs"]}
    shares = {}
    for job in page["jobs"]:
        if job["sessions"]:
            waited_s = job["waited_s"] - before_s.get(job_key(job), 0.0)
            # Readers that joined or left in between make the sum inexact: keep the share between 0 and 1.
            shares[job_key(job)] = min(1.0, max(0.0, waited_s / (interval_s * job["sessions"])))
    return shares


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
            if _min_width(columns, _USUAL_NAME_COLUMNS) <= width:
                break
            del columns[heading]
        for_names = max(_MIN_NAME_COLUMNS, width - _min_width(columns, 0))
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


def _min_width(columns: Mapping[str, Sequence[Cell]], max_for_names: int) -> int:
    """Return the width of the columns with their gaps."""
    most = {"job": max_for_names, _ELASTIC: _MIN_ELASTIC_COLUMNS}
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
