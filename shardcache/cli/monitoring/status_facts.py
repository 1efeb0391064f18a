"""Facts about the daemon on the status page: its cache, disk, origin, limits, tier and leases.

`status_text` draws the facts above the jobs and transfers. A fact is a heading and a text. A fact
whose text is None is left out; a fact whose text is "" is a line without text.

The origin is the object stores. A lease is a reader's hold on a cached shard, which is not evicted
while the lease lasts. The tier is a cache that the nodes of a cluster share.
"""

from collections.abc import Iterator, Sequence

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardcache.cli.common import quantity
from shardcache.cli.monitoring.status_frame import Fields, StatusFrame
from shardcache.cluster.tier_config import expiry_warning
from shardcache.shared.exceptions import ShardcacheError
from shardcache.shared.units import duration, size

_CACHE_BAR_WIDTH = 40
# Counters of unusual events, with the words to show. The most important come first, since a narrow
# screen cuts the end of the line.
_UNUSUAL_EVENTS = {
    "corrupt": "corrupt",
    "refused": "refused",
    "evictions": "evictions",
    "refetches": "re-fetched",
    "retries": "retries",
    "paused": "parts paused",  # which gave their connection to a more urgent part
    "hedges": "hedged",  # parts that were requested a second time, since the first was late
}


