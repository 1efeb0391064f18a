"""`shardcache warm`: fetch shards into the cache ahead of time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from shardcache.cli.common import complete_path, fail, json_option, print_lines, socket_option, stream
from shardcache.protocol import from_here


@click.command()
@click.argument("urls", nargs=-1, required=True, metavar="URL...", shell_complete=complete_path)
@json_option
@socket_option
def warm(urls: tuple[str, ...], as_json: bool, socket: Path | None) -> None:
    """Fetch shards into the cache, and wait until they are cached.

    URL is a brace pattern (quote it), a glob, a prefix ending in "/", an index file or a single shard. With --json,
    prints one line of JSON per event. Ctrl-C stops waiting.
    """
    wanted = [from_here(url) for url in urls]
    if stream(socket, lambda daemon: daemon.warm(wanted), print_lines if as_json else _show_events):
        fail()


def _show_events(events: Iterable[dict[str, Any]]) -> int:
    from shardcache.cli.display.output import count, follow, make_console
    from shardcache.units import size

    console = make_console()
    done, failed = follow(events, console, "warming", each_shard=True)
    console.print(
        f"{count(done['shards'], 'shard')}: {done['fetched']:,} fetched, {done['cached']:,} already cached, "
        f"{done['failed']:,} failed; {size(done['origin_bytes'])} from the origin"
    )
    return failed
