"""The daemon's status as text, which `status` prints once and `top` draws in frames.

The text consists of facts about the daemon (`status_facts`), a table of jobs and a table of
transfers. `top` has a screen of limited height: each fact takes one line there, and only as many
jobs and transfers are shown as fit. `status` cuts nothing. Names of jobs are always shown whole;
other columns are left out if the width does not suffice. Widths are numbers of characters.
"""

import math
import sys
from collections.abc import Sequence

from rich.cells import cell_len, chop_cells
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.text import Text

from shardcache.cli.common import make_table, one_line, quantity
from shardcache.cli.monitoring.status_facts import bar, facts_table, speed
from shardcache.cli.monitoring.status_frame import Fields, StatusFrame, job_key
from shardcache.shared.units import duration, size, user_name

Columns = dict[str, list[RenderableType]]
"""The cells of a table, by the headings of its columns."""

_BAR_WIDTH = 12
# On a narrower screen, the transfers' bars make room for their names.
_MIN_WIDTH_FOR_BARS = 100
# Lines in addition to facts and rows: the first line, and three for each of the two tables (a blank
# line, the headings, and the number of rows that are left out).
_OTHER_LINES = 7
_GAP_WIDTH = 2  # between two columns
_BAR_COLUMN = ""  # heading of the column of progress bars
# Headings of the columns of numbers, which are aligned to the right.
_NUMBER_COLUMNS = (
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
# Headings of the columns that are left out, one after another, until the others fit. A screen 80
# wide has no space for these if it shows `user`, `ahead` and `waiting now`. If all columns stay,
# screens 80 and 100 wide show four jobs in eight lines instead of four, with cut headings, and six
# letters of what a job waits for.
_DISPENSABLE_COLUMNS = ("waited", _BAR_COLUMN, "shards/s", "waits", "readers")
# Heading of the column that is made narrower, down to a minimum width, rather than left out.
_ELASTIC_COLUMN = "waiting now"
_MIN_ELASTIC_WIDTH = 12
# Columns are left out to show names up to this width; longer names are folded.
_USUAL_NAME_WIDTH = 32
_MIN_NAME_WIDTH = 16
_FIGURES_WIDTH = 84  # maximum width of the columns of a transfer other than its url
# A job that needs its next missing shard sooner than this is highlighted: it may have to wait.
_SOON_S = 10.0


def draw(frame: StatusFrame, width: int, height: int | None = None) -> RenderableType:
    """Return the text for a screen.

    Args:
        frame: the data to show.
        width: width of the screen.
        height: maximum number of lines; None for any number.
    """
    page = frame.page
    is_cut = height is not None  # True if each fact and each row gets one line
    facts = facts_table(frame, is_cut=is_cut)
    jobs = sorted(page["jobs"], key=_job_order)
    jobs_with_readers = [job for job in jobs if job["sessions"]]
    job_columns = _job_columns(jobs_with_readers, frame.rates, width)
    idle_line = _idle_jobs([job for job in jobs if not job["sessions"]])
    transfers = sorted(page["transfers"], key=_transfer_order)
    transfer_columns = _transfer_columns(transfers, width, is_cut=is_cut)

    # Jobs get half of the lines, and in addition the lines that transfers do not need. Transfers
    # get the other lines. A name may be folded into several lines, so the text may still be too
    # long; rich then crops it.
    lines = sys.maxsize
    if height is not None:
        lines = max(0, height - facts.row_count - _OTHER_LINES - len(idle_line))
    job_lines = max(lines // 2, lines - len(transfers))
    transfer_lines = lines - min(job_lines, len(jobs_with_readers))

    process = f" · pid {page['pid']} · up {duration(page['uptime_s'])}"
    return Group(
        Text.assemble((f"shardcache {page['version']}", "bold"), process),
        facts,
        *_first_rows(job_columns, job_lines, is_cut=is_cut),
        *idle_line,
        *_first_rows(transfer_columns, transfer_lines, is_cut=is_cut),
    )


def _idle_jobs(jobs: Sequence[Fields]) -> list[RenderableType]:
    """Return a list with the line of the jobs without readers; empty if there are no such jobs."""
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
    table = make_table(*columns, numbers=_NUMBER_COLUMNS)
    for column in table.columns:
        # Rich makes only those columns narrower whose texts it may wrap.
        column.no_wrap = is_cut and str(column.header) != _ELASTIC_COLUMN
    for row in rows[:max_rows]:
        table.add_row(*row)
    hidden = len(rows) - max_rows
    if hidden > 0:
        return ["", table, Text(f"… and {hidden:,} more", "dim")]
    return ["", table]


# Jobs


def _job_order(job: Fields) -> tuple[bool, float, str]:
    """Return the key by which jobs are sorted: waiting jobs first, then the most urgent ones."""
    is_waiting = bool(job.get("waiting"))
    ahead_s = job.get("ahead_s")
    if ahead_s is None:
        ahead_s = math.inf
    return not is_waiting, ahead_s, job["name"]


def _job_columns(jobs: Sequence[Fields], rates: Fields | None, width: int) -> Columns:
    """Return the columns that fit into a width, by heading; long names are folded into lines."""
    # An older daemon does not state the jobs' `waiting_share`; it is in the rates then.
    shares_by_rates: dict[tuple[str, int], float] = {}
    if rates:
        shares_by_rates = {job_key(job): job["waiting_share"] for job in rates["jobs"]}
    waiting_shares = [job.get("waiting_share", shares_by_rates.get(job_key(job))) for job in jobs]
    columns: Columns = {
        "job": [Text(job["name"]) for job in jobs],
        "user": [one_line(user_name(job["uid"])) for job in jobs],
        "readers": [f"{job['sessions']:,}" for job in jobs],
        _BAR_COLUMN: [bar(job["shards_done"], job["shards_planned"], _BAR_WIDTH) for job in jobs],
        "shards read": [
            f"{job['shards_done']:,} of {job['shards_planned']:,}{_unmatched(job)}" for job in jobs
        ],
        "shards/s": [_shards_per_s(job) for job in jobs],
        "ahead": [time_ahead(job) for job in jobs],
        "waits": [_percentage(share) for share in waiting_shares],
        "waited": [one_line(_waited(job)) for job in jobs],
        _ELASTIC_COLUMN: [one_line(_waiting_now(job)) for job in jobs],
    }
    _drop_columns(columns, width)
    width_without_names = _min_width(columns, max_name_width=0)
    name_width = max(_MIN_NAME_WIDTH, width - width_without_names)
    columns["job"] = [Text("\n".join(chop_cells(job["name"], name_width))) for job in jobs]
    return columns


def _drop_columns(columns: Columns, width: int) -> None:
    """Remove dispensable columns of jobs until the others fit into a width."""
    dispensable = list(_DISPENSABLE_COLUMNS)
    is_any_waiting = any(map(str, columns[_ELASTIC_COLUMN]))
    if not is_any_waiting:
        dispensable.insert(0, _ELASTIC_COLUMN)
    for heading in dispensable:
        if _min_width(columns, _USUAL_NAME_WIDTH) <= width:
            break
        del columns[heading]


def _shards_per_s(job: Fields) -> str:
    """Return the rate at which a job reads shards; "" if it is unknown or 0."""
    if not job.get("shards_per_s"):
        return ""
    return f"{job['shards_per_s']:.2g}"


def _percentage(share: float | None) -> str:
    """Return a share as a percentage; "" if it is unknown."""
    if share is None:
        return ""
    return f"{share:.0%}"


def _unmatched(job: Fields) -> str:
    """Return a note on the samples of a job that a join did not match; "" if there are none."""
    unmatched = job.get("samples_unmatched")
    if not unmatched:
        return ""
    return f" ({unmatched:,} samples unmatched)"


def _min_width(columns: Columns, max_name_width: int) -> int:
    """Return the minimum width that shows the columns, with the gaps between them.

    Args:
        columns: the columns.
        max_name_width: maximum width of the names of jobs; longer names are folded.
    """
    max_widths = {"job": max_name_width, _ELASTIC_COLUMN: _MIN_ELASTIC_WIDTH}
    total = 0
    for heading, cells in columns.items():
        width = max(_cell_width(cell) for cell in (heading, *cells))
        total += min(width, max_widths.get(heading, width)) + _GAP_WIDTH
    return total - _GAP_WIDTH


def _cell_width(cell: RenderableType) -> int:
    if isinstance(cell, ProgressBar):
        return _BAR_WIDTH
    return cell_len(str(cell))


def time_ahead(job: Fields) -> Text:
    """Return the time until a job needs a missing shard, coloured by urgency."""
    if "ahead_s" not in job:
        return Text()
    ahead_s = job["ahead_s"]
    if ahead_s is None:
        if not job["shards_planned"]:
            return Text("no plan yet", "dim")
        return Text("all cached", "green")
    if ahead_s >= _SOON_S:
        return Text(duration(ahead_s), "green")
    if ahead_s > 0:
        return Text(duration(ahead_s), "yellow")
    return Text("0 s", "red" if job["waiting"] else "yellow")


def _waited(job: Fields) -> str:
    """Return a job's waiting time, and its causes: "2.5 s: network 2 s, disk 500 ms"."""
    causes = []
    for cause, waited_s in job.get("waited", {}).items():
        if waited_s > 0:
            causes.append(f"{cause.removesuffix('_s')} {duration(waited_s)}")
    waited = duration(job["waited_s"])
    if not causes:
        return waited
    return f"{waited}: {', '.join(causes)}"


def _waiting_now(job: Fields) -> str:
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


# Transfers


def _transfer_order(transfer: Fields) -> tuple[bool, bool, float, str]:
    """Return the key by which transfers are sorted.

    Transfers that a reader waits for come first, and transfers of `shardcache warm` last. In each
    group, they are sorted by when they are needed.
    """
    is_waited_for = transfer["class"] == "waiting"
    is_warming = transfer["class"] == "warm"
    needed_in_s = transfer.get("needed_in_s")
    if needed_in_s is None:
        needed_in_s = math.inf
    return not is_waited_for, is_warming, needed_in_s, transfer["url"]


def _transfer_columns(transfers: Sequence[Fields], width: int, *, is_cut: bool) -> Columns:
    """Return the columns that fit into a width, by heading; urls are cut if `is_cut`."""
    max_url_chars = sys.maxsize
    if is_cut:
        max_url_chars = max(_MIN_NAME_WIDTH, width - _FIGURES_WIDTH)
    columns: Columns = {
        "transfer": [Text(_end_of(each["url"], max_url_chars)) for each in transfers],
        _BAR_COLUMN: [
            bar(each["done_bytes"], each["total_bytes"], _BAR_WIDTH) for each in transfers
        ],
        "bytes": [_bytes_of_total(each) for each in transfers],
        "rate": [speed(each.get("rate_bytes_per_s")) for each in transfers],
        "class": [one_line(each["class"]) for each in transfers],
        "needed in": [_needed_in(each.get("needed_in_s")) for each in transfers],
        "waiting": [f"{each['waiters']:,}" for each in transfers],
    }
    if width < _MIN_WIDTH_FOR_BARS:
        del columns[_BAR_COLUMN]
    return columns


def _end_of(url: str, max_chars: int) -> str:
    """Cut a url to a length at its beginning, since the urls of a dataset differ at the end."""
    if len(url) <= max_chars:
        return url
    return f"…{url[1 - max_chars :]}"


def _bytes_of_total(transfer: Fields) -> str:
    total = size(transfer["total_bytes"]) if transfer["total_bytes"] else "?"
    return f"{size(transfer['done_bytes'])} of {total}"


def _needed_in(needed_in_s: float | None) -> str:
    """Return the time until a reader needs a transfer's shard; "" if no reader plans to read it."""
    if needed_in_s is None:
        return ""
    if needed_in_s <= 0:
        return "now"
    return duration(needed_in_s)
