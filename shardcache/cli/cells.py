"""How the facts of a status page read, each in a few words: what `status` and `top` share.

What an older daemon does not tell yet is left blank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.progress_bar import ProgressBar
from rich.text import Text

from shardcache.cli.output import count
from shardcache.units import duration, size

Row = Mapping[str, Any]

# A job whose next missing shard is needed sooner than this is shown as one that may have to wait.
_SOON_S = 10.0

_HELD = {"pinned_bytes": "in readers' hands", "arriving_bytes": "arriving"}
_COUNTERS = {
    "evictions": "evictions",
    "regrets": "needed again",
    "paused": "paused for a reader",
    "retries": "retries",
    "hedges": "asked twice",
    "corrupt": "corrupt",
}


def bar(done: float, total: float | None, width: int = 40) -> ProgressBar | str:
    """Return a bar; nothing where the end is not known."""
    return ProgressBar(total=total, completed=min(done, total), width=width) if total else ""


def fill(cache: Row) -> str:
    """Tell how full the cache is, and with what."""
    parts = [f"{size(cache['used_bytes'])} of {size(cache['capacity_bytes'])}", count(cache["shards"], "shard")]
    parts += [f"{size(cache[key])} {what}" for key, what in _HELD.items() if cache.get(key)]
    if cache["free_bytes"] is not None:
        parts.append(f"{size(cache['free_bytes'])} free on the disk")
    return " · ".join(parts)


def disk(page: Row) -> Text | None:
    """Tell what is wrong with the cache's disk; None while all is well."""
    state = page.get("disk") or {"error": None}
    if error := state["error"]:
        return Text(f"{error['message']}, for {duration(state['since_s'])}: {error['remedy']}", "red")
    if short_bytes := state.get("short_bytes"):
        return Text(f"{size(short_bytes)} less than --min-free are free, and nothing in the cache can go", "yellow")
    return None


def pins(page: Row) -> str | None:
    """Tell how much is pinned; None where nothing is."""
    state = page.get("pins")
    if not state or not state["shards"]:
        return None
    missing = f", {state['missing']:,} of them not here" if state["missing"] else ""
    held = f"{size(state['size_bytes'])} of at most {size(state['limit_bytes'])}"
    return f"{count(state['shards'], 'shard')}{missing} · {held}"


def scrub(page: Row) -> str | None:
    """Tell how far the reading again of all that is cached has come; None where that is turned off."""
    state = page.get("scrub")
    if not state or not state["rate_bytes_per_s"]:
        return None
    found = f", {state['damaged']:,} damaged" if state["damaged"] else ""
    return f"{size(state['scrubbed_bytes'])} read again since start{found} · {state['round_share']:.0%} of this round"


def troubles(counters: Row) -> str:
    """Tell what happened since start that somebody may want to look into."""
    return " · ".join(f"{what} {counters[key]:,}" for key, what in _COUNTERS.items() if key in counters)


def leases(counters: Row) -> str:
    """Tell how many leases found their shard here."""
    hits, misses = counters["hits"], counters["misses"]
    ratio = f" ({hits / (hits + misses):.0%})" if hits + misses else ""
    return f"{hits:,} at once{ratio} · {misses:,} after a transfer"


def amount(transfer: Row) -> str:
    """Tell how much of a shard has arrived."""
    total = transfer["total_bytes"]
    return f"{size(transfer['done_bytes'])} of {size(total) if total else '?'}"


def speed(bytes_per_s: float | None) -> str:
    """Return `312.0 MB/s`."""
    return "" if bytes_per_s is None else f"{size(bytes_per_s)}/s"


def needed_in(transfer: Row) -> str:
    """Tell when a shard is needed; nothing where nobody plans to read it."""
    needed_in_s = transfer.get("needed_in_s")
    if needed_in_s is None:
        return ""
    return duration(needed_in_s) if needed_in_s > 0 else "now"


def progress(job: Row) -> str:
    """Tell how many shards of its plan a job has read."""
    return f"{job['shards_done']:,} of {job['shards_planned']:,}"


def pace(job: Row) -> str:
    """Return a job's shards per second."""
    return f"{job['shards_per_s']:.2g}" if job.get("shards_per_s") else ""


def ahead(job: Row) -> Text:
    """Tell how long a job can read until it needs a shard that is not here; the colour tells how bad that is."""
    if "ahead_s" not in job or not job["sessions"]:
        return Text()
    ahead_s = job["ahead_s"]
    if ahead_s is None:
        return Text("all here", "green")
    if ahead_s > 0:
        return Text(duration(ahead_s), "yellow" if ahead_s < _SOON_S else "green")
    return Text("nothing", "red" if job["waiting"] else "yellow")


def waited(job: Row) -> str:
    """Tell how long a job's readers had nothing to read, and for what: `2.5 s: network 2.0 s, disk 500 ms`."""
    causes = {cause.removesuffix("_s"): seconds for cause, seconds in job.get("waited", {}).items() if seconds > 0}
    parts = ", ".join(f"{cause} {duration(seconds)}" for cause, seconds in causes.items())
    return f"{duration(job['stall_s'])}{': ' if parts else ''}{parts}"


def waiting_now(job: Row) -> str:
    """Tell how many readers wait now, and for what."""
    readers = job.get("waiting", 0)
    if not readers:
        return ""
    return f"{count(readers, 'reader')}: {job['waiting_for']}" if job["waiting_for"] else count(readers, "reader")
