"""The status page as people see it: printed by `status`, and in frames by `top`.

A screen of limited height gets as many jobs and transfers as fit, each fact on one line; else
nothing is cut. Jobs have their names whole, and as many other columns as the width has room for.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, chop_cells
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardcache.cli.common import count, make_table, one_line
from shardcache.cluster.tier_config import expiry_warning
from shardcache.errors import ShardcacheError
from shardcache.shared.protocol import Json
from shardcache.shared.units import duration, size, user_name

Row = Mapping[str, Any]
Columns = dict[str, list[RenderableType]]

_BAR_COLUMNS = 12
# A narrower screen needs the columns of the transfers' bars for their names.
_BAR_FROM_COLUMNS = 100
# The first line, and for each of the two tables a blank line, its heading, and the number of rows
# that are left out.
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
# Columns that are left out, one after another, until the others fit. With all of them, a screen of
# 80 columns would have no space for `user`, `ahead` and `waiting now`.
_DISPENSABLE = ("waited", _BAR, "shards/s", "waits", "readers")
# Column that is made narrower rather than left out, down to this width.
_ELASTIC = "waiting now"
_MIN_ELASTIC_COLUMNS = 12
# For longer names no column is given up: they are folded, whatever the screen's width leaves them.
_USUAL_NAME_COLUMNS = 32
_MIN_NAME_COLUMNS = 16
# What a transfer's figures take at most.
_FIGURES_COLUMNS = 84
# A job that needs its next missing shard sooner than this is highlighted: it may have to wait.
_SOON_S = 10.0
_RATES = ("origin_bytes", "origin_requests", "tier_bytes", "hits", "misses")
# What matters most comes first: a narrow screen cuts the end.
_COUNTERS = {
    "corrupt": "corrupt",
    "refused": "refused",
    "evictions": "evictions",
    "refetches": "re-fetched",
    "retries": "retries",
    "paused": "parts paused",
    "hedges": "hedged",
}


@dataclass(frozen=True, slots=True)
class Moment:
    """The data of one frame.

    Attributes:
        page: the latest status page.
        rates: since the previous page; None without one.
        trouble: the reason that there is no newer page; None while the daemon answers.
    """

    page: Json
    rates: Json | None = None
    trouble: ShardcacheError | None = None

    def to_json(self) -> Json:
        """Return the JSON that `shardcache top --json` prints."""
        if self.trouble is not None:
            return {"error": self.trouble.to_json()}
        return self.page | {"rates": self.rates}


def rates_between(previous: Json, page: Json) -> Json | None:
    """Return the rates between two pages; None for different daemons or the same moment.

    `waiting_share` is, for each job with readers, the fraction of the interval in which these
    waited for data, 0 to 1.
    """
    if previous["pid"] != page["pid"] or previous["uptime_s"] >= page["uptime_s"]:
        return None
    interval_s = page["uptime_s"] - previous["uptime_s"]
    before = previous["counters"]
    now = page["counters"]
    rates = {}
    for name in _RATES:
        difference = now.get(name, 0) - before.get(name, 0)
        rates[f"{name}_per_s"] = round(difference / interval_s, 3)
    before_s = {_job_key(job): job["waited_s"] for job in previous["jobs"]}
    jobs = []
    for job in page["jobs"]:
        if not job["sessions"]:
            continue
        waited_s = job["waited_s"] - before_s.get(_job_key(job), 0.0)
        # Readers that joined or left in between make it inexact.
        share = min(1.0, max(0.0, waited_s / (interval_s * job["sessions"])))
        jobs.append({"name": job["name"], "uid": job["uid"], "waiting_share": round(share, 4)})
    return {"interval_s": round(interval_s, 3), **rates, "jobs": jobs}


def _job_key(job: Row) -> tuple[str, int]:
    return job["name"], job["uid"]


def draw(moment: Moment, width: int, height: int | None = None) -> RenderableType:
    """Return the page for a width, at most `height` lines of it if given."""
    page = moment.page
    is_cut = height is not None
    facts = _facts(moment, is_cut=is_cut)
    jobs = sorted(page["jobs"], key=_job_order)
    columns = _job_columns([job for job in jobs if job["sessions"]], moment.rates, width)
    idle = _idle_jobs([job for job in jobs if not job["sessions"]])
    transfers = sorted(page["transfers"], key=_transfer_order)
    # Jobs get half of the lines, and those that transfers do not need; transfers get the others.
    # Names may be folded into several lines: rich crops a frame that is too long because of that.
    lines = sys.maxsize
    if height is not None:
        lines = max(0, height - facts.row_count - _OTHER_LINES - len(idle))
    for_jobs = max(lines // 2, lines - len(transfers))
    for_transfers = lines - min(for_jobs, len(jobs))
    process = f" · pid {page['pid']} · up {duration(page['uptime_s'])}"
    return Group(
        Text.assemble((f"shardcache {page['version']}", "bold"), process),
        facts,
        *_list(columns, for_jobs, is_cut=is_cut),
        *idle,
        *_list(_transfer_columns(transfers, width, is_cut=is_cut), for_transfers, is_cut=is_cut),
    )


def _idle_jobs(jobs: Sequence[Row]) -> list[RenderableType]:
    """Return the line of the jobs without readers, if there are any."""
    if not jobs:
        return []
    names = ", ".join(job["name"] + _unmatched(job) for job in jobs)
    return [one_line(f"{count(len(jobs), 'job')} without readers: {names}", "dim")]


def _list(columns: Columns, max_rows: int, *, is_cut: bool) -> list[RenderableType]:
    """Return a table of the first rows below its heading; a last line counts those left out."""
    rows = list(zip(*columns.values(), strict=True))
    if not rows:
        return []
    table = make_table(*columns, numbers=_NUMBERS)
    for column in table.columns:
        column.no_wrap = is_cut and str(column.header) != _ELASTIC  # rich narrows this one alone
    for row in rows[:max_rows]:
        table.add_row(*row)
    hidden = len(rows) - max_rows
    if hidden > 0:
        return ["", table, Text(f"… and {hidden:,} more", "dim")]
    return ["", table]


# The facts about the daemon


def _facts(moment: Moment, *, is_cut: bool) -> Table:
    page = moment.page
    rates = moment.rates
    cache = page["cache"]
    counters = page["counters"]
    facts: list[tuple[str | Text, str | Text | ProgressBar | None]] = [
        ("cache", str(cache["dir"])),
        ("", _bar(cache["used_bytes"], cache["capacity_bytes"], 40)),
        ("", _fill(cache)),
        ("pinned", _pins(page.get("pins"))),
        (Text("disk", "red"), _disk(page)),
        ("origin", _origin(counters, rates)),
        ("limits", _limits(page.get("limits", []))),
        ("tier", _tier(page)),
        ("S3 endpoint", _s3(page)),
        ("leases", _leases(counters, rates)),
        ("bill", page.get("bill", {}).get("text")),
        ("since start", _troubles(counters)),
        ("scrub", _scrub(page.get("scrub"))),
        (Text("daemon", "red"), _error_of_daemon(moment.trouble)),
    ]
    table = Table.grid(padding=(0, 2))
    for heading, fact in facts:
        if fact is None:
            continue
        text = Text(fact) if isinstance(fact, str) else fact
        if is_cut and isinstance(text, Text):
            text.no_wrap = True
            text.overflow = "ellipsis"
        table.add_row(heading, text)
    return table


def _error_of_daemon(trouble: ShardcacheError | None) -> Text | None:
    if trouble is None:
        return None
    return Text(f"{trouble.message}; retrying", "red")


def _bar(done: float, total: float | None, width: int) -> ProgressBar | str:
    """Return a progress bar; empty if the total is unknown."""
    if not total:
        return ""
    return ProgressBar(total=total, completed=min(done, total), width=width)


def _fill(cache: Row) -> str:
    held = {"leased_bytes": "leased", "reserved_bytes": "reserved", "parts_bytes": "in parts"}
    parts = [
        f"{size(cache['used_bytes'])} of {size(cache['capacity_bytes'])}",
        count(cache["shards"], "shard"),
    ]
    parts += [f"{size(cache[key])} {what}" for key, what in held.items() if cache.get(key)]
    if cache["free_bytes"] is not None:
        parts.append(f"{size(cache['free_bytes'])} free on disk")
    return " · ".join(parts)


def _disk(page: Row) -> Text | None:
    """Describe what is wrong with the cache disk; None while it is healthy."""
    state = page.get("disk") or {"error": None}
    error = state["error"]
    if error:
        return Text(
            f"{error['message']}, for {duration(state['since_s'])}: {error['remedy']}",
            "red",
        )
    short_bytes = state.get("short_bytes")
    if short_bytes:
        limit = size(page["cache"]["capacity_bytes"] - short_bytes)
        return Text(f"other files on the disk limit the cache to {limit}", "yellow")
    return None


def _pins(state: Row | None) -> str | None:
    if not state or not state["shards"]:
        return None
    missing = f", {state['missing']:,} of them missing" if state["missing"] else ""
    held = f"{size(state['size_bytes'])} of at most {size(state['limit_bytes'])}"
    return f"{count(state['shards'], 'shard')}{missing} · {held}"


def _origin(counters: Row, rates: Row | None) -> str:
    parts = []
    if rates:
        parts.append(_speed(rates["origin_bytes_per_s"]))
        parts.append(f"{rates['origin_requests_per_s']:,.1f} requests/s")
    requests = count(counters["origin_requests"], "request")
    parts.append(f"{size(counters['origin_bytes'])} in {requests} since start")
    return " · ".join(parts)


def _limits(limits: Sequence[Row]) -> Text | None:
    """List the limits, first what holds readers or transfers back now."""
    ordered = sorted(limits, key=lambda limit: not limit["holds"])
    texts = [Text(limit["text"], "yellow" if limit["holds"] else "") for limit in ordered]
    return Text(" · ").join(texts) if texts else None


def _tier(page: Row) -> Text | None:
    """Describe what the cluster's tier delivered; None without a tier."""
    if not page.get("tiers"):
        return None
    counters = page["counters"]
    delivered = f"{size(counters['tier_bytes'])} in {count(counters['tier_requests'], 'request')}"
    failures = f" · {counters['tier_failures']:,} failed" if counters["tier_failures"] else ""
    found = [trouble for each in page["tiers"] for trouble in _tier_troubles(each)]
    return Text.assemble(delivered, failures, *((f" · {trouble}", "red") for trouble in found))


