"""The status page as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from shardcache.cli.display import cells
from shardcache.cli.display.output import count, make_table, one_line
from shardcache.units import duration, size

Row = Mapping[str, Any]


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
    facts.add_row("", cells.bar(cache["used_bytes"], cache["capacity_bytes"]))
    facts.add_row("", " · ".join(filter(None, (cells.fill(cache), cells.free(cache)))))
    if pins := cells.pins(page):
        facts.add_row("pinned", pins)
    if trouble := cells.disk(page):
        facts.add_row(Text("disk", "red"), trouble)
    facts.add_row("origin", f"{size(counters['origin_bytes'])} in {count(counters['origin_requests'], 'request')}")
    if trouble := cells.retrying(page):
        facts.add_row(Text("retrying", "yellow"), trouble)
    if tier := cells.tier(page):
        facts.add_row("tier", tier)
    facts.add_row("leases", cells.leases(counters))
    facts.add_row("since start", cells.troubles(counters))
    if scrub := cells.scrub(page):
        facts.add_row("scrub", scrub)
    return facts


def transfer_table(rows: Sequence[Row], bar_columns: int = 40, url: Callable[[str], RenderableType] = Text) -> Table:
    """Return a table with one line per transfer; `url` renders its name; without columns for it, there is no bar."""
    numbers = ("bytes", "rate", "needed in", "waiting")
    bars = ("",) if bar_columns else ()
    table = make_table("transfer", *bars, "bytes", "rate", "class", "needed in", "waiting", numbers=numbers)
    for row in rows:
        bar = [cells.bar(row["done_bytes"], row["total_bytes"], bar_columns)] if bar_columns else []
        done = *bar, cells.amount(row)
        rate, klass = cells.speed(row.get("rate_bytes_per_s")), one_line(row["class"])
        table.add_row(url(row["url"]), *done, rate, klass, cells.needed_in(row), f"{row['waiters']:,}")
    return table


def _jobs(rows: Sequence[Row]) -> Table:
    numbers = ("readers", "shards read", "shards/s", "ahead")
    table = make_table("job", "user", *numbers, "waited", "waiting now", numbers=numbers)
    for row in rows:
        who = Text(row["name"]), Text(cells.user(row)), f"{row['sessions']:,}"
        times = cells.ahead(row), cells.waited(row), cells.waiting_now(row)
        table.add_row(*who, cells.progress(row), cells.pace(row), *times)
    return table
