"""Commands on cached shards and files: `warm`, `get`, `ls`, `pin`, `unpin`, `evict`, `verify`.

The daemon does the work; `AdminClient` sends the requests. Answers about many shards arrive as
lines of JSON, each an event or a shard. A pinned shard is not evicted until it is unpinned; a lease
keeps a shard only while it is read.
"""

import os
import time
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path

import click

from shardcache.cli import common
from shardcache.cli.admin_client import AdminClient
from shardcache.cli.shard_work import print_lines, show_work
from shardcache.shared.protocol import Json, Wanted
from shardcache.shared.units import age, size, user_name
from shardcache.shared.urls.local_urls import absolute_url


@common.examples("warm s3://bucket/train/index.json", "warm --json 's3://bucket/train/*.tar'")
@click.command()
@common.urls_argument
@click.option(
    "--files",
    "wants_files",
    is_flag=True,
    help="Cache the objects' own bytes, for programs that open them, not shards of samples.",
)
@common.query_options
def warm(urls: tuple[str, ...], wants_files: bool, as_json: bool, socket: Path | None) -> None:
    """Fetch shards into the cache, and wait until they are cached.

    Run it before a job starts, and the job's first epoch reads from disk. URL is a brace pattern
    (quote it), a glob, a prefix ending in "/", an index file or a single shard. Shards of any
    format are cached as datasets read them, other files as they are. With --json, prints one line
    of JSON per event. Ctrl-C stops waiting.
    """
    wanted: Wanted = "files" if wants_files else "shards"
    summary = (
        "{shards}: {fetched:,} fetched, {cached:,} already cached, {failed:,} failed; "
        "{origin_bytes} from the origin"
    )

    def advice() -> str:
        """Return a hint for urls that look like files that are not shards."""
        # Imported only after a failure, because the module imports all formats, which takes time.
        from shardcache.shared.urls.url_names import is_common_outside_datasets

        if wants_files or not any(map(is_common_outside_datasets, urls)):
            return ""
        return "For programs that open such files themselves: shardcache warm --files URL..."

    show_work(
        AdminClient(socket).warm(urls, wanted),
        "warming",
        summary,
        as_json=as_json,
        advice=advice,
        line_per_shard=True,
    )


@common.examples(
    "get s3://bucket/llama/ ./llama",
    "get --copy s3://bucket/llama/model.safetensors .",
)
@click.command()
@click.argument("source", shell_complete=common.complete_path)
@click.argument("dest", shell_complete=common.complete_path)
@click.option(
    "--link/--copy",
    "links",
    default=None,
    help="Make hard links, or copies.  [default: links where they are safe]",
)
@common.query_options
def get(source: str, dest: str, links: bool | None, as_json: bool, socket: Path | None) -> None:
    """Fetch files through the cache into the folder DEST.

    SOURCE is a prefix ending in "/", a glob or brace pattern (quote it), an index file,
    hf://ORG/NAME, or the url of one file, for which DEST may be a new name. Files that are already
    in DEST are kept: to continue, run the command again. If a file fails, the others are still
    written, and the exit code is 1. If the node has no daemon, a private one is started. With
    --json, prints one line of JSON per event.

    By default, a file becomes a hard link if that is safe: DEST is on the cache's filesystem, and
    you cannot write to the file. A hard link is read-only, takes no space of its own, and keeps the
    file cached while the link exists. Otherwise the file is copied, which takes no space either if
    the filesystem shares blocks. Root gets copies, because root could write to a linked file and so
    damage the cache.
    """
    from shardcache.cli.getting.fetch_into import fetch_into

    fetch_into(absolute_url(source), dest, socket, links=links, as_json=as_json)


@common.examples("ls", "ls s3://bucket/train/")
@click.command()
@click.argument("prefix", default="")
@common.query_options
def ls(prefix: str, as_json: bool, socket: Path | None) -> None:
    """List the cached shards whose url starts with PREFIX.

    If only ranges of an object were read, the list shows how much of it is cached. PREFIX is the
    beginning of a url or of a path; a path matches the file:// url as well. With --json, prints one
    line of JSON per shard.
    """
    prefix = _url_prefix(prefix)
    lines = AdminClient(socket).shards(prefix)
    if as_json:
        print_lines(lines)
        return

    shards = list(lines)
    if shards:
        _print_shards(shards)
    elif prefix:
        click.echo(f"no cached shard has a url that starts with {prefix}")
    else:
        click.echo("no shards are cached")


def _url_prefix(text: str) -> str:
    """Make a local path absolute; return a url, or the beginning of one, unchanged."""
    # `absolute_url` leaves urls alone, but would take the beginning of a url, such as "s3", for a
    # path. So a text without a slash counts as a path only if that path exists.
    if "/" in text or text.startswith("file:") or os.path.lexists(text):
        return absolute_url(text)
    return text


def _print_shards(shards: list[Json]) -> None:
    """Print a table of shards, sorted by url."""
    rows = []
    now_s = time.time()
    for shard in sorted(shards, key=itemgetter("url")):
        idle_s = max(0.0, now_s - shard["used_at_s"])
        rows.append(
            (
                shard["url"],
                size(shard["size_bytes"]),
                _cached_share(shard),
                "" if shard["samples"] is None else f"{shard['samples']:,}",
                f"{shard['leases']:,}",
                "pinned" if shard["pinned"] else "",
                age(idle_s),
            ),
        )
    common.print_table(
        ("url", "size", "cached", "samples", "leases", "pinned", "last used"),
        rows,
        numbers=("size", "cached", "samples", "leases"),
    )


