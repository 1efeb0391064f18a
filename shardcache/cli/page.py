"""The status page as text, and the texts of its facts, which `top` shows too.

Fields that an older daemon does not report are left blank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardcache.cli.output import count, make_table, one_line
from shardcache.cluster.tier import expiry_warning
from shardcache.units import duration, size, user_name

Row = Mapping[str, Any]


# A job that needs its next missing shard sooner than this is highlighted: it may have to wait.
_SOON_S = 10.0

_HELD = {"leased_bytes": "leased", "reserved_bytes": "reserved"}
# What matters most comes first: a narrow screen cuts the end.
_COUNTERS = {
    "corrupt": "corrupt",
    "evictions": "evictions",
    "refetches": "re-fetched",
    "retries": "retries",
    "paused": "parts paused",
    "hedges": "hedged",
}


def bar(done: float, total: float | None, width: int = 40) -> ProgressBar | str:
    """Return a progress bar; empty if the total is unknown."""
    return ProgressBar(total=total, completed=min(done, total), width=width) if total else ""


def fill(cache: Row) -> str:
    """Describe how full the cache is, and with what."""
    parts = [f"{size(cache['used_bytes'])} of {size(cache['capacity_bytes'])}", count(cache["shards"], "shard")]
    parts += [f"{size(cache[key])} {what}" for key, what in _HELD.items() if cache.get(key)]
    return " · ".join(parts)


def free(cache: Row) -> str:
    """Describe the space that is left on the cache disk; empty if it is unknown."""
    return "" if cache["free_bytes"] is None else f"{size(cache['free_bytes'])} free on disk"


def disk(page: Row) -> Text | None:
    """Describe what is wrong with the cache disk; None while it is healthy."""
    state = page.get("disk") or {"error": None}
    if error := state["error"]:
        return Text(f"{error['message']}, for {duration(state['since_s'])}: {error['remedy']}", "red")
    if short_bytes := state.get("short_bytes"):
        limit = size(page["cache"]["capacity_bytes"] - short_bytes)
        return Text(f"other files on the disk limit the cache to {limit}", "yellow")
    return None


def retrying(page: Row) -> Text | None:
    """Describe the requests that are being repeated, by the latest error; None if there are none."""
    errors = [row["last_error"] for row in page["transfers"] if row.get("last_error")]
    return Text(f"{count(len(errors), 'transfer')} · {errors[0]}", "yellow") if errors else None


def pins(page: Row) -> str | None:
    """Describe how much is pinned; None if nothing is."""
    state = page.get("pins")
    if not state or not state["shards"]:
        return None
    missing = f", {state['missing']:,} of them missing" if state["missing"] else ""
    held = f"{size(state['size_bytes'])} of at most {size(state['limit_bytes'])}"
    return f"{count(state['shards'], 'shard')}{missing} · {held}"


def scrub(page: Row) -> str | None:
    """Describe the scrubber's progress; None if it is turned off."""
    state = page.get("scrub")
    if not state or not state["rate_bytes_per_s"]:
        return None
    found = f", {state['corrupt']:,} corrupt" if state["corrupt"] else ""
    return f"{size(state['scrubbed_bytes'])} checked since start{found} · {state['round_share']:.0%} of this round"


def troubles(counters: Row) -> str:
    """List the counters since start that may be worth a look, but for zeros."""
    counted = [f"{what} {counters[key]:,}" for key, what in _COUNTERS.items() if counters.get(key)]
    return " · ".join(counted) or "nothing evicted, corrupt or retried"


def tier(page: Row) -> Text | None:
    """Describe what the cluster's tier delivered; None without a tier."""
    if not page.get("tiers"):
        return None
    counters = page["counters"]
    delivered = f"{size(counters['tier_bytes'])} in {count(counters['tier_requests'], 'request')}"
    failures = f" · {counters['tier_failures']:,} failed" if counters["tier_failures"] else ""
    found = [trouble for each in page["tiers"] for trouble in _tier_troubles(each)]
    return Text.assemble(delivered, failures, *((f" · {trouble}", "red") for trouble in found))


def _tier_troubles(state: Row) -> Iterator[str]:
    if state["failing"]:
        yield "failing, bypassed"
    if state.get("stale"):
        yield "uses a former list of nodes: shardcache doctor has the reason"
    if warning := expiry_warning(state.get("certificate_expires_s")):
        yield warning


def leases(counters: Row) -> str:
    """Describe how many leases found their shard cached."""
    hits, misses = counters["hits"], counters["misses"]
    ratio = f" ({hits / (hits + misses):.0%})" if hits + misses else ""
    return f"{hits:,} hits{ratio} · {misses:,} misses"


def amount(transfer: Row) -> str:
    """Describe how much of a shard has arrived."""
    total = transfer["total_bytes"]
    return f"{size(transfer['done_bytes'])} of {size(total) if total else '?'}"


