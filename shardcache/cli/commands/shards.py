"""`shardcache ls` and `shardcache evict`: list and evict cached shards."""

from __future__ import annotations

import time
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any

import click

from shardcache.cli.common import ask, complete_path, fail, json_option, print_json, print_lines, socket_option, stream
from shardcache.protocol import from_here


@click.command()
@click.argument("prefix", default="")
@json_option
@socket_option
def ls(prefix: str, as_json: bool, socket: Path | None) -> None:
    """List the cached shards whose url starts with PREFIX.

    With --json, prints one line of JSON per shard.
    """
    stream(socket, lambda daemon: daemon.shards(prefix), print_lines if as_json else _show_shards)


def _show_shards(lines: Iterable[dict[str, Any]]) -> None:
    import humanize
    from rich.text import Text

    from shardcache.cli.display.output import make_console, make_table
    from shardcache.units import size

    numbers = ("size", "samples", "leases")
    rows = list(lines)
    table = make_table("url", *numbers, "pinned", "last used", numbers=numbers)
    now_s = time.time()
    for row in sorted(rows, key=itemgetter("url")):
        used = humanize.naturaltime(max(0.0, now_s - row["used_at_s"]))
        counts = (size(row["size_bytes"]), f"{row['samples']:,}", f"{row['leases']:,}")
        table.add_row(Text(row["url"]), *counts, "pinned" if row.get("pinned") else "", used)
    make_console().print(table)


@click.command()
@click.argument("urls", nargs=-1, required=True, metavar="URL...", shell_complete=complete_path)
@json_option
@socket_option
def evict(urls: tuple[str, ...], as_json: bool, socket: Path | None) -> None:
    """Evict shards from the cache; the object store is never modified.

    URL is a shard, a brace pattern, a glob or a prefix ending in "/", matched against the cached shards. Leased and
    pinned shards are kept. Exits 1 if a shard was kept or nothing matched.
    """
    answer = ask(socket, lambda daemon: daemon.evict([from_here(url) for url in urls]))
    if as_json:
        print_json(answer)
    else:
        _show_evicted(answer)
    if answer["kept"] or not answer["evicted"]:
        fail()


def _show_evicted(answer: dict[str, Any]) -> None:
    from shardcache.cli.display.output import count, make_console
    from shardcache.units import size

    console = make_console()
    if not answer["evicted"] and not answer["kept"]:
        console.print("no cached shard matches; see `shardcache ls`", markup=False)
        return
    for row in answer["kept"]:
        console.print(f"kept  {row['url']}: {row['reason']}", markup=False)
    console.print(f"{count(len(answer['evicted']), 'shard')} evicted, {size(answer['freed_bytes'])} freed")