def _s3(page: Row) -> str | None:
    """Describe what S3 clients read; None without an endpoint."""
    if not page.get("s3"):
        return None
    counters = page["counters"]
    sent = f"{size(counters['s3_bytes'])} in {count(counters['s3_requests'], 'request')}"
    return f"{page['s3']} · {sent} since start"


def _tier_troubles(state: Row) -> Iterator[str]:
    if state["failing"]:
        yield "failing, bypassed"
    if state.get("stale"):
        yield "uses an old list of nodes: shardcache doctor says why"
    warning = expiry_warning(state.get("certificate_expires_s"))
    if warning:
        yield warning


def _leases(counters: Row, rates: Row | None) -> str:
    hits = counters["hits"]
    misses = counters["misses"]
    now = f"{rates['hits_per_s'] + rates['misses_per_s']:,.1f}/s · " if rates else ""
    ratio = f" ({hits / (hits + misses):.0%})" if hits + misses else ""
    return f"{now}{hits:,} hits{ratio} · {misses:,} misses"


def _troubles(counters: Row) -> str:
    """List the counters that may be worth a look, but for zeros."""
    counted = [f"{what} {counters[key]:,}" for key, what in _COUNTERS.items() if counters.get(key)]
    return " · ".join(counted) or "nothing evicted, corrupt, refused or retried"


