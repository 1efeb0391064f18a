"""`shardcache write`: shards from folders, parquet files, Hugging Face's datasets and JSONL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardcache.cli.common import json_option, parse_size, print_json, token_member

if TYPE_CHECKING:
    from shardcache.tarindex import TokenMember

_MAX_WORKERS = 8


def _columns(_ctx: click.Context, _param: click.Parameter, text: str | None) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",")] if text else []
    if any(not name or not extension for name, _, extension in pairs):
        raise click.BadParameter("write COLUMN=EXTENSION,COLUMN=EXTENSION, such as image=jpg,label=cls")
    return {name: extension for name, _, extension in pairs}


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.argument("destination")
@click.option(
    "--shard-size",
    default="256MiB",
    show_default=True,
    metavar="SIZE",
    type=parse_size,
    help="Most bytes of a shard.",
)
@click.option(
    "--names", default="shard-%06d.tar", show_default=True, metavar="PATTERN", help="Names of the shards, by number."
)
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    metavar="N",
    help="Number of processes that write and upload.  [default: one per CPU, at most 8]",
)
@click.option("--shuffle", type=int, metavar="SEED", help="Write files or rows in random order; not for JSONL.")
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
@click.option(
    "--tokens",
    metavar="EXT[:DTYPE]",
    type=token_member,
    help="Count the tokens of .npy members with this extension, or of plain arrays (tok:uint16), for the index.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path, readable=False),
    help="TOML file with [[origin]] tables.  [default: the daemon's]",
)
@json_option
def write(
    sources: tuple[str, ...],
    destination: str,
    shard_size: int,
    names: str,
    workers: int | None,
    shuffle: int | None,
    classes: bool,
    columns: dict[str, str],
    split: str | None,
    field: str | None,
    pack: bool,
    tokens: TokenMember | None,
    config: Path | None,
    as_json: bool,
) -> None:
    """Write a dataset as tar shards, with an index of their samples.

    SOURCE is folders, .parquet files, .jsonl files (also compressed), or a Hugging Face dataset: hf:NAME, or the folder
    of a saved one. DESTINATION is a folder or url. No daemon is needed. The same input gives the same shards, with any
    number of workers; the same command again resumes an interrupted run, and keeps complete shards. index.json is
    written last: use it as the dataset's url.
    """
    import asyncio

    from shardcache.cli.output import ByteProgress, count, make_console
    from shardcache.config import Settings
    from shardcache.units import size
    from shardcache.writing.conversion import convert
    from shardcache.writing.inputs import WriteOptions
    from shardcache.writing.shards import ShardNames

    options = WriteOptions(shard_size, ShardNames(names), tokens, field, pack, columns, split, classes, shuffle)
    processes = workers or min(_MAX_WORKERS, len(os.sched_getaffinity(0)))
    tables = Settings.load({}, config).origin
    with ByteProgress(make_console(stderr=True), "writing") as bar:
        work = convert(sources, destination, options, workers=processes, tables=tables, progress=bar.update)
        summary = asyncio.run(work)
    if as_json:
        print_json(summary)
        return
    console = make_console()
    console.print(
        f"{count(summary['shards'], 'shard')}, {count(summary['samples'], 'sample')}, {size(summary['bytes'])}: "
        f"{summary['written']:,} written, {summary['kept']:,} already there"
    )
    if tokens is not None:
        console.print(count(summary["tokens"], "token"))
    if summary["skipped_files"]:
        console.print(f"{count(summary['skipped_files'], 'file')} left out: no name of the form KEY.EXTENSION")
    console.print(summary["index"], markup=False)