def facts_table(frame: StatusFrame, *, is_cut: bool) -> Table:
    """Return a table of the facts.

    Args:
        frame: a status page, and its rates.
        is_cut: True to cut each fact to one line; False to wrap long facts.
    """
    page = frame.page
    rates = frame.rates
    cache = page["cache"]
    counters = page["counters"]
    facts: list[tuple[str | Text, str | Text | ProgressBar | None]] = [
        ("cache", str(cache["dir"])),
        ("", bar(cache["used_bytes"], cache["capacity_bytes"], _CACHE_BAR_WIDTH)),
        ("", _describe_space(cache)),
        ("pinned", _describe_pins(page.get("pins"))),
        (Text("disk", "red"), _describe_disk_problem(page)),
        ("origin", _describe_origin(counters, rates)),
        ("limits", _list_limits(page.get("limits", []))),
        ("tier", _describe_tier(page)),
        ("S3 endpoint", _describe_s3(page)),
        ("leases", _describe_leases(counters, rates)),
        ("bill", page.get("bill", {}).get("text")),
        ("since start", _list_unusual_events(counters)),
        ("scrub", _describe_scrub(page.get("scrub"))),
        (Text("daemon", "red"), _describe_error(frame.error)),
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


def _describe_error(error: ShardcacheError | None) -> Text | None:
    """Describe why the daemon does not answer; None if it answers."""
    if error is None:
        return None
    return Text(f"{error.message}; retrying", "red")


def _describe_space(cache: Fields) -> str:
    """Describe the space that the cache uses, and the free space on its disk."""
    texts = [
        f"{size(cache['used_bytes'])} of {size(cache['capacity_bytes'])}",
        quantity(cache["shards"], "shard"),
    ]
    words = {"leased_bytes": "leased", "reserved_bytes": "reserved", "parts_bytes": "in parts"}
    texts += [f"{size(cache[key])} {word}" for key, word in words.items() if cache.get(key)]
    if cache["free_bytes"] is not None:
        texts.append(f"{size(cache['free_bytes'])} free on disk")
    return " · ".join(texts)


def _describe_disk_problem(page: Fields) -> Text | None:
    """Describe the problem of the cache disk; None while the disk is healthy."""
    disk = page.get("disk")
    if not disk:
        return None
    error = disk["error"]
    if error:
        since = duration(disk["since_s"])
        return Text(f"{error['message']}, for {since}: {error['remedy']}", "red")
    short_bytes = disk.get("short_bytes")  # part of the capacity that other files have taken
    if short_bytes:
        limit = size(page["cache"]["capacity_bytes"] - short_bytes)
        return Text(f"other files on the disk limit the cache to {limit}", "yellow")
    return None


def _describe_pins(pins: Fields | None) -> str | None:
    """Describe the pinned shards; None if no shard is pinned."""
    if not pins or not pins["shards"]:
        return None
    shards = quantity(pins["shards"], "shard")
    if pins["missing"]:
        shards += f", {pins['missing']:,} of them missing"
    return f"{shards} · {size(pins['size_bytes'])} of at most {size(pins['limit_bytes'])}"


def _describe_origin(counters: Fields, rates: Fields | None) -> str:
    """Describe the bytes and requests of the origin, also per second if there are rates."""
    texts = []
    if rates:
        texts.append(speed(rates["origin_bytes_per_s"]))
        texts.append(f"{rates['origin_requests_per_s']:,.1f} requests/s")
    requests = quantity(counters["origin_requests"], "request")
    texts.append(f"{size(counters['origin_bytes'])} in {requests} since start")
    return " · ".join(texts)


def _list_limits(limits: Sequence[Fields]) -> Text | None:
    """List the limits: first, in yellow, those that now hold readers or transfers back."""
    if not limits:
        return None
    holding = [Text(limit["text"], "yellow") for limit in limits if limit["holds"]]
    others = [Text(limit["text"]) for limit in limits if not limit["holds"]]
    return Text(" · ").join([*holding, *others])


def _describe_tier(page: Fields) -> Text | None:
    """Describe the bytes that the cluster's tier delivered, and its problems; None without one."""
    if not page.get("tiers"):
        return None
    counters = page["counters"]
    requests = quantity(counters["tier_requests"], "request")
    delivered = f"{size(counters['tier_bytes'])} in {requests}"
    text = Text(delivered)
    if counters["tier_failures"]:
        text.append(f" · {counters['tier_failures']:,} failed")
    for tier in page["tiers"]:
        for problem in _tier_problems(tier):
            text.append(f" · {problem}", "red")
    return text


def _tier_problems(tier: Fields) -> Iterator[str]:
    """Yield each problem of a tier, in words."""
    if tier["failing"]:
        yield "failing, bypassed"
    if tier.get("stale"):
        yield "uses an old list of nodes: shardcache doctor says why"
    warning = expiry_warning(tier.get("certificate_expires_s"))
    if warning:
        yield warning


def _describe_s3(page: Fields) -> str | None:
    """Describe the bytes that S3 clients read; None if the daemon has no S3 endpoint."""
    if not page.get("s3"):
        return None
    counters = page["counters"]
    sent = f"{size(counters['s3_bytes'])} in {quantity(counters['s3_requests'], 'request')}"
    return f"{page['s3']} · {sent} since start"


def _describe_leases(counters: Fields, rates: Fields | None) -> str:
    """Describe the leases: hits, and misses, which had to wait for a transfer."""
    texts = []
    if rates:
        leases_per_s = rates["hits_per_s"] + rates["misses_per_s"]
        texts.append(f"{leases_per_s:,.1f}/s")
    hits = counters["hits"]
    misses = counters["misses"]
    hit_ratio = f" ({hits / (hits + misses):.0%})" if hits + misses else ""
    texts += [f"{hits:,} hits{hit_ratio}", f"{misses:,} misses"]
    return " · ".join(texts)


def _list_unusual_events(counters: Fields) -> str:
    """List the counters of `_UNUSUAL_EVENTS` that are not zero."""
    texts = [
        f"{words} {counters[name]:,}"
        for name, words in _UNUSUAL_EVENTS.items()
        if counters.get(name)
    ]
    return " · ".join(texts) or "nothing evicted, corrupt, refused or retried"


def _describe_scrub(scrub: Fields | None) -> str | None:
    """Describe the scrub, the slow check of all cached shards; None if it is switched off."""
    if not scrub or not scrub["rate_bytes_per_s"]:
        return None
    checked = f"{size(scrub['scrubbed_bytes'])} checked since start"
    if scrub["corrupt"]:
        checked += f", {scrub['corrupt']:,} corrupt"
    return f"{checked} · {scrub['round_share']:.0%} of this round"


def bar(done: float, total: float | None, width: int) -> ProgressBar | str:
    """Return a progress bar, `width` characters wide.

    Returns "" if the total is unknown, so that a line stays empty where the bar would be.
    """
    if not total:
        return ""
    return ProgressBar(total=total, completed=min(done, total), width=width)


def speed(bytes_per_s: float | None) -> str:
    """Return a rate as text; "" if it is unknown."""
    if bytes_per_s is None:
        return ""
    return f"{size(bytes_per_s)}/s"