def _scrub(state: Row | None) -> str | None:
    if not state or not state["rate_bytes_per_s"]:
        return None
    found = f", {state['corrupt']:,} corrupt" if state["corrupt"] else ""
    checked = f"{size(state['scrubbed_bytes'])} checked since start{found}"
    return f"{checked} · {state['round_share']:.0%} of this round"


# Jobs: waiting ones first, those without readers in a line below


def _job_order(job: Row) -> tuple[bool, float, str]:
    ahead_s = job.get("ahead_s")
    return not job.get("waiting"), math.inf if ahead_s is None else ahead_s, job["name"]


def _job_columns(jobs: Sequence[Row], rates: Row | None, width: int) -> Columns:
    """Return the columns that fit, by heading; the names are folded into lines."""
    recent = {_job_key(job): job["waiting_share"] for job in rates["jobs"]} if rates else {}
    columns: Columns = {
        "job": [Text(job["name"]) for job in jobs],
        "user": [one_line(user_name(job["uid"])) for job in jobs],
        "readers": [f"{job['sessions']:,}" for job in jobs],
        _BAR: [_bar(job["shards_done"], job["shards_planned"], _BAR_COLUMNS) for job in jobs],
        "shards read": [
            f"{job['shards_done']:,} of {job['shards_planned']:,}{_unmatched(job)}" for job in jobs
        ],
        "shards/s": [
            f"{job['shards_per_s']:.2g}" if job.get("shards_per_s") else "" for job in jobs
        ],
        "ahead": [ahead(job) for job in jobs],
        "waits": [_share(job.get("waiting_share", recent.get(_job_key(job)))) for job in jobs],
        "waited": [one_line(_waited(job)) for job in jobs],
        _ELASTIC: [one_line(_waiting_now(job)) for job in jobs],
    }
    dispensable = list(_DISPENSABLE)
    if not any(map(str, columns[_ELASTIC])):  # nobody waits
        dispensable.insert(0, _ELASTIC)
    for heading in dispensable:
        if _min_width(columns, _USUAL_NAME_COLUMNS) <= width:
            break
        del columns[heading]
    for_names = max(_MIN_NAME_COLUMNS, width - _min_width(columns, 0))
    return columns | {"job": [Text("\n".join(chop_cells(job["name"], for_names))) for job in jobs]}


