"""`shardcache index`: writes an index of shards, and the table of their samples.

The index is a JSON file that lists the shards of a dataset with their sample counts, sizes and
versions. The table of samples lists all samples (`tarindex.contents`). Both are made in a temporary
folder first, and stored when they are complete. The destination is a folder, on disk or in a store.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardcache.access.urls import without_protocol
from shardcache.cli import common
from shardcache.cli.admin_client import AdminClient, Lines
from shardcache.cli.making.member_option import parse_metadata_member, tokens_option
from shardcache.cli.shard_work import byte_progress, show_work
from shardcache.shared.lists import shardlist
from shardcache.shared.protocol import ShardRef
from shardcache.shared.tarindex.key_splits import FIRST_DOT, LAST_DOT, with_key_split
from shardcache.shared.urls.local_urls import absolute_url, local_path
from shardcache.shared.urls.url_names import INDEX_SUFFIX, beside_index, path_of

if TYPE_CHECKING:
    from shardcache.shared.tarindex.named_members import MetadataMember, TokenMember
    from shardcache.writing.destination import Destination

_STDOUT = "-"


def _check_output(_ctx: click.Context, _param: click.Parameter, output: str) -> str:
    """Return the url or absolute path of --output, or `-`.

    An output that cannot be written, or whose name readers would not recognize as an index, is
    rejected here, before any shard is read.
    """
    if output == _STDOUT:
        return output
    if not path_of(output).lower().endswith(INDEX_SUFFIX):
        raise click.BadParameter(
            f"datasets recognize an index by its name: it must end in {INDEX_SUFFIX}",
        )
    url = absolute_url(output)
    path = local_path(url)
    if path:
        folder = Path(path).parent
        if not os.access(folder, os.W_OK | os.X_OK):
            raise click.BadParameter(f"the folder {folder} does not exist or is not writable")
    elif "/" not in without_protocol(url):  # the part after "://" has a bucket but no key
        raise click.BadParameter(f"{output} names a bucket; the index needs a name in it")
    return url


@common.examples(
    "index s3://bucket/val/ -o index.json",
    "index s3://bucket/train/ -o s3://bucket/train/all.json --samples",
)
@click.command()
@common.urls_argument
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FILE",
    callback=_check_output,
    shell_complete=common.complete_path,
    help="Index to write (.json): a file, a url in a store, or - for standard output.",
)
@click.option(
    "--relative-to",
    metavar="URL",
    help="Write the shards' names relative to this url.  [default: full urls]",
)
@click.option(
    "--key-split",
    type=click.Choice([FIRST_DOT, LAST_DOT]),
    default=FIRST_DOT,
    show_default=True,
    help="Dot in a member's name at which the sample's key ends. The index records it.",
)
@tokens_option(
    help="Count tokens as well: those of .npy members with this extension, or of plain "
    "arrays (tok:uint16).",
)
@click.option(
    "--samples",
    "with_samples",
    is_flag=True,
    help="Also write the table of samples, which select() needs.",
)
@click.option(
    "--metadata",
    metavar="EXT[:FIELD,...]",
    type=parse_metadata_member,
    help="Add to that table the JSON object in the member with this extension, or only "
    "these of its fields.",
)
@common.query_options
def index(
    urls: tuple[str, ...],
    output: str,
    relative_to: str | None,
    key_split: str,
    tokens: TokenMember | None,
    with_samples: bool,
    metadata: MetadataMember | None,
    as_json: bool,
    socket: Path | None,
) -> None:
    """Write an index of a dataset: each shard's samples, size and version.

    URL is a brace pattern (quote it), a glob, a prefix ending in "/", a single shard, or an
    outdated index. Write the index next to the shards or elsewhere, and use it as the dataset's
    url.

    Each shard is read once, through the cache, which may be smaller than the dataset. Shards that
    have been counted before are not read again, except with --tokens, which always reads every
    shard. If a shard fails, no index is written. If somebody else has changed the index since the
    command began, it is not overwritten, where the store can tell (S3). To write to a store, the
    command uses your own credentials.
    """
    import asyncio

    _check_usage(output, metadata, with_samples=with_samples, as_json=as_json)

    urls = tuple(with_key_split(url, key_split) for url in urls)
    # The store is told the version of the index before the command, so that it refuses to overwrite
    # an index that somebody has changed since.
    replaced_version = None
    if output != _STDOUT:
        replaced_version = asyncio.run(_version_of(output))
    with tempfile.TemporaryDirectory(prefix="shardcache-index-") as folder:
        table_file = Path(folder, "table")
        listed_refs = None
        if with_samples:
            listed_refs = _write_table(table_file, urls, metadata, as_json=as_json, socket=socket)
        events = AdminClient(socket).index(urls, None if tokens is None else str(tokens))
        refs = _count_samples(events, output, as_json=as_json)
        if listed_refs is not None:
            from shardcache.cli.making.sample_table import check_same

            check_same(listed_refs, refs)

        index_text = shardlist.write(refs, relative_to)
        if output == _STDOUT:
            click.echo(index_text, nl=False)
            return
        if listed_refs is not None:
            from shardcache.shared.tarindex.contents import SUFFIX

            asyncio.run(_store(table_file, beside_index(output, SUFFIX)))
        index_file = Path(folder, "index.json")
        index_file.write_text(index_text)
        asyncio.run(_store(index_file, output, replaced_version))


def _check_usage(
    output: str,
    metadata: MetadataMember | None,
    *,
    with_samples: bool,
    as_json: bool,
) -> None:
    """Raise UsageError for options that contradict each other."""
    if as_json and output == _STDOUT:
        raise click.UsageError("--json and -o - both print to standard output")
    if with_samples and output == _STDOUT:
        raise click.UsageError(
            "--samples writes a second file next to the index: name a file with -o",
        )
    if metadata is not None and not with_samples:
        raise click.UsageError("--metadata adds to the table of the samples: pass --samples, too")


def _write_table(
    file: Path,
    urls: tuple[str, ...],
    metadata: MetadataMember | None,
    *,
    as_json: bool,
    socket: Path | None,
) -> list[ShardRef]:
    """Write the table of samples to a file; return the shards that it lists."""
    from shardcache.cli.making.sample_table import write_table

    console = common.make_console()
    with file.open("wb") as table, byte_progress(console, "listing samples") as show_bar:
        show = common.print_json if as_json else show_bar
        return write_table(urls, socket, table, metadata, show)


def _count_samples(events: Lines, output: str, *, as_json: bool) -> list[ShardRef]:
    """Show the progress of counting samples; return the shards, with their counts, in order.

    Exits with code 1 if a shard failed.
    """
    refs_by_number: dict[int, ShardRef] = {}
    # `show_work` fills in the figures of the last event.
    summary = (
        "{shards}, {samples}: {fetched:,} fetched, {known:,} already known, {failed:,} failed; "
        "{origin_bytes} from the origin"
    )
    show_work(
        _collect_shards(events, refs_by_number),
        "counting",
        summary,
        as_json=as_json,
        advice=lambda: "no index written: it would lack the failed shards",
        stderr=output == _STDOUT,
    )
    return [refs_by_number[number] for number in sorted(refs_by_number)]


def _collect_shards(events: Lines, refs_by_number: dict[int, ShardRef]) -> Lines:
    """Yield the events; put each shard that an event reports into `refs_by_number`."""
    with contextlib.closing(events):
        for event in events:
            if event["event"] == "shard":
                refs_by_number[event["number"]] = ShardRef(
                    event["url"],
                    version=event.get("version"),
                    size_bytes=event.get("size_bytes"),
                    samples=event.get("samples"),
                    tokens=event.get("tokens"),
                )
            yield event


async def _version_of(output: str) -> str:
    """Return the version of the file at an output; "" if there is none."""
    async with _destination_of(output) as (destination, name):
        return await destination.version(name)


async def _store(file: Path, output: str, replaced_version: str | None = None) -> None:
    """Move a file to an output. Raises the errors of a destination.

    Args:
        file: the file.
        output: url or path to store the file under.
        replaced_version: the version that may be replaced, "" if nothing may be replaced; None to
            replace any version.
    """
    async with _destination_of(output) as (destination, name):
        await destination.store_file(file, name, replaced_version)


@contextlib.asynccontextmanager
async def _destination_of(output: str) -> AsyncIterator[tuple[Destination, str]]:
    """Yield the folder of an output, and the output's name in it.

    For a url, the folder is the prefix up to its last slash. Raises the errors of a destination.
    """
    from shardcache.config.settings import Settings
    from shardcache.writing.destination import Destination

    folder, _, name = output.rpartition("/")
    root_or_folder = folder or "/"  # the folder of a path such as /index.json is empty
    settings = Settings.load({})  # from environment and config file
    async with Destination(root_or_folder, settings.origin) as destination:
        yield destination, name
