"""`shardcache index`: write an index file with a dataset's shards and their sample counts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import click

from shardcache import shardlist
from shardcache.cli.common import complete_path, fail, json_option, print_lines, socket_option, stream, token_member
from shardcache.errors import ShardcacheError
from shardcache.protocol import ShardRef, from_here
from shardcache.tarindex import TokenMember

Json = dict[str, Any]

_STDOUT = Path("-")
_SUFFIX = ".json"


def _place(_ctx: click.Context, _param: click.Parameter, path: Path) -> Path:
    """Reject an output path early that could not be written, or not be recognized as an index."""
    if path == _STDOUT:
        return path
    if ":" in path.parts[0]:
        raise click.BadParameter("name a local file, then upload it with the object store's own tool")
    if path.suffix != _SUFFIX:
        raise click.BadParameter(f"datasets recognize an index by its name: it must end in {_SUFFIX}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise click.BadParameter(f"the folder {path.parent} does not exist or is not writable")
    return path


@click.command()
@click.argument("urls", nargs=-1, required=True, metavar="URL...", shell_complete=complete_path)
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    callback=_place,
    help="The index file to write (.json); - for standard output.",
)
@click.option(
    "--relative-to",
    metavar="URL",
    help="Write shard names relative to this folder, for an index stored there.  [default: full urls]",
)
@click.option(
    "--tokens",
    metavar="EXT[:DTYPE]",
    callback=token_member,
    help="Count tokens, too: those of .npy members with this extension, or of plain arrays (tok:uint16).",
)
@json_option
@socket_option
def index(
    urls: tuple[str, ...],
    output: Path,
    relative_to: str | None,
    tokens: TokenMember | None,
    as_json: bool,
    socket: Path | None,
) -> None:
    """Write an index of a dataset: each shard's samples, size and version.

    URL is a brace pattern (quote it), a glob, a prefix ending in "/", a single shard, or an outdated index. Each shard
    is read once, through the cache, which may be smaller than the dataset; shards whose count is known are not read.
    Counts of tokens are not remembered: --tokens reads every shard. Store the file next to the shards, or anywhere, and
    use it as the dataset's url. If a shard fails, nothing is written.
    """
    if as_json and output == _STDOUT:
        raise click.UsageError("--json and -o - both print to standard output")
    found: dict[int, ShardRef] = {}
    member = None if tokens is None else str(tokens)
    failed = stream(
        socket,
        lambda daemon: _noted(daemon.index([from_here(url) for url in urls], member), found),
        print_lines if as_json else lambda events: _show_events(events, output),
    )
    if failed:
        fail()
    text = shardlist.write([found[number] for number in sorted(found)], relative_to)
    if output == _STDOUT:
        click.echo(text, nl=False)
    else:
        _write(output.resolve(), text)


async def _noted(events: AsyncGenerator[Json, None], found: dict[int, ShardRef]) -> AsyncGenerator[Json, None]:
    """Yield the events; collect each shard in `found`, by its position in the list."""
    async with contextlib.aclosing(events):
        async for event in events:
            if event["event"] == "shard":
                facts = {name: event.get(name) for name in ("version", "size_bytes", "samples", "tokens")}
                found[event["number"]] = ShardRef(event["url"], **facts)
            yield event


async def _show_events(events: AsyncIterator[Json], output: Path) -> int:
    from shardcache.cli.display.output import count, follow, make_console
    from shardcache.units import size

    console = make_console(stderr=output == _STDOUT)
    done, failed = await follow(events, console, "counting")
    console.print(
        f"{count(done['shards'], 'shard')}, {count(done['samples'], 'sample')}: {done['fetched']:,} fetched, "
        f"{done['known']:,} already known, {done['failed']:,} failed; {size(done['origin_bytes'])} from the origin"
    )
    if failed:
        console.print("no index written: it would lack the failed shards")
    return failed


def _write(path: Path, text: str) -> None:
    """Write the file atomically. Raises ShardcacheError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as exn:
        raise ShardcacheError(
            f"cannot write the index ({exn.strerror})",
            url=str(path),
            remedy="choose another path with -o; the counts are remembered, so the next run reads nothing",
        ) from exn
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
