"""`shardcache pin` and `shardcache unpin`: protect shards from eviction."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any

import click

from shardcache.cli.common import ask, complete_path, fail, json_option, print_json, print_lines, socket_option, stream
from shardcache.protocol import from_here


@click.command()
@click.argument("urls", nargs=-1, metavar="[URL...]", shell_complete=complete_path)
@json_option
@socket_option
def pin(urls: tuple[str, ...], as_json: bool, socket: Path | None) -> None:
    """Fetch shards and keep them cached until they are unpinned; without URL, list the pinned shards.

    URL is a brace pattern (quote it), a glob, a prefix ending in "/", an index file or a single shard, as for `warm`.
    Pins survive a restart of the daemon. With --json, prints one line of JSON per event or pin. Ctrl-C stops waiting:
    shards pinned so far stay pinned, and are kept once they are fetched.
    """
    if not urls:
        stream(socket, lambda daemon: daemon.pins(), print_lines if as_json else _show_pins)
        return
    wanted = [from_here(url) for url in urls]
    if stream(socket, lambda daemon: daemon.pin(wanted), print_lines if as_json else _show_events):
        fail()


def _show_events(events: Iterable[dict[str, Any]]) -> int:
    from shardcache.cli.display.output import count, follow, make_console
    from shardcache.units import size

    console = make_console()
    done, failed = follow(events, console, "pinning", each_shard=True)
    pins = done["pins"]
    outcome = f"{done['fetched']:,} fetched, {done['cached']:,} already cached; {failed:,} failed"
    console.print(f"{count(done['shards'] - failed, 'shard')} pinned: {outcome}")
    console.print(f"{size(pins['size_bytes'])} of at most {size(pins['limit_bytes'])} pinned now")
    return failed


def _show_pins(lines: Iterable[dict[str, Any]]) -> None:
    from rich.text import Text

    from shardcache.cli.display.output import make_console, make_table
    from shardcache.units import size, user_name

    rows = list(lines)
    table = make_table("url", "size", "cached", "pinned by", numbers=("size",))
    for row in sorted(rows, key=itemgetter("url")):
        users = ", ".join(map(user_name, row["uids"]))
        table.add_row(Text(row["url"]), size(row["size_bytes"]), "yes" if row["cached"] else "no", users)
    make_console().print(table if rows else "no shards are pinned")


@click.command()
@click.argument("urls", nargs=-1, required=True, metavar="URL...", shell_complete=complete_path)
@json_option
@socket_option
def unpin(urls: tuple[str, ...], as_json: bool, socket: Path | None) -> None:
    """Unpin shards, so that they may be evicted.

    URL is a shard, a brace pattern, a glob or a prefix ending in "/", matched against the pinned shards. Removes your
    own pins; root and the daemon's own user remove everybody's. Exits 1 if a shard stayed pinned or nothing matched.
    """
    answer = ask(socket, lambda daemon: daemon.unpin([from_here(url) for url in urls]))
    if as_json:
        print_json(answer)
    else:
        _show_unpinned(answer)
    if answer["kept"] or not answer["unpinned"]:
        fail()


def _show_unpinned(answer: dict[str, Any]) -> None:
    from shardcache.cli.display.output import count, make_console

    console = make_console()
    if not answer["unpinned"] and not answer["kept"]:
        console.print("no pinned shard matches; see `shardcache pin`", markup=False)
        return
    for row in answer["kept"]:
        console.print(f"kept  {row['url']}: {row['reason']}", markup=False)
    console.print(f"{count(len(answer['unpinned']), 'shard')} unpinned")
