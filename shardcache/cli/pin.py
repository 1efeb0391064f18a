"""`shardcache pin` and `shardcache unpin`: what stays in the cache whatever is read."""

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
    """Fetch shards and have them stay until they are unpinned; without URL, list what is pinned.

    URL is what `warm` takes: a brace pattern (quote it), a glob, a prefix ending in "/", an index file or a single
    shard. Pins outlive the daemon. With --json, one line of JSON an event, or a pin. Ctrl-C stops the waiting: what is
    pinned by then stays pinned, and is kept whenever it comes.
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
    from shardcache.cli.output import count, follow, make_console
    from shardcache.units import size

    console = make_console()
    done, failed = await follow(events, console, "pinning", each_shard=True)
    pins = done["pins"]
    outcome = f"{done['fetched']:,} fetched, {done['cached']:,} already here; {failed:,} failed"
    console.print(f"{count(done['shards'] - failed, 'shard')} pinned: {outcome}")
    console.print(f"{size(pins['size_bytes'])} of at most {size(pins['limit_bytes'])} are pinned now")
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

    from shardcache.cli.output import make_console, make_table
    from shardcache.units import size

    table = make_table("url", "size", "in the cache", "by user", numbers=("size",))
    for row in sorted(rows, key=itemgetter("url")):
        users = ", ".join(map(str, row["uids"]))
        table.add_row(Text(row["url"]), size(row["size_bytes"]), "yes" if row["here"] else "not now", users)
    make_console().print(table if rows else "nothing is pinned")


@click.command()
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@json_option
@socket_option
def unpin(urls: tuple[str, ...], as_json: bool, socket: Path | None) -> None:
    """Let shards go again when their room is needed.

    URL is a shard, a brace pattern, a glob or a prefix ending in "/", matched against what is pinned. Yours are the
    pins that go; root and the daemon's own user take back everybody's. Exits 1 when one stayed or nothing matched.
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
    from shardcache.cli.output import count, make_console

    console = make_console()
    if not answer["unpinned"] and not answer["kept"]:
        console.print("nothing that is pinned matches; see `shardcache pin`", markup=False)
        return
    for row in answer["kept"]:
        console.print(f"kept  {row['url']}: {row['reason']}", markup=False)
    console.print(f"{count(len(answer['unpinned']), 'shard')} unpinned")
