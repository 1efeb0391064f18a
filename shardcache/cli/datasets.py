"""`shardcache write` and `shardcache index`: datasets as shards, and the index files of datasets."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shardcache import shardlist
from shardcache.cli import common
from shardcache.cli.admin_client import AdminClient, Lines
from shardcache.errors import ConfigError
from shardcache.protocol import Json, ShardRef, from_here, local_path
from shardcache.units import size
from shardcache.url_names import INDEX_SUFFIX, beside_index, is_index

if TYPE_CHECKING:
    from shardcache.tarindex.contents import MetadataMember, TokenMember
    from shardcache.writing.writer import Destination

T = TypeVar("T")

_STDOUT = "-"
_MAX_WORKERS = 8
_DECODERS = dict.fromkeys(("jpg", "jpeg", "png", "webp", "gif", "bmp", "tiff"), "rgb8") | {
    **{"cls": "int", "json": "json", "npy": "npy", "txt": "text"}
}


def _place(_ctx: click.Context, _param: click.Parameter, output: str) -> str:
    """Reject an output early that could not be written, or not be recognized as an index."""
    if output == _STDOUT:
        return output
    if not is_index(output):
        raise click.BadParameter(f"datasets recognize an index by its name: it must end in {INDEX_SUFFIX}")
    place = from_here(output)
    if (path := local_path(place)) and not os.access(folder := Path(path).parent, os.W_OK | os.X_OK):
        raise click.BadParameter(f"the folder {folder} does not exist or is not writable")
    return place


def _member(kind: str) -> Callable[[str], Any]:
    """Return the parser of an option that names a member of samples: a TokenMember or a MetadataMember."""

    def parse(text: str) -> Any:
        from shardcache.tarindex import contents

        try:
            return getattr(contents, kind).parse(text)
        except ConfigError as exn:
            raise click.BadParameter(f"{exn.message}; {exn.remedy}") from exn

    return parse


_tokens_option = partial(click.option, "--tokens", metavar="EXT[:DTYPE]", type=_member("TokenMember"))


@common.examples(
    "index s3://bucket/val/ -o index.json", "index s3://bucket/train/ -o s3://bucket/train/all.json --samples"
)
@click.command()
@common.urls_argument
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FILE",
    callback=_place,
    shell_complete=common.complete_path,
    help="The index to write (.json): a file, or a url of a store; - for standard output.",
)
@click.option("--relative-to", metavar="URL", help="Write names relative to this folder.  [default: full urls]")
@_tokens_option(help="Count tokens, too: those of .npy members with this extension, or of plain arrays (tok:uint16).")
@click.option("--samples", "with_samples", is_flag=True, help="Write the table of samples for select(), too.")
@click.option(
    "--metadata",
    metavar="EXT[:FIELD,...]",
    type=_member("MetadataMember"),
    help="Keep in that table the JSON object in the member with this extension, or these of its fields.",
)
@common.query_options
def index(
    urls: tuple[str, ...],
    output: str,
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
    Counts of tokens are not remembered: --tokens reads every shard. Write it next to the shards, or anywhere, and use
    it as the dataset's url. If a shard fails, nothing is written; nor over an index that was changed meanwhile, if the
    store can tell (S3). A store is written to with this user's credentials.
    """
    if as_json and output == _STDOUT:
        raise click.UsageError("--json and -o - both print to standard output")
    if with_samples and output == _STDOUT:
        raise click.UsageError("--samples writes a second file beside the index: name a file with -o")
    if metadata is not None and not with_samples:
        raise click.UsageError("--metadata adds to the table of the samples: pass --samples, too")
    import asyncio

    from shardcache.tarindex.contents import SUFFIX

    before = None if output == _STDOUT else asyncio.run(_at(output, lambda place, name: place.version(name)))
    with tempfile.TemporaryDirectory(prefix="shardcache-index-") as folder:
        table, file = Path(folder, "table"), Path(folder, "index.json")
        listed = None
        if with_samples:
            from shardcache.cli.sample_table import check_same, write_table

            with table.open("wb") as rows, common.byte_progress(common.make_console(), "listing samples") as show:
                listed = write_table(urls, socket, rows, metadata, common.print_json if as_json else show)
        refs = _count(AdminClient(socket).index(urls, None if tokens is None else str(tokens)), as_json, output)
        if listed is not None:
            check_same(listed, refs)
        file.write_text(shardlist.write(refs, relative_to))
        if output == _STDOUT:
            click.echo(file.read_text(), nl=False)
            return
        if listed is not None:
            to = beside_index(output, SUFFIX)
            asyncio.run(_at(to, lambda place, name: place.store_file(table, name)))
        asyncio.run(_at(output, lambda place, name: place.store_file(file, name, before)))


def _count(events: Lines, as_json: bool, output: str) -> list[ShardRef]:
    """Return the counted shards in the order of the list, once all are; exit 1 if one failed."""
    found: dict[int, ShardRef] = {}
    numbers = "{fetched:,} fetched, {known:,} already known, {failed:,} failed"
    common.carry_out(
        _noted(events, found),
        as_json,
        "counting",
        f"{{shards}}, {{samples}}: {numbers}; {{origin_bytes}} from the origin",
        otherwise="no index written: it would lack the failed shards",
        stderr=output == _STDOUT,
    )
    return [found[number] for number in sorted(found)]


def _noted(events: Lines, found: dict[int, ShardRef]) -> Lines:
    """Yield the events; collect each shard in `found`, by its position in the list."""
    with contextlib.closing(events):
        for event in events:
            if event["event"] == "shard":
                facts = (event.get(name) for name in ("version", "size_bytes", "samples", "tokens"))
                found[event["number"]] = ShardRef._make((event["url"], *facts, False))
            yield event


