"""`shardcache index`: write down which shards a dataset has, and how many samples each holds."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import click

from shardcache import shardlist
from shardcache.cli.common import fail, json_option, print_events, socket_option
from shardcache.errors import ShardcacheError
from shardcache.protocol import ShardRef, from_here

Json = dict[str, Any]

_STDOUT = Path("-")
_SUFFIX = ".json"


def _place(_ctx: click.Context, _param: click.Parameter, path: Path) -> Path:
    """Refuse at once what could not be written, or found to be an index, after hours of reading."""
    if path == _STDOUT:
        return path
    if ":" in path.parts[0]:
        raise click.BadParameter("name a local file, and upload it with the store's own tool")
    if path.suffix != _SUFFIX:
        raise click.BadParameter(f"datasets know an index by its name: end it with {_SUFFIX}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise click.BadParameter(f"the folder {path.parent} does not exist, or you may not write there")
    return path


@click.command()
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    callback=_place,
    help="Where to write the index, a .json file; - for standard output.",
)
@click.option(
    "--relative-to",
    metavar="URL",
    help="Name the shards below this folder relative to it, for an index that will lie there.  [default: whole urls]",
)
@json_option
@socket_option
def index(urls: tuple[str, ...], output: Path, relative_to: str | None, as_json: bool, socket: Path | None) -> None:
    """Write an index of a dataset: each shard's samples, size and version.

    URL is a brace pattern (quote it), a glob, a prefix ending in "/", a single shard, or an index that may be out of
    date. Each shard is read once, through the cache, which may be smaller than the dataset; a shard whose count is
    known is not read. Put the file beside the shards, or anywhere, and use it as the dataset's url. When a shard
    fails, nothing is written.
    """
    if as_json and output == _STDOUT:
        raise click.UsageError("--json and -o - both print to standard output")
    shards = asyncio.run(_count([from_here(url) for url in urls], socket, output, as_json))
    if shards is None:
        fail()
    text = shardlist.write(shards, relative_to)
    if output == _STDOUT:
        click.echo(text, nl=False)
    else:
        _write(output.resolve(), text)


async def _count(urls: list[str], socket: Path | None, output: Path, as_json: bool) -> list[ShardRef] | None:
    """Return the shards in order, None when one failed."""
    from shardcache.cli.client import AdminClient

    found: dict[int, ShardRef] = {}
    async with (
        AdminClient(socket) as daemon,
        contextlib.aclosing(daemon.index(urls)) as events,
        contextlib.aclosing(_noted(events, found)) as noted,
    ):
        failed = await (print_events(noted) if as_json else _show_events(noted, output))
    return None if failed else [found[number] for number in sorted(found)]


async def _noted(events: AsyncIterator[Json], found: dict[int, ShardRef]) -> AsyncGenerator[Json, None]:
    """Yield the events; keep what they tell of each shard under its place in the list."""
    async for event in events:
        if event["event"] == "shard":
            found[event["number"]] = ShardRef(event["url"], event["version"], event["size_bytes"], event["samples"])
        yield event


async def _show_events(events: AsyncIterator[Json], output: Path) -> int:
    from shardcache.cli.output import count, follow, make_console
    from shardcache.units import size

    console = make_console(stderr=output == _STDOUT)
    done, failed = await follow(events, console, "counting")
    console.print(
        f"{count(done['shards'], 'shard')}, {count(done['samples'], 'sample')}: {done['fetched']:,} fetched, "
        f"{done['known']:,} known already, {done['failed']:,} failed; {size(done['origin_bytes'])} from the store"
    )
    if failed:
        console.print("no index is written: it would lack what failed")
    return failed


def _write(path: Path, text: str) -> None:
    """Put the whole file in its place at once. Raises ShardcacheError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as exn:
        raise ShardcacheError(
            f"the index cannot be written ({exn.strerror})",
            url=str(path),
            remedy="name another place with -o; what was counted is remembered, so that the next run reads nothing",
        ) from exn
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
