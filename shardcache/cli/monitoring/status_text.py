"""The status page as text, which `status` prints once and `top` draws in frames.

The page consists of facts about the daemon (`status_facts`), a table of jobs and a table of
transfers. `top` has a screen of limited height: each fact takes one line there, and only as many
jobs and transfers are shown as fit. `status` cuts nothing. Names of jobs are always shown whole;
other columns are left out if the width does not suffice.
"""

import math
import sys
from collections.abc import Sequence

from rich.cells import cell_len, chop_cells
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.text import Text

from shardcache.cli.common import make_table, one_line, quantity
from shardcache.cli.monitoring.moment import Moment, Row, job_key
from shardcache.cli.monitoring.status_facts import bar, facts_table, speed
from shardcache.shared.units import duration, size, user_name

Columns = dict[str, list[RenderableType]]
"""The cells of a table, by the headings of its columns."""

_BAR_COLUMNS = 12
# On a screen of fewer columns than this, the transfers' bars make room for their names.
_BAR_FROM_COLUMNS = 100
# Lines besides facts and rows: the first line, and three for each of the two tables (a blank line,
# the headings, and the number of rows that are left out).
_OTHER_LINES = 7
_GAP_COLUMNS = 2
_BAR = ""  # heading of the column of progress bars
# Headings of the columns of numbers, which are aligned to the right.
_NUMBERS = (
    "readers",
    "shards read",
    "shards/s",
    "ahead",
    "waits",
    "bytes",
    "rate",
    "needed in",
    "waiting",
)
# Columns that are left out, one after another, until the others fit. A screen of 80 columns has no
# space for these if it shows `user`, `ahead` and `waiting now`.
_DISPENSABLE = ("waited", _BAR, "shards/s", "waits", "readers")
# The column that is made narrower, down to a minimum width, rather than left out.
_ELASTIC = "waiting now"
_MIN_ELASTIC_COLUMNS = 12
# Columns are left out to show names up to this width; longer names are folded.
_USUAL_NAME_COLUMNS = 32
_MIN_NAME_COLUMNS = 16
_FIGURES_COLUMNS = 84  # maximum width of a transfer's figures
# A job that needs its next missing shard sooner than this is highlighted: it may have to wait.
_SOON_S = 10.0