async def _at(output: str, work: Callable[[Destination, str], Awaitable[T]]) -> T:
    """Call `work` with the folder or prefix of an output, and its name there. Raises the errors of a destination."""
    from shardcache.config import Settings
    from shardcache.writing.writer import Destination

    folder, _, name = output.rpartition("/")
    async with Destination(folder or "/", Settings.load({}).origin) as destination:
        return await work(destination, name)


# Shards from other formats


def _columns(_ctx: click.Context, _param: click.Parameter, text: str | None) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",")] if text else []
    if any(not name or not extension for name, _, extension in pairs):
        raise click.BadParameter("write COLUMN=EXTENSION,COLUMN=EXTENSION, such as image=jpg,label=cls")
    return {name: extension for name, _, extension in pairs}


def _sources(ctx: click.Context, _param: click.Parameter, sources: tuple[str, ...]) -> tuple[str, ...]:
    """Reject a command that lacks a place: click gives the only one to the destination."""
    if not sources:
        raise click.UsageError(
            "Missing argument 'DESTINATION': name sources, then the folder or url of the shards", ctx
        )
    return sources


@common.examples("write photos/ s3://bucket/train/ --classes --shuffle 7", "write lines.jsonl text/ --pack --workers 8")
@click.command(context_settings={"show_default": True})
@click.argument("sources", nargs=-1, callback=_sources, metavar="SOURCE...")
@click.argument("destination", required=False, metavar="DESTINATION")
@click.option(
    "--shard-size",
    "shard_size_bytes",
    default="256MiB",
    type=common.parse_size,
    metavar="SIZE",
    help="Most bytes of a shard.",
)
@click.option("--names", default="shard-%06d.tar", metavar="PATTERN", help="Names of the shards, by number.")
@click.option("--workers", type=click.IntRange(1, 256), help="Processes.  [default: one per CPU, at most 8]")
@click.option("--shuffle", type=int, metavar="SEED", help="Write files or rows in random order; not for JSONL.")
@click.option(
    "--key-at",
    type=click.Choice(["first-dot", "last-dot"]),
    help="Folders: where a file's key ends; the last dot leaves underscores for others.  [default: the first, but an "
    "error for files such as 22.05.png and 22.06.png]",
)
@click.option("--classes", is_flag=True, help="Folders: add the number of each file's first-level folder as cls.")
@click.option(
    "--columns",
    metavar="COLUMN=EXT,...",
    callback=_columns,
    help="Tables: the columns to write, and their extensions.  [default: all, as COLUMN.txt and so on]",
)
@click.option("--split", metavar="NAME", help="Hugging Face: the split, if there are several.")
@click.option(
    "--field", metavar="NAME", help="JSONL: write this text of each line as txt.  [default: the whole line as json]"
)
@click.option("--pack", is_flag=True, help="JSONL: write many lines per member, which shardcache alone reads.")
@_tokens_option(
    help="Count the tokens of .npy members with this extension, or of plain arrays (tok:uint16), for the index."
)
@click.option(
    "--config",
    type=click.Path(path_type=Path, readable=False),
    help="TOML file with [[origin]] tables.  [default: the daemon's]",
)
@common.json_option
def write(
    sources: tuple[str, ...],
    destination: str,
    names: str,
    workers: int | None,
    config: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Write a dataset as tar shards, with an index of their samples.

    SOURCE is folders, .parquet files, .jsonl files (also compressed), or a Hugging Face dataset: hf:NAME, or the folder
    of a saved one. DESTINATION is a folder or url. No daemon is needed. The same input gives the same shards, with any
    number of workers; the same command again resumes an interrupted run, and keeps complete shards. index.json is
    written last: use it as the dataset's url.
    """
    import asyncio

    from shardcache.config import Settings
    from shardcache.writing.conversion import convert
    from shardcache.writing.inputs import WriteOptions
    from shardcache.writing.shards import ShardNames

    processes = workers or min(_MAX_WORKERS, len(os.sched_getaffinity(0)))
    wanted, tables = WriteOptions(names=ShardNames(names), **options), Settings.load({}, config).origin
    stderr = common.make_console(stderr=True)
    with common.byte_progress(stderr, "writing") as show_bytes:

        def show(event: Json) -> None:
            if "files" in event:
                what = common.count(event["files"], "file") if event["files"] else "the input"
                stderr.print(f"checking {what}: shards of an earlier run are there")
            else:
                show_bytes(event)

        work = convert(sources, destination, wanted, workers=processes, tables=tables, progress=show)
        summary = asyncio.run(work)
    if as_json:
        common.print_json(summary)
        return
    console = common.make_console()
    shards, samples = (common.count(summary[f"{noun}s"], noun) for noun in ("shard", "sample"))
    numbers = f"{summary['written']:,} written, {summary['kept']:,} already there"
    if not summary["written"]:
        numbers = "all already there, nothing to upload"
    console.print(f"{shards}, {samples}, {size(summary['bytes'])}: {numbers}")
    members = {name: "" if n == summary["samples"] else f" (in {n:,})" for name, n in summary["members"].items()}
    console.print(f"members: {', '.join(map(''.join, members.items()))}", markup=False)
    if options["tokens"] is not None:
        console.print(common.count(summary["tokens"], "token"))
    if summary["skipped_files"]:
        console.print(f"{common.count(summary['skipped_files'], 'file')} left out: no name of the form KEY.EXTENSION")
    decode = {name: _DECODERS[name] for name, some in members.items() if not some and name in _DECODERS}
    arguments = ", ".join([repr(summary["index"]), "shuffle=True", *([f"{decode=}"] if decode else [])])
    console.print(f"read it with: ShardDataset({arguments})", markup=False)