def _cached_share(shard: Json) -> str:
    """Return the share of a shard's bytes that are cached, as text."""
    if shard["cached_bytes"] == shard["size_bytes"]:
        return "all"
    return f"{shard['cached_bytes'] / shard['size_bytes']:.1%}"


@common.examples("evict s3://bucket/train/shard-000000.tar", "evict s3://bucket/val/")
@click.command()
@common.urls_argument
@common.query_options
def evict(urls: tuple[str, ...], as_json: bool, socket: Path | None) -> None:
    """Evict shards from the cache; the object store is never modified.

    URL is a shard, a brace pattern, a glob or a prefix ending in "/", matched against the cached
    shards. Pinned shards are kept, and so are shards that a reader is using. Exits 1 if a shard was
    kept or nothing matched.
    """
    _report_removed(
        AdminClient(socket).evict(urls),
        "evicted",
        "no cached shard matches; see `shardcache ls`",
        as_json=as_json,
    )


@common.examples("pin s3://bucket/val/", "pin 's3://bucket/train/*.tar'")
@click.command()
@click.argument(
    "urls",
    nargs=-1,
    type=absolute_url,
    metavar="[URL...]",
    shell_complete=common.complete_path,
)
@common.query_options
def pin(urls: tuple[str, ...], as_json: bool, socket: Path | None) -> None:
    """Fetch shards and keep them cached until they are unpinned; without URL, list the pinned
    shards.

    URL is a brace pattern (quote it), a glob, a prefix ending in "/", an index file or a single
    shard, as for `warm`. Pins survive a restart of the daemon. With --json, prints one line of JSON
    per event or pin. Ctrl-C stops waiting; shards that were pinned by then stay pinned, even those
    that are not fetched yet.
    """
    client = AdminClient(socket)
    if not urls:
        if as_json:
            print_lines(client.pins())
        else:
            _print_pins(client.pins())
        return

    summary = (
        "{succeeded} pinned: {fetched:,} fetched, {cached:,} already cached; {failed:,} failed\n"
        "{pins[size_bytes]} of at most {pins[limit_bytes]} pinned now"
    )
    show_work(
        client.pin(urls),
        "pinning",
        summary,
        as_json=as_json,
        line_per_shard=True,
    )


def _print_pins(pins: Iterable[Json]) -> None:
    """Print a table of pinned shards, sorted by url."""
    rows = [
        (
            shard["url"],
            size(shard["size_bytes"]),
            "yes" if shard["cached"] else "no",
            ", ".join(map(user_name, shard["uids"])),
        )
        for shard in sorted(pins, key=itemgetter("url"))
    ]
    if rows:
        common.print_table(("url", "size", "cached", "pinned by"), rows, numbers=("size",))
    else:
        click.echo("no shards are pinned")


@common.examples("unpin s3://bucket/val/", "unpin 's3://bucket/train/*.tar'")
@click.command()
@common.urls_argument
@common.query_options
def unpin(urls: tuple[str, ...], as_json: bool, socket: Path | None) -> None:
    """Unpin shards, so that they may be evicted.

    URL is a shard, a brace pattern, a glob or a prefix ending in "/", matched against the pinned
    shards. Removes your own pins; root and the daemon's user remove everyone's. Exits 1 if a shard
    stayed pinned or nothing matched.
    """
    _report_removed(
        AdminClient(socket).unpin(urls),
        "unpinned",
        "no pinned shard matches; see `shardcache pin`",
        as_json=as_json,
    )


def _report_removed(answer: Json, action: str, no_match: str, *, as_json: bool) -> None:
    """Print the shards that were kept, with the reason, and the number of removed shards.

    Exit with code 1 if a shard was kept, or no shard was removed.

    Args:
        answer: the daemon's answer.
        action: "evicted" or "unpinned": the answer's field with the removed shards, and the word
            for them in the summary.
        no_match: the message if no shard matched.
        as_json: True to print the answer as JSON instead.
    """
    removed = answer[action]
    kept = answer["kept"]
    if as_json:
        common.print_json(answer)
    else:
        lines = [f"kept  {shard['url']}: {shard['reason']}" for shard in kept]
        summary = no_match
        if removed or kept:
            summary = f"{common.quantity(len(removed), 'shard')} {action}"
            if "freed_bytes" in answer:
                summary += f", {size(answer['freed_bytes'])} freed"
        lines.append(summary)
        common.make_console().print("\n".join(lines), markup=False)
    if kept or not removed:
        common.fail()


@common.examples("verify", "verify --json s3://bucket/train/")
@click.command()
@click.argument("prefix", default="")
@common.query_options
def verify(prefix: str, as_json: bool, socket: Path | None) -> None:
    """Read every cached shard and check it against its checksums.

    With PREFIX, as for `ls`, checks only the shards whose url starts with it. A corrupt shard is
    quarantined, and fetched again when it is next needed. If only ranges of an object were read,
    checks the parts of it that are cached, and drops damaged ones. Exits 1 if it found damage. With
    --json, prints one line of JSON per event.

    A shard that was rejected on arrival is not cached and so not checked: `shardcache doctor` names
    it.
    """
    summary = "{shards} verified ({bytes}), {corrupt:,} corrupt; {refused:,} refused on arrival"
    events = AdminClient(socket).verify(_url_prefix(prefix))
    show_work(events, "verifying", summary, as_json=as_json)
