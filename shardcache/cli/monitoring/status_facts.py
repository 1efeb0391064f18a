"""Facts about the daemon on the status page: its cache, disk, origin, limits, tier and leases.

`status_text` draws the facts above the jobs and transfers. A fact is a heading and a text. A fact
whose text is None is left out; a fact whose text is "" is a line without text. A lease is a
reader's hold on a cached shard, which is not evicted while the lease lasts.
"""

from collections.abc import Iterator, Sequence

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardcache.cli.common import quantity
from shardcache.cli.monitoring.moment import Moment, Row
from shardcache.cluster.tier_config import expiry_warning
from shardcache.errors import ShardcacheError
from shardcache.shared.units import duration, size

_CACHE_BAR_COLUMNS = 40
# Counters of unusual events, with the words for them. The most important counters come first, since
# a narrow screen cuts the end of the line.
_COUNTERS = {
    "corrupt": "corrupt",
    "refused": "refused",
    "evictions": "evictions",
    "refetches": "re-fetched",
    "retries": "retries",
    "paused": "parts paused",
    "hedges": "hedged",
}


def facts_table(moment: Moment, *, is_cut: bool) -> Table:
    """Return a table of the facts that the page has.

    Args:
        moment: the data of the page.
        is_cut: True to cut each fact to one line.
    """
    page = moment.page
    rates = moment.rates
    cache = page["cache"]
    counters = page["counters"]
    facts: list[tuple[str | Text, str | Text | ProgressBar | None]] = [
        ("cache", str(cache["dir"])),
        ("", bar(cache["used_bytes"], cache["capacity_bytes"], _CACHE_BAR_COLUMNS)),
        ("", _used_space(cache)),
        ("pinned", _pins(page.get("pins"))),
        (Text("disk", "red"), _disk(page)),
        ("origin", _origin(counters, rates)),
        ("limits", _limits(page.get("limits", []))),
        ("tier", _tier(page)),
        ("S3 endpoint", _s3(page)),
        ("leases", _leases(counters, rates)),
        ("bill", page.get("bill", {}).get("text")),
        ("since start", _events(counters)),
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


def _used_space(cache: Row) -> str:
    """Describe the space that the cache uses, and the free space on its disk."""
    uses = {"leased_bytes": "leased", "reserved_bytes": "reserved", "parts_bytes": "in parts"}
    texts = [
        f"{size(cache['used_bytes'])} of {size(cache['capacity_bytes'])}",
        quantity(cache["shards"], "shard"),
    ]
    texts += [f"{size(cache[key])} {use}" for key, use in uses.items() if cache.get(key)]
    if cache["free_bytes"] is not None:
        texts.append(f"{size(cache['free_bytes'])} free on disk")
    return " · ".join(texts)


def _disk(page: Row) -> Text | None:
    """Describe the problem of the cache disk; None while the disk is healthy."""
    state = page.get("disk")
    if not state:
        return None
    error = state["error"]
    if error:
        return Text(
            f"{error['message']}, for {duration(state['since_s'])}: {error['remedy']}",
            "red",
        )
    short_bytes = state.get("short_bytes")  # part of the capacity that other files have taken
    if short_bytes:
        limit = size(page["cache"]["capacity_bytes"] - short_bytes)
        return Text(f"other files on the disk limit the cache to {limit}", "yellow")
    return None


def _pins(state: Row | None) -> str | None:
    """Describe the pinned shards; None if no shard is pinned."""
    if not state or not state["shards"]:
        return None
    missing = f", {state['missing']:,} of them missing" if state["missing"] else ""
    space = f"{size(state['size_bytes'])} of at most {size(state['limit_bytes'])}"
    return f"{quantity(state['shards'], 'shard')}{missing} · {space}"


def _origin(counters: Row, rates: Row | None) -> str:
    """Describe the bytes and requests of the origin, also per second if there are rates."""
    texts = []
    if rates:
        texts.append(speed(rates["origin_bytes_per_s"]))
        texts.append(f"{rates['origin_requests_per_s']:,.1f} requests/s")
    requests = quantity(counters["origin_requests"], "request")
    texts.append(f"{size(counters['origin_bytes'])} in {requests} since start")
    return " · ".join(texts)


def _limits(limits: Sequence[Row]) -> Text | None:
    """List the limits; first come the limits that hold readers or transfers back now."""
    ordered = sorted(limits, key=lambda limit: not limit["holds"])
    texts = [Text(limit["text"], "yellow" if limit["holds"] else "") for limit in ordered]
    return Text(" · ").join(texts) if texts else None


def _tier(page: Row) -> Text | None:
    """Describe the bytes that the cluster's tier delivered, and its problems; None without one."""
    if not page.get("tiers"):
        return None
    counters = page["counters"]
    requests = quantity(counters["tier_requests"], "request")
    delivered = f"{size(counters['tier_bytes'])} in {requests}"
    failures = f" · {counters['tier_failures']:,} failed" if counters["tier_failures"] else ""
    text = Text.assemble(delivered, failures)
    for tier in page["tiers"]:
        for trouble in _tier_troubles(tier):
            text.append(f" · {trouble}", "red")
    return text


def _tier_troubles(state: Row) -> Iterator[str]:
    """Yield each problem of a tier, in words."""
    if state["failing"]:
        yield "failing, bypassed"
    if state.get("stale"):
        yield "uses an old list of nodes: shardcache doctor says why"
    warning = expiry_warning(state.get("certificate_expires_s"))
    if warning:
        yield warning


def _s3(page: Row) -> str | None:
    """Describe the bytes that S3 clients read; None if the daemon has no S3 endpoint."""
    if not page.get("s3"):
        return None
    counters = page["counters"]
    sent = f"{size(counters['s3_bytes'])} in {quantity(counters['s3_requests'], 'request')}"
    return f"{page['s3']} · {sent} since start"


def _leases(counters: Row, rates: Row | None) -> str:
    """Describe the leases: hits, and misses, which had to wait for a transfer."""
    hits = counters["hits"]
    misses = counters["misses"]
    rate = f"{rates['hits_per_s'] + rates['misses_per_s']:,.1f}/s · " if rates else ""
    hit_ratio = f" ({hits / (hits + misses):.0%})" if hits + misses else ""
    return f"{rate}{hits:,} hits{hit_ratio} · {misses:,} misses"


def _events(counters: Row) -> str:
    """List the counters of `_COUNTERS` that are not zero."""
    texts = [f"{words} {counters[key]:,}" for key, words in _COUNTERS.items() if counters.get(key)]
    return " · ".join(texts) or "nothing evicted, corrupt, refused or retried"


def _scrub(state: Row | None) -> str | None:
    """Describe the scrub, the slow check of all cached shards; None if it is switched off."""
    if not state or not state["rate_bytes_per_s"]:
        return None
    corrupt = f", {state['corrupt']:,} corrupt" if state["corrupt"] else ""
    checked = f"{size(state['scrubbed_bytes'])} checked since start{corrupt}"
    return f"{checked} · {state['round_share']:.0%} of this round"


def bar(done: float, total: float | None, width: int) -> ProgressBar | str:
    """Return a progress bar of a width in columns.

    Returns "" if the total is unknown, so that a line stays empty where the bar would be.
    """
    if not total:
        return ""
    return ProgressBar(total=total, completed=min(done, total), width=width)


def speed(bytes_per_s: float | None) -> str:
    """Return a rate as text; empty if it is unknown."""
    return "" if bytes_per_s is None else f"{size(bytes_per_s)}/s"