def speed(bytes_per_s: float | None) -> str:
    """Return `312.0 MB/s`."""
    return "" if bytes_per_s is None else f"{size(bytes_per_s)}/s"


def needed_in(transfer: Row) -> str:
    """Return the time until a shard is needed; empty if no plan contains it."""
    needed_in_s = transfer.get("needed_in_s")
    if needed_in_s is None:
        return ""
    return duration(needed_in_s) if needed_in_s > 0 else "now"


def user(job: Row) -> str:
    """Return the name of a job's user; the id if this node has no such user."""
    return user_name(job["uid"])


def progress(job: Row) -> str:
    """Describe how many shards of its plan a job has read."""
    return f"{job['shards_done']:,} of {job['shards_planned']:,}"


def pace(job: Row) -> str:
    """Return a job's shards per second as text."""
    return f"{job['shards_per_s']:.2g}" if job.get("shards_per_s") else ""


def ahead(job: Row) -> Text:
    """Return the time until a job needs a missing shard, coloured by urgency."""
    if "ahead_s" not in job or not job["sessions"]:
        return Text()
    ahead_s = job["ahead_s"]
    if ahead_s is None:
        return Text("all cached", "green")
    if ahead_s > 0:
        return Text(duration(ahead_s), "yellow" if ahead_s < _SOON_S else "green")
    return Text("0 s", "red" if job["waiting"] else "yellow")


def waited(job: Row) -> str:
    """Describe how long a job's readers waited, and for what: `2.5 s: network 2.0 s, disk 500 ms`."""
    causes = {cause.removesuffix("_s"): seconds for cause, seconds in job.get("waited", {}).items() if seconds > 0}
    parts = ", ".join(f"{cause} {duration(seconds)}" for cause, seconds in causes.items())
    return f"{duration(job['waited_s'])}{': ' if parts else ''}{parts}"


def waiting_now(job: Row) -> str:
    """Describe how many readers are waiting now, and for what."""
    readers = job.get("waiting", 0)
    if not readers:
        return ""
    return f"{count(readers, 'reader')}: {job['waiting_for']}" if job["waiting_for"] else count(readers, "reader")


def show_page(console: Console, page: Row) -> None:
    """Print a status page as returned by `GET /v1/status`."""
    console.print(headline(page))
    console.print()
    console.print(_facts(page))
    for block in (transfer_table(page["transfers"]), _jobs(page["jobs"])):
        if block.row_count:
            console.print()
            console.print(block)


def headline(page: Row) -> Text:
    """Return the line that identifies the daemon."""
    rest = f" · pid {page['pid']} · up {duration(page['uptime_s'])}"
    return Text.assemble((f"shardcache {page['version']}", "bold"), rest)


def _facts(page: Row) -> Table:
    cache, counters = page["cache"], page["counters"]
    facts = Table.grid(padding=(0, 2))
    facts.add_row("cache", Text(str(cache["dir"])))
    facts.add_row("", bar(cache["used_bytes"], cache["capacity_bytes"]))
    facts.add_row("", " · ".join(filter(None, (fill(cache), free(cache)))))
    if pinned := pins(page):
        facts.add_row("pinned", pinned)
    if trouble := disk(page):
        facts.add_row(Text("disk", "red"), trouble)
    facts.add_row("origin", f"{size(counters['origin_bytes'])} in {count(counters['origin_requests'], 'request')}")
    if trouble := retrying(page):
        facts.add_row(Text("retrying", "yellow"), trouble)
    if delivered := tier(page):
        facts.add_row("tier", delivered)
    facts.add_row("leases", leases(counters))
    facts.add_row("since start", troubles(counters))
    if checked := scrub(page):
        facts.add_row("scrub", checked)
    return facts


def transfer_table(rows: Sequence[Row], bar_columns: int = 40, url: Callable[[str], RenderableType] = Text) -> Table:
    """Return a table with one line per transfer; `url` renders its name; without columns for it, there is no bar."""
    numbers = ("bytes", "rate", "needed in", "waiting")
    bars = ("",) if bar_columns else ()
    table = make_table("transfer", *bars, "bytes", "rate", "class", "needed in", "waiting", numbers=numbers)
    for row in rows:
        done = [bar(row["done_bytes"], row["total_bytes"], bar_columns)] if bar_columns else []
        done.append(amount(row))
        rate, klass = speed(row.get("rate_bytes_per_s")), one_line(row["class"])
        table.add_row(url(row["url"]), *done, rate, klass, needed_in(row), f"{row['waiters']:,}")
    return table


def _jobs(rows: Sequence[Row]) -> Table:
    numbers = ("readers", "shards read", "shards/s", "ahead")
    table = make_table("job", "user", *numbers, "waited", "waiting now", numbers=numbers)
    for row in rows:
        who = Text(row["name"]), Text(user(row)), f"{row['sessions']:,}"
        times = ahead(row), waited(row), waiting_now(row)
        table.add_row(*who, progress(row), pace(row), *times)
    return table
