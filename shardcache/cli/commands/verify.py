"""`shardcache verify`: check cached shards against their checksums."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from shardcache.cli.common import fail, json_option, print_lines, socket_option, stream


@click.command()
@click.argument("prefix", default="")
@json_option
@socket_option
def verify(prefix: str, as_json: bool, socket: Path | None) -> None:
    """Read every cached shard and check it against its checksums.

    With PREFIX, checks only the shards whose url starts with it. A corrupt shard is quarantined, and re-fetched when it
    is needed next. Exits 1 if one was found. With --json, prints one line of JSON per event.
    """
    if stream(socket, lambda daemon: daemon.verify(prefix), print_lines if as_json else _show_events):
        fail()


def _show_events(events: Iterable[dict[str, Any]]) -> int:
    from shardcache.cli.display.output import ByteProgress, FailureList, count, make_console
    from shardcache.units import size

    console = make_console()
    failures = FailureList(console)
    with ByteProgress(console, "verifying") as bar:
        for event in events:
            match event["event"]:
                case "start" | "progress":
                    bar.update(event)
                case "shard" if not event["ok"]:
                    failures.add(event["error"], url=event["url"])
                case "done":
                    done = event
    failures.explain()
    console.print(f"{count(done['shards'], 'shard')} verified ({size(done['bytes'])}), {done['corrupt']:,} corrupt")
    return len(failures)