def _share(waiting_share: float | None) -> str:
    return "" if waiting_share is None else f"{waiting_share:.0%}"


def _unmatched(job: Row) -> str:
    unmatched = job.get("samples_unmatched")
    if not unmatched:
        return ""
    return f" ({unmatched:,} samples unmatched)"


def _min_width(columns: Columns, max_for_names: int) -> int:
    """Return the least width that shows the columns, with their gaps.

    Args:
        max_for_names: width that the names of jobs take at most; longer ones are folded.
    """
    limits = {"job": max_for_names, _ELASTIC: _MIN_ELASTIC_COLUMNS}
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
    """Describe how long a job's readers waited, and for what: "2.5 s: network 2 s, disk 500 ms"."""
    causes = []
    for cause, waited_s in job.get("waited", {}).items():
        if waited_s > 0:
            causes.append(f"{cause.removesuffix('_s')} {duration(waited_s)}")
    waited = duration(job["waited_s"])
    return f"{waited}: {', '.join(causes)}" if causes else waited


def _waiting_now(job: Row) -> str:
    readers = job.get("waiting", 0)
    if not readers:
        return ""
    text = count(readers, "reader")
    if job.get("waiting_s"):
        text += f" for {duration(job['waiting_s'])}"
    if job["waiting_for"]:
        text += f": {job['waiting_for']}"
    return text


# Transfers: those being waited for first, then by when they are needed


def _transfer_order(transfer: Row) -> tuple[bool, bool, float, str]:
    needed_in_s = transfer.get("needed_in_s")
    needed_s = math.inf if needed_in_s is None else needed_in_s
    return transfer["class"] != "waiting", transfer["class"] == "warm", needed_s, transfer["url"]


def _transfer_columns(rows: Sequence[Row], width: int, *, is_cut: bool) -> Columns:
    # Urls differ at the end.
    room = max(_MIN_NAME_COLUMNS, width - _FIGURES_COLUMNS) if is_cut else sys.maxsize
    columns: Columns = {
        "transfer": [Text(_end_of(row["url"], room)) for row in rows],
        _BAR: [_bar(row["done_bytes"], row["total_bytes"], _BAR_COLUMNS) for row in rows],
        "bytes": [_extent(row) for row in rows],
        "rate": [_speed(row.get("rate_bytes_per_s")) for row in rows],
        "class": [one_line(row["class"]) for row in rows],
        "needed in": [_needed(row.get("needed_in_s")) for row in rows],
        "waiting": [f"{row['waiters']:,}" for row in rows],
    }
    if width < _BAR_FROM_COLUMNS:
        del columns[_BAR]
    return columns


def _end_of(url: str, max_chars: int) -> str:
    if len(url) <= max_chars:
        return url
    return f"…{url[1 - max_chars :]}"


def _extent(transfer: Row) -> str:
    total = size(transfer["total_bytes"]) if transfer["total_bytes"] else "?"
    return f"{size(transfer['done_bytes'])} of {total}"


def _needed(needed_in_s: float | None) -> str:
    if needed_in_s is None:  # no plan contains it
        return ""
    return duration(needed_in_s) if needed_in_s > 0 else "now"


def _speed(bytes_per_s: float | None) -> str:
    return "" if bytes_per_s is None else f"{size(bytes_per_s)}/s"
