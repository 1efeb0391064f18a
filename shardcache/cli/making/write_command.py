"""`shardcache write`: writes datasets of other formats as shards, with their index.

The module has the options and the output of the command; `shardcache.writing` does the work. A
member is a file in a shard; a sample consists of the members with the same key.
"""

import os
from pathlib import Path
from typing import Any

import click

from shardcache.cli import common
from shardcache.cli.making.member_option import tokens_option
from shardcache.cli.shard_work import byte_progress
from shardcache.shared.protocol import Json
from shardcache.shared.units import size

_MAX_WORKERS = 8
# Decoders by extension, for the example of reading the shards that the command prints at its end.
_DECODERS = {
    "jpg": "rgb8",
    "jpeg": "rgb8",
    "png": "rgb8",
    "webp": "rgb8",
    "gif": "rgb8",
    "bmp": "rgb8",
    "tiff": "rgb8",
    "cls": "int",
    "json": "json",
    "npy": "npy",
    "txt": "text",
}


def _parse_columns(
    _ctx: click.Context,
    _param: click.Parameter,
    text: str | None,
) -> dict[str, str]:
    """Return the extension of each column that --columns names, by the column's name."""
    columns: dict[str, str] = {}
    if not text:
        return columns
    for pair in text.split(","):
        name, _, extension = pair.partition("=")
        if not name or not extension:
            raise click.BadParameter(
                "write COLUMN=EXTENSION,COLUMN=EXTENSION, such as image=jpg,label=cls",
            )
        columns[name] = extension
    return columns


def _require_sources(
    ctx: click.Context,
    _param: click.Parameter,
    sources: tuple[str, ...],
) -> tuple[str, ...]:
    """Return the sources; raise UsageError if there are none.

    click takes a single argument for DESTINATION, and passes no sources.
    """
    if not sources:
        raise click.UsageError(
            "Missing argument 'DESTINATION': name sources, then the folder or url of the shards",
            ctx,
        )
    return sources


@common.examples(
    "write photos/ s3://bucket/train/ --classes --shuffle 7",
    "write lines.jsonl text/ --pack --workers 8",
)
@click.command(context_settings={"show_default": True})
@click.argument("sources", nargs=-1, callback=_require_sources, metavar="SOURCE...")
@click.argument("destination", required=False, metavar="DESTINATION")
@click.option(
    "--shard-size",
    "shard_size_bytes",
    default="256MiB",
    type=common.parse_size,
    metavar="SIZE",
    help="Maximum size of a shard.",
)
@click.option(
    "--names",
    default="shard-%06d.tar",
    metavar="PATTERN",
    help="Names of the shards, with a place for their number.",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    help="Worker processes.  [default: one per CPU, at most 8]",
)
@click.option(
    "--shuffle",
    type=int,
    metavar="SEED",
    help="Write files or rows in a random order, determined by SEED. Not for JSONL.",
)
@click.option(
    "--key-at",
    type=click.Choice(["first-dot", "last-dot"]),
    help="Folders: the dot in a file's name at which its key ends. With last-dot, earlier "
    "dots become underscores.  [default: first-dot, but files such as 22.05.png and "
    "22.06.png are an error]",
)
@click.option(
    "--classes",
    is_flag=True,
    help="Folders: add each file's class as cls: the number of its first-level folder.",
)
@click.option(
    "--columns",
    metavar="COLUMN=EXT,...",
    callback=_parse_columns,
    help="Tables: the columns to write, each with its extension.  [default: all, as "
    "COLUMN.txt and so on]",
)
@click.option(
    "--split", metavar="NAME", help="Hugging Face: the split to write, if there are several."
)
@click.option(
    "--field",
    metavar="NAME",
    help="JSONL: write the text of this field as txt.  [default: the whole line as json]",
)
@click.option(
    "--pack",
    is_flag=True,
    help="JSONL: write many lines into one member. Only shardcache reads such shards.",
)
@tokens_option(
    help="Count tokens for the index: those of .npy members with this extension, or of "
    "plain arrays (tok:uint16)."
)
@click.option(
    "--config",
    type=click.Path(path_type=Path, readable=False),
    help="TOML file with [[origin]] tables.  [default: the daemon's config file]",
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

    SOURCE is one or more folders, .parquet files or .jsonl files (also compressed), or a Hugging
    Face dataset: hf:NAME, or the folder of a saved one. DESTINATION is a folder or url. No daemon
    is needed.

    The same input gives the same shards, with any number of workers. To resume an interrupted run,
    repeat the command: complete shards are kept. index.json is written last: use it as the
    dataset's url.
    """
    import asyncio

    from shardcache.config.settings import Settings
    from shardcache.writing.conversion import convert
    from shardcache.writing.inputs import WriteOptions
    from shardcache.writing.shard_cuts import ShardNames

    processes = workers or min(_MAX_WORKERS, len(os.sched_getaffinity(0)))
    # The other options have the names of `WriteOptions`' attributes.
    write_options = WriteOptions(names=ShardNames(names), **options)
    tables = Settings.load({}, config).origin
    stderr = common.make_console(stderr=True)
    with byte_progress(stderr, "writing") as show_bytes:

        def show(event: Json) -> None:
            if "files" not in event:
                show_bytes(event)
                return
            # The input of an interrupted run is checked first; its number of files may be unknown.
            checked = "the input"
            if event["files"]:
                checked = common.quantity(event["files"], "file")
            stderr.print(f"checking {checked}: shards of an earlier run are there")

        work = convert(
            sources,
            destination,
            write_options,
            workers=processes,
            origin_tables=tables,
            progress=show,
        )
        summary = asyncio.run(work)
    if as_json:
        common.print_json(summary)
    else:
        _print_summary(summary)


def _print_summary(summary: Json) -> None:
    """Print what the shards contain, and an example of reading them."""
    console = common.make_console()
    shards = common.quantity(summary["shards"], "shard")
    samples = common.quantity(summary["samples"], "sample")
    numbers = "all already there, nothing to upload"
    if summary["written"]:
        numbers = f"{summary['written']:,} written, {summary['kept']:,} already there"
    console.print(f"{shards}, {samples}, {size(summary['bytes'])}: {numbers}")

    members = []
    decode = {}  # decoders of the members that every sample has
    for extension, count in summary["members"].items():
        if count < summary["samples"]:
            members.append(f"{extension} (in {count:,})")
            continue
        members.append(extension)
        if extension in _DECODERS:
            decode[extension] = _DECODERS[extension]
    console.print(f"members: {', '.join(members)}", markup=False)
    if "tokens" in summary:
        console.print(common.quantity(summary["tokens"], "token"))
    if summary["skipped_files"]:
        skipped = common.quantity(summary["skipped_files"], "file")
        console.print(f"{skipped} left out: no name of the form KEY.EXTENSION")

    arguments = [repr(summary["index"]), "shuffle=True"]
    if decode:
        arguments.append(f"decode={decode!r}")
    console.print(f"read it with: ShardDataset({', '.join(arguments)})", markup=False)
