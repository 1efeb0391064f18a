"""`shardcache doctor`: a node's problems, their causes and fixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardcache import __version__
from shardcache.cli import common
from shardcache.cli.serve import SettingsCommand, config_option, given
from shardcache.protocol import from_here

if TYPE_CHECKING:
    from shardcache.cli.doctor.context import Finding

# A sign and a word: not everybody sees colours.
_SIGNS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "failed": ("✗", "bold red"), "skipped": ("-", "dim")}


@click.command(
    cls=SettingsCommand,
    short_help="Check this node and suggest fixes.",
    epilog="Exit codes: 0 no check failed; 1 a check failed; 3 no check failed, but no daemon answers.",
)
@click.argument("urls", nargs=-1, metavar="[URL]...", shell_complete=common.complete_path)
@config_option
@click.option("--quick", is_flag=True, help="Skip measuring the disk and the object stores.")
@common.json_option
def doctor(urls: tuple[str, ...], config: Path | None, quick: bool, as_json: bool, **flags: Any) -> None:
    """Check socket, daemon, options, cache, disk, kernel limits and object stores; report problems and their fixes.

    Takes the options of `serve`: before a daemon is started, checks what they would lead to; while one runs, checks
    that daemon. URL is a shard, pattern, prefix or index to probe; by default, one shard of each object store that has
    cached shards or an [[origin]] table. Reads at most 128 MiB from each store, writes at most 256 MiB to the disk, and
    removes what it wrote.
    """
    import asyncio

    from shardcache.cli.doctor.context import Context
    from shardcache.cli.doctor.runner import examine

    context = Context(given(flags), config, tuple(map(from_here, urls)), quick=quick)
    with common.make_console(stderr=True).status("checking"):  # on a terminal alone
        findings = asyncio.run(examine(context))
    counts = dict.fromkeys(_SIGNS, 0) | Counter(finding.state for finding in findings)
    if as_json:
        head = {"version": __version__, "socket": str(context.socket), "daemon": context.status is not None}
        common.print_json(head | {"counts": counts, "findings": list(map(asdict, findings))})
    else:
        _print(findings, counts)
    if counts["failed"]:
        click.get_current_context().exit(common.FAILED)
    if context.status is None:
        click.get_current_context().exit(common.NO_DAEMON)


def _print(findings: Sequence[Finding], counts: Mapping[str, int]) -> None:
    """Print the findings by family and url, below each problem its cause and fix, and a summary."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = common.make_console()
    for (family, subject), group in groupby(findings, _heading):
        console.print(Text.assemble((family, "bold"), f"  {subject}" if subject else ""))
        for finding in group:
            sign, style = _SIGNS[finding.state]
            line = Table.grid(padding=(0, 1))
            for width in (None, 7, 13):
                line.add_column(no_wrap=True, width=width)
            line.add_column(overflow="fold")
            name = finding.check.partition(".")[2].replace("_", " ")
            line.add_row(Text(sign, style), Text(finding.state, style), name, Text(finding.found))
            if finding.cause:
                line.add_row("", "", Text("  why", "dim"), Text(finding.cause))
            console.print(Padding(line, (0, 0, 0, 2), expand=False))
            if finding.remedy:
                # Wrapped by the terminal, so that it can be copied as one command.
                console.print(Text.assemble((" " * 12 + "  fix         ", "dim"), finding.remedy), soft_wrap=True)
    failures = f"{common.count(counts['failed'], 'check')} failed" if counts["failed"] else "no check failed"
    console.print(Text(f"{failures}, {common.count(counts['warning'], 'warning')}", "bold"))


def _heading(finding: Finding) -> tuple[str, str]:
    return ("store" if finding.subject else finding.check.partition(".")[0], finding.subject)