def draw(moment: Moment, width: int, height: int | None = None) -> RenderableType:
    """Return the page for a screen.

    Args:
        moment: the data of the page.
        width: width of the screen in columns.
        height: maximum number of lines; None for any number.
    """
    page = moment.page
    is_cut = height is not None
    facts = facts_table(moment, is_cut=is_cut)
    jobs = sorted(page["jobs"], key=_job_order)
    jobs_in_table = [job for job in jobs if job["sessions"]]
    job_columns = _job_columns(jobs_in_table, moment.rates, width)
    idle_line = _idle_jobs([job for job in jobs if not job["sessions"]])
    transfers = sorted(page["transfers"], key=_transfer_order)
    transfer_columns = _transfer_columns(transfers, width, is_cut=is_cut)
    # Jobs get half of the lines, and in addition the lines that transfers do not need. Transfers
    # get the other lines. A name may be folded into several lines, so the frame may still be too
    # long; rich then crops the frame.
    lines = sys.maxsize
    if height is not None:
        lines = max(0, height - facts.row_count - _OTHER_LINES - len(idle_line))
    job_lines = max(lines // 2, lines - len(transfers))
    transfer_lines = lines - min(job_lines, len(jobs_in_table))
    process = f" · pid {page['pid']} · up {duration(page['uptime_s'])}"
    return Group(
        Text.assemble((f"shardcache {page['version']}", "bold"), process),
        facts,
        *_first_rows(job_columns, job_lines, is_cut=is_cut),
        *idle_line,
        *_first_rows(transfer_columns, transfer_lines, is_cut=is_cut),
    )


def _idle_jobs(jobs: Sequence[Row]) -> list[RenderableType]:
    """Return the line of the jobs without readers, if there are any."""
    if not jobs:
        return []
    names = ", ".join(job["name"] + _unmatched(job) for job in jobs)
    return [one_line(f"{quantity(len(jobs), 'job')} without readers: {names}", "dim")]


def _first_rows(columns: Columns, max_rows: int, *, is_cut: bool) -> list[RenderableType]:
    """Return a blank line, a table of the first rows, and the number of rows left out, if any.

    Returns nothing if there are no rows.

    Args:
        columns: cells of all rows, by the headings of the columns.
        max_rows: maximum number of rows to show.
        is_cut: True to cut cells rather than to wrap them, except in the elastic column.
    """
    rows = list(zip(*columns.values(), strict=True))
    if not rows:
        return []
    table = make_table(*columns, numbers=_NUMBERS)
    for column in table.columns:
        # Rich makes only those columns narrower whose texts it may wrap.
        column.no_wrap = is_cut and str(column.header) != _ELASTIC
    for row in rows[:max_rows]:
        table.add_row(*row)
    hidden = len(rows) - max_rows
    if hidden > 0:
        return ["", table, Text(f"… and {hidden:,} more", "dim")]
    return ["", table]


# Jobs: waiting jobs come first; jobs without readers are listed in a line below the table


def _job_order(job: Row) -> tuple[bool, float, str]:
    """Return the key by which jobs are sorted: waiting jobs first, then the most urgent ones."""
    is_waiting = bool(job.get("waiting"))
    ahead_s = job.get("ahead_s")
    if ahead_s is None:
        ahead_s = math.inf
    return not is_waiting, ahead_s, job["name"]


def _job_columns(jobs: Sequence[Row], rates: Row | None, width: int) -> Columns:
    """Return the columns that fit into a width, by heading; long names are folded into lines."""
    # For pages whose jobs do not state their `waiting_share`.
    shares_by_rates: dict[tuple[str, int], float] = {}
    if rates:
        shares_by_rates = {job_key(job): job["waiting_share"] for job in rates["jobs"]}
    columns: Columns = {
        "job": [Text(job["name"]) for job in jobs],
        "user": [one_line(user_name(job["uid"])) for job in jobs],
        "readers": [f"{job['sessions']:,}" for job in jobs],
        _BAR: [bar(job["shards_done"], job["shards_planned"], _BAR_COLUMNS) for job in jobs],
        "shards read": [
            f"{job['shards_done']:,} of {job['shards_planned']:,}{_unmatched(job)}" for job in jobs
        ],
        "shards/s": [
            f"{job['shards_per_s']:.2g}" if job.get("shards_per_s") else "" for job in jobs
        ],
        "ahead": [ahead(job) for job in jobs],
        "waits": [
            _share(job.get("waiting_share", shares_by_rates.get(job_key(job)))) for job in jobs
        ],
        "waited": [one_line(_waited(job)) for job in jobs],
        _ELASTIC: [one_line(_waiting_now(job)) for job in jobs],
    }
    dispensable = list(_DISPENSABLE)
    if not any(map(str, columns[_ELASTIC])):  # the column is empty, as no reader waits
        dispensable.insert(0, _ELASTIC)
    for heading in dispensable:
        if _min_width(columns, _USUAL_NAME_COLUMNS) <= width:
            break
        del columns[heading]
    width_without_names = _min_width(columns, max_name_columns=0)
    name_columns = max(_MIN_NAME_COLUMNS, width - width_without_names)
    columns["job"] = [Text("\n".join(chop_cells(job["name"], name_columns))) for job in jobs]
    return columns


def _share(waiting_share: float | None) -> str:
    """Return a share as a percentage; "" if it is unknown."""
    return "" if waiting_share is None else f"{waiting_share:.0%}"


def _unmatched(job: Row) -> str:
    """Return a note on the samples of a job that a join did not match; "" if there are none."""
    unmatched = job.get("samples_unmatched")
    if not unmatched:
        return ""
    return f" ({unmatched:,} samples unmatched)"


def _min_width(columns: Columns, max_name_columns: int) -> int:
    """Return the minimum width that shows the columns, with their gaps.

    Args:
        columns: the columns.
        max_name_columns: maximum width of the names of jobs; longer names are folded.
    """
    limits = {"job": max_name_columns, _ELASTIC: _MIN_ELASTIC_COLUMNS}
    total = 0
    for heading, cells in columns.items():
        width = max(_cell_width(cell) for cell in (heading, *cells))
        total += min(width, limits.get(heading, width)) + _GAP_COLUMNS
    return total - _GAP_COLUMNS


def _cell_width(cell: RenderableType) -> int:
    if isinstance(cell, ProgressBar):
        return _BAR_COLUMNS
    return cell_len(str(cell))


def ahead(job: Row) -> Text:
    """Return the time until a job needs a missing shard, coloured by urgency."""
    if "ahead_s" not in job:
        return Text()
    ahead_s = job["ahead_s"]
    if ahead_s is None and not job["shards_planned"]:
        return Text("no plan yet", "dim")
    if ahead_s is None:
        return Text("all cached", "green")
    if ahead_s > 0:
        return Text(duration(ahead_s), "yellow" if ahead_s < _SOON_S else "green")
    return Text("0 s", "red" if job["waiting"] else "yellow")


def _waited(job: Row) -> str:
    """Return a job's waiting time, and its causes: "2.5 s: network 2 s, disk 500 ms"."""
    causes = []
    for cause, waited_s in job.get("waited", {}).items():
        if waited_s > 0:
            causes.append(f"{cause.removesuffix('_s')} {duration(waited_s)}")
    waited = duration(job["waited_s"])
    return f"{waited}: {', '.join(causes)}" if causes else waited


def _waiting_now(job: Row) -> str:
    """Describe the readers of a job that wait now: number, time and reason; "" if none waits."""
    readers = job.get("waiting", 0)
    if not readers:
        return ""
    text = quantity(readers, "reader")
    if job.get("waiting_s"):
        text += f" for {duration(job['waiting_s'])}"
    if job["waiting_for"]:
        text += f": {job['waiting_for']}"
    return text


# Transfers: first the transfers that readers wait for, then the others by when they are needed


def _transfer_order(transfer: Row) -> tuple[bool, bool, float, str]:
    """Return the key by which transfers are sorted.

    Transfers that a reader waits for come first, and transfers of `shardcache warm` last.
    """
    is_waited_for = transfer["class"] == "waiting"
    is_warming = transfer["class"] == "warm"
    needed_in_s = transfer.get("needed_in_s")
    if needed_in_s is None:
        needed_in_s = math.inf
    return not is_waited_for, is_warming, needed_in_s, transfer["url"]


def _transfer_columns(rows: Sequence[Row], width: int, *, is_cut: bool) -> Columns:
    """Return the columns of transfers, by heading; urls are cut if `is_cut`."""
    max_url_chars = sys.maxsize
    if is_cut:
        max_url_chars = max(_MIN_NAME_COLUMNS, width - _FIGURES_COLUMNS)
    columns: Columns = {
        "transfer": [Text(_end_of(row["url"], max_url_chars)) for row in rows],
        _BAR: [bar(row["done_bytes"], row["total_bytes"], _BAR_COLUMNS) for row in rows],
        "bytes": [_bytes_of_total(row) for row in rows],
        "rate": [speed(row.get("rate_bytes_per_s")) for row in rows],
        "class": [one_line(row["class"]) for row in rows],
        "needed in": [_needed(row.get("needed_in_s")) for row in rows],
        "waiting": [f"{row['waiters']:,}" for row in rows],
    }
    if width < _BAR_FROM_COLUMNS:
        del columns[_BAR]
    return columns


def _end_of(url: str, max_chars: int) -> str:
    """Cut a url to a length at its beginning, since the urls of a dataset differ at the end."""
    if len(url) <= max_chars:
        return url
    return f"…{url[1 - max_chars :]}"


def _bytes_of_total(transfer: Row) -> str:
    total = size(transfer["total_bytes"]) if transfer["total_bytes"] else "?"
    return f"{size(transfer['done_bytes'])} of {total}"


def _needed(needed_in_s: float | None) -> str:
    """Return the time until a reader needs a transfer's shard; "" if no reader plans to read it."""
    if needed_in_s is None:  # the shard is in no reader's plan
        return ""
    return duration(needed_in_s) if needed_in_s > 0 else "now"
