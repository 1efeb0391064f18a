"""`shardcache doctor`: a node's problems, their causes and fixes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardcache.cli.commands.serve import SettingsCommand
from shardcache.cli.common import FAILED, NO_DAEMON, json_option, print_json
from shardcache.protocol import from_here

if TYPE_CHECKING:
    from shardcache.cache.operations.origin_probe.findings import Finding
    from shardcache.cli.doctor.context import Case


@click.command(
    cls=SettingsCommand,
    short_help="Check this node and suggest fixes.",
    epilog="Exit codes: 0 no check failed; 1 a check failed; 3 no check failed, but no daemon answers.",
)
@click.argument("urls", nargs=-1, metavar="[URL]...")
@click.option(
    "--config",
    type=click.Path(path_type=Path, readable=False),
    help="TOML config file.  [default: $SHARDCACHE_CONFIG, else /etc/shardcache/shardcache.toml if it exists]",
)
@click.option("--quick", is_flag=True, help="Skip measuring the disk and the object stores.")
@json_option
def doctor(urls: tuple[str, ...], config: Path | None, quick: bool, as_json: bool, **flags: Any) -> None:
    """Check socket, daemon, options, cache, disk, kernel limits and object stores; report problems and their fixes.

    Takes the options of `serve`: before a daemon is started, checks what they would lead to; while one runs, checks
    that daemon. URL is a shard, pattern, prefix or index to probe; by default, one shard of each object store that has
    cached shards or an [[origin]] table. Reads at most 128 MiB from each store, writes at most 256 MiB to the disk, and
    removes what it wrote.
    """
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    case, findings = asyncio.run(_examine(given, config, tuple(map(from_here, urls)), quick=quick, quiet=as_json))
    _show(case, findings, as_json=as_json)
    code = _exit_code(case, findings)
    if code:
        click.get_current_context().exit(code)


async def _examine(
    flags: dict[str, Any], config: Path | None, urls: tuple[str, ...], *, quick: bool, quiet: bool
) -> tuple[Case, list[Finding]]:
    from shardcache.cli.doctor import context as case
    from shardcache.cli.doctor import runner

    taken = await case.take(flags, config, urls, quick=quick)
    with _progress(quiet=quiet) as began:
        return taken, await runner.examine(taken, began)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str], object]]:
    from shardcache.cli.display.output import make_console

    console = make_console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _doing: None
        return
    with console.status("checking") as status:
        yield lambda doing: status.update(f"checking {doing}")


def _show(case: Case, findings: list[Finding], *, as_json: bool) -> None:
    from shardcache import __version__
    from shardcache.cache.operations.origin_probe.findings import State
    from shardcache.cli.doctor.runner import count

    if as_json:
        sums = {state.value: count(findings, state) for state in State}
        head = {"version": __version__, "socket": str(case.socket), "daemon": case.running is not None}
        print_json(head | {"counts": sums, "findings": [finding.to_json() for finding in findings]})
        return
    from shardcache.cli.display.output import make_console
    from shardcache.cli.doctor.page import show

    show(make_console(), findings)


def _exit_code(case: Case, findings: list[Finding]) -> int:
    from shardcache.cache.operations.origin_probe.findings import State

    if any(finding.state is State.FAILED for finding in findings):
        return FAILED
    return NO_DAEMON if case.running is None else 0
