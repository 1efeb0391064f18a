"""The command `shardcache doctor`, which reports a node's problems, their causes and fixes."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from shardcache import __version__
from shardcache.cli import common
from shardcache.cli.starting.settings_options import SettingsCommand, config_option, given_options
from shardcache.shared.urls.local_urls import absolute_url


@common.examples("doctor", "doctor --cache-dir /nvme/shardcache --capacity 80% s3://bucket/train/")
@click.command(
    cls=SettingsCommand,
    short_help="Check this node and suggest fixes.",
    epilog="Exit codes: 0 no check failed; 1 a check failed; 3 no check failed, but no daemon "
    "answers.",
)
@click.argument("urls", nargs=-1, metavar="[URL]...", shell_complete=common.complete_path)
@config_option
@click.option("--quick", is_flag=True, help="Skip measuring the disk and the object stores.")
@common.json_option
def doctor(
    urls: tuple[str, ...],
    config_path: Path | None,
    quick: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Check socket, daemon, options, cache, disk, kernel limits and object stores; report problems
    and their fixes.

    If a daemon runs, checks that daemon. If not, checks what the options of `serve` would do, so
    that you can correct them before you start one. URL is a shard, pattern, prefix or index to
    probe. Without URL, probes one shard of each object store that has cached shards or an
    [[origin]] table. Reads at most 128 MiB from each store, writes at most 256 MiB to the disk, and
    removes what it wrote.
    """
    import asyncio

    from shardcache.cli.doctor.context import Context
    from shardcache.cli.doctor.runner import SIGNS, examine, print_report

    absolute_urls = tuple(map(absolute_url, urls))
    context = Context(given_options(flags), config_path, absolute_urls, quick=quick)
    with common.make_console(stderr=True).status("checking"):  # shown only on a terminal
        findings = asyncio.run(examine(context))
    counted = Counter(finding.state for finding in findings)
    counts = {state: counted[state] for state in SIGNS}  # with a 0 for states that do not occur
    if as_json:
        common.print_json(
            {
                "version": __version__,
                "socket": str(context.socket),
                "daemon": context.status is not None,
                "counts": counts,
                "findings": list(map(asdict, findings)),
            }
        )
    else:
        print_report(findings, counts)
    if counts["failed"]:
        click.get_current_context().exit(common.FAILED)
    if context.status is None:
        click.get_current_context().exit(common.NO_DAEMON)
