"""`shardcache status`: what this node's daemon holds, does and did."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardcache.cli.common import json_option, print_json, socket_option

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table


@click.command()
@json_option
@socket_option
def status(as_json: bool, socket: Path | None) -> None:
    """Show the daemon's cache, counters, transfers and jobs."""
    page = asyncio.run(_fetch(socket))
    if as_json:
        print_json(page)
    else:
        from shardcache.cli.output import make_console

        show_page(make_console(), page)


async def _fetch(socket: Path | None) -> dict[str, Any]:
    from shardcache.cli.client import AdminClient

    async with AdminClient(socket) as daemon:
        return await daemon.status()


def show_page(console: Console, page: dict[str, Any]) -> None:
    """Print what `GET /v1/status` answered."""
    from shardcache.cli.output import duration

    uptime = duration(page["uptime_s"])
    console.print(f"[bold]shardcache {page['version']}[/bold] · pid {page['pid']} · up {uptime}\n")
    console.print(_facts(page))
    for block in (_transfers(page["transfers"]), _jobs(page["jobs"])):
        if block.row_count:
            console.print()
            console.print(block)


def _facts(page: dict[str, Any]) -> Table:
    from rich.table import Table

    from shardcache.cli.output import count, size

    cache, counters = page["cache"], page["counters"]
    asked = counters["hits"] + counters["misses"]
    facts = Table.grid(padding=(0, 2))
    facts.add_row("cache", str(cache["dir"]))
    facts.add_row("", _bar(cache["used_bytes"], cache["capacity_bytes"]))
    used, capacity, free = (size(cache[key]) for key in ("used_bytes", "capacity_bytes", "free_bytes"))
    facts.add_row("", f"{used} of {capacity} · {count(cache['shards'], 'shard')} · {free} free on the disk")
    facts.add_row("store", f"{size(counters['origin_bytes'])} in {count(counters['origin_requests'], 'request')}")
    ready = f" ({counters['hits'] / asked:.0%})" if asked else ""
    facts.add_row("leases", f"{counters['hits']:,} at once{ready} · {counters['misses']:,} after a transfer")
    troubles = [f"{key} {counters[key]:,}" for key in ("evictions", "retries", "corrupt")]
    facts.add_row("since start", " · ".join(troubles))
    return facts


def _bar(done: float, total: float) -> RenderableType:
    from rich.progress_bar import ProgressBar

    return ProgressBar(total=max(total, 1), completed=done, width=40)


def _transfers(rows: list[dict[str, Any]]) -> Table:
    from shardcache.cli.output import make_table, size

    table = make_table("transfer", "", "bytes", "class", "waiting", numbers=("bytes", "waiting"))
    for row in rows:
        total = row["total_bytes"]
        amount = f"{size(row['done_bytes'])} of {size(total) if total else '?'}"
        bar = _bar(row["done_bytes"], total) if total else ""
        table.add_row(row["url"], bar, amount, row["class"], f"{row['waiters']:,}")
    return table


def _jobs(rows: list[dict[str, Any]]) -> Table:
    from shardcache.cli.output import duration, make_table

    numbers = ("uid", "readers", "shards read", "waited")
    table = make_table("job", *numbers, numbers=numbers)
    for row in rows:
        read = f"{row['shards_done']:,} of {row['shards_planned']:,}"
        table.add_row(row["name"], str(row["uid"]), f"{row['sessions']:,}", read, duration(row["stall_s"]))
    return table
