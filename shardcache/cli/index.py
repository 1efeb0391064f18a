"""`shardcache index`: write an index file with a dataset's shards and their sample counts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from shardcache import shardlist
from shardcache.cli.admin_client import AdminClient, Lines
from shardcache.cli.common import (
    carry_out,
    json_option,
    metadata_member,
    print_json,
    socket_option,
    token_member,
    urls_argument,
)
from shardcache.errors import ShardcacheError
from shardcache.protocol import ShardRef

if TYPE_CHECKING:
    from shardcache.tarindex import MetadataMember, TokenMember


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
@urls_argument
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
    type=token_member,
    help="Count tokens, too: those of .npy members with this extension, or of plain arrays (tok:uint16).",
)
@click.option(
    "--samples",
    "with_samples",
    is_flag=True,
    help="Also write a table of the samples, with their keys and sizes, beside it (.samples.tar): for select().",
)
@click.option(
    "--metadata",
    metavar="EXT[:FIELD,...]",
    type=metadata_member,
    help="Keep in that table the JSON object in the member with this extension, or these of its fields.",
)
@json_option
@socket_option
def index(
    urls: list[str],
    output: Path,
    relative_to: str | None,
    tokens: TokenMember | None,
    with_samples: bool,
    metadata: MetadataMember | None,
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
    if with_samples and output == _STDOUT:
        raise click.UsageError("--samples writes a second file beside the index: name a file with -o")
    if metadata is not None and not with_samples:
        raise click.UsageError("--metadata adds to the table of the samples: pass --samples, too")
    from shardcache.tarindex.contents import SUFFIX

    with _written(output.resolve().with_suffix(SUFFIX)) if with_samples else contextlib.nullcontext() as table:
        listed = None if table is None else _write_table(urls, socket, table, metadata, as_json)
        refs = _count(AdminClient(socket).index(urls, None if tokens is None else str(tokens)), as_json, output)
        if listed is not None:
            from shardcache.cli.sample_table import check_same

            check_same(listed, refs)
    text = shardlist.write(refs, relative_to)
    if output == _STDOUT:
        click.echo(text, nl=False)
        return
    with _written(output.resolve()) as file:
        file.write(text.encode())


def _count(events: Lines, as_json: bool, output: Path) -> list[ShardRef]:
    """Return the counted shards in the order of the list, once all are; exit 1 if one failed."""
    found: dict[int, ShardRef] = {}
    numbers = "{fetched:,} fetched, {known:,} already known, {failed:,} failed"
    carry_out(
        _noted(events, found),
        as_json,
        "counting",
        f"{{shards}}, {{samples}}: {numbers}; {{origin_bytes}} from the origin",
        otherwise="no index written: it would lack the failed shards",
        stderr=output == _STDOUT,
    )
    return [found[number] for number in sorted(found)]


def _write_table(
    patterns: list[str], socket: Path | None, file: IO[bytes], metadata: MetadataMember | None, as_json: bool
) -> list[ShardRef]:
    """Write the table of samples and show the progress; return the shards that it lists."""
    from shardcache.cli.output import ByteProgress, make_console
    from shardcache.cli.sample_table import write_table

    if as_json:
        return write_table(patterns, socket, file, metadata, print_json)
    with ByteProgress(make_console(), "listing samples") as bar:
        return write_table(patterns, socket, file, metadata, bar.update)


def _noted(events: Lines, found: dict[int, ShardRef]) -> Lines:
    """Yield the events; collect each shard in `found`, by its position in the list."""
    with contextlib.closing(events):
        for event in events:
            if event["event"] == "shard":
                facts = {name: event.get(name) for name in ("version", "size_bytes", "samples", "tokens")}
                found[event["number"]] = ShardRef(event["url"], **facts)
            yield event


@contextlib.contextmanager
def _written(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that appears under its name when the block ends: whole, or not at all.

    Raises ShardcacheError if it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("xb") as file:
            yield file
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
