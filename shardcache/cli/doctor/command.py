"""`shardcache doctor`: what a node lacks, why, and what mends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardcache.cli.common import FAILED, NO_DAEMON, json_option, print_json
from shardcache.cli.serve import SettingsCommand
from shardcache.protocol import from_here

if TYPE_CHECKING:
    from shardcache.cache.origin_probe.findings import Finding
    from shardcache.cli.doctor.case import Case


@click.command(
    cls=SettingsCommand,
    short_help="Check this node, and say what mends it.",
    epilog="Exit codes: 0 nothing failed; 1 something did; 3 nothing did, but no daemon answers.",
)
@click.argument("urls", nargs=-1, metavar="[URL]...")
@click.option(
    "--config",
    type=click.Path(path_type=Path, readable=False),
    help="TOML file.  [default: $SHARDCACHE_CONFIG, else /etc/shardcache/shardcache.toml where it exists]",
)
@click.option("--quick", is_flag=True, help="Measure neither the disk nor the stores.")
@json_option
def doctor(urls: tuple[str, ...], config: Path | None, quick: bool, as_json: bool, **flags: Any) -> None:
    """Check socket, daemon, options, cache, disk, kernel limits and stores; say what is wrong and what mends it.

    Takes the options of `serve`: before a daemon is started, it tells what would come of them; while one runs, it
    looks at that. URL is a shard, or what stands for some, to try; by default a shard of each store that is cached or
    has an [[origin]] table. It reads 128 MiB of a store and writes 256 MiB to the disk at most, and leaves nothing.
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
    from shardcache.cli.doctor import case, runner

    taken = await case.take(flags, config, urls, quick=quick)
    with _progress(quiet=quiet) as began:
        return taken, await runner.examine(taken, began)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str], object]]:
    from shardcache.cli.output import make_console

    console = make_console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _doing: None
        return
    with console.status("looking") as status:
        yield lambda doing: status.update(f"looking at {doing}")


def _show(case: Case, findings: list[Finding], *, as_json: bool) -> None:
    from shardcache import __version__
    from shardcache.cache.origin_probe.findings import State
    from shardcache.cli.doctor.runner import count

    if as_json:
        sums = {state.value: count(findings, state) for state in State}
        head = {"version": __version__, "socket": str(case.socket), "daemon": case.running is not None}
        print_json(head | {"counts": sums, "findings": [finding.to_json() for finding in findings]})
        return
    from shardcache.cli.doctor.page import show
    from shardcache.cli.output import make_console

    show(make_console(), findings)


def _exit_code(case: Case, findings: list[Finding]) -> int:
    from shardcache.cache.origin_probe.findings import State

    if any(finding.state is State.FAILED for finding in findings):
        return FAILED
    return NO_DAEMON if case.running is None else 0
