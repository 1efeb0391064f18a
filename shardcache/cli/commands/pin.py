"""`shardcache pin` and `shardcache unpin`: protect shards from eviction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from operator import itemgetter
from pathlib import Path
from typing import Any

import click

from shardcache.cli.common import fail, json_option, print_events, print_json, socket_option
from shardcache.protocol import from_here


@click.command()
@click.argument("urls", nargs=-1, metavar="[URL...]")
@json_option
@socket_option
def pin(urls: tuple[str, ...], as_json: bool, socket: Path | None) -> None:
    """Fetch shards and keep them cached until they are unpinned; without URL, list the pinned shards.

    URL is a brace pattern (quote it), a glob, a prefix ending in "/", an index file or a single shard, as for `warm`.
    Pins survive a restart of the daemon. With --json, prints one line of JSON per event or pin. Ctrl-C stops waiting:
    shards pinned so far stay pinned, and are kept once they are fetched.
    """
    if asyncio.run(_pin([from_here(url) for url in urls], socket, as_json) if urls else _list(socket, as_json)):
        fail()


async def _pin(urls: list[str], socket: Path | None, as_json: bool) -> int:
    """Return how many shards failed."""
    from shardcache.cli.client import AdminClient

    show = print_events if as_json else _show_events
    async with AdminClient(socket) as daemon, aclosing(daemon.pin(urls)) as events:
        return await show(events)


async def _show_events(events: AsyncIterator[dict[str, Any]]) -> int:
    from shardcache.cli.display.output import count, follow, make_console
    from shardcache.units import size

    console = make_console()
    done, failed = await follow(events, console, "pinning", each_shard=True)
    pins = done["pins"]
    outcome = f"{done['fetched']:,} fetched, {done['cached']:,} already cached; {failed:,} failed"
    console.print(f"{count(done['shards'] - failed, 'shard')} pinned: {outcome}")
    console.print(f"{size(pins['size_bytes'])} of at most {size(pins['limit_bytes'])} pinned now")
    return failed


async def _list(socket: Path | None, as_json: bool) -> int:
    from shardcache.cli.client import AdminClient

    async with AdminClient(socket) as daemon, aclosing(daemon.pins()) as rows:
        if as_json:
            async for row in rows:
                print_json(row)
        else:
            _show_pins([row async for row in rows])
    return 0


def _show_pins(rows: list[dict[str, Any]]) -> None:
    from rich.text import Text

    from shardcache.cli.display.output import make_console, make_table
    from shardcache.units import size

    table = make_table("url", "size", "cached", "pinned by", numbers=("size",))
    for row in sorted(rows, key=itemgetter("url")):
        users = ", ".join(map(str, row["uids"]))
        table.add_row(Text(row["url"]), size(row["size_bytes"]), "yes" if row["cached"] else "no", users)
    make_console().print(table if rows else "no shards are pinned")


@click.command()
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@json_option
@socket_option
def unpin(urls: tuple[str, ...], as_json: bool, socket: Path | None) -> None:
    """Unpin shards, so that they may be evicted.

    URL is a shard, a brace pattern, a glob or a prefix ending in "/", matched against the pinned shards. Removes your
    own pins; root and the daemon's own user remove everybody's. Exits 1 if a shard stayed pinned or nothing matched.
    """
    answer = asyncio.run(_unpin([from_here(url) for url in urls], socket))
    if as_json:
        print_json(answer)
    else:
        _show_unpinned(answer)
    if answer["kept"] or not answer["unpinned"]:
        fail()


async def _unpin(urls: list[str], socket: Path | None) -> dict[str, Any]:
    from shardcache.cli.client import AdminClient

    async with AdminClient(socket) as daemon:
        return await daemon.unpin(urls)


def _show_unpinned(answer: dict[str, Any]) -> None:
    from shardcache.cli.display.output import count, make_console

    console = make_console()
    if not answer["unpinned"] and not answer["kept"]:
        console.print("no pinned shard matches; see `shardcache pin`", markup=False)
        return
    for row in answer["kept"]:
        console.print(f"kept  {row['url']}: {row['reason']}", markup=False)
    console.print(f"{count(len(answer['unpinned']), 'shard')} unpinned")
