"""The table of checks of `shardcache doctor`, the runner of the checks, and the report.

A check is a function that returns findings, the lines of the report. It has a name of two words,
such as "disk.write". Checks with the same first word are a family, which has a section in the
report.
"""

from asyncio import timeout
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardcache.cli import common
from shardcache.cli.doctor import (
    daemon_checks,
    disk_checks,
    kernel_checks,
    s3_checks,
    store_checks,
    tier_checks,
)
from shardcache.cli.doctor.context import Context, Finding, error_finding, failed, start_command
from shardcache.shared.exceptions import ShardcacheError
from shardcache.shared.wording.redact import printable, redact

Outcome = Finding | Sequence[Finding] | None
CheckFunction = Callable[[Context], Outcome | Awaitable[Outcome]]
"""Function of a check, which is called in a thread.

A check that uses asyncio returns a coroutine, which is awaited without a time limit: such a check
only uses the network, and has time-outs of its own. The function raises ShardcacheError or OSError
if the check cannot be carried out.
"""

Check = tuple[str, CheckFunction]
"""A check: its name, `family.check`, which its findings get as well, and its function."""

CHECKS: Sequence[Check] = (
    ("socket.path", daemon_checks.check_socket_path),
    ("socket.daemon", daemon_checks.check_listener),
    ("daemon.health", daemon_checks.check_health),
    ("daemon.refused", daemon_checks.check_refused_shards),
    ("daemon.s3", s3_checks.check_endpoint),
    ("config.file", daemon_checks.check_options),
    ("cache.folder", disk_checks.check_folder),
    ("cache.filesystem", disk_checks.check_filesystem),
    ("cache.space", disk_checks.check_space),
    ("disk.write", disk_checks.measure_speed),
    ("kernel.open_files", kernel_checks.check_open_files),
    ("kernel.shared_memory", kernel_checks.check_shared_memory),
    ("tier.bypass", tier_checks.check_bypasses),
    ("tier.reach", tier_checks.check_nginx),
    ("origin.reach", store_checks.probe_stores),
)

# The sign of each state, and the style of the sign.
SIGNS = {
    "ok": ("✓", "green"),
    "warning": ("!", "yellow"),
    "failed": ("✗", "bold red"),
    "skipped": ("-", "dim"),
}

# Time limit of a check. Time-outs for the network are shorter, so a check that exceeds this limit
# waits for a disk that hangs, or for the server of a network filesystem.
_LIMIT_S = 30.0

# Widths of the columns of a finding, in characters.
_STATE_WIDTH = 7
_NAME_WIDTH = 13
# Fills the columns of sign and state, so that a remedy is aligned with the names of checks.
_INDENT = " " * 12


async def examine(
    context: Context,
    checks: Sequence[Check] = CHECKS,
    *,
    limit_s: float = _LIMIT_S,
) -> list[Finding]:
    """Run the checks one after another, and return all findings.

    A check that blocks for longer than `limit_s` is abandoned. If a check cannot be carried out, a
    finding says so, and the later checks of its family are skipped.
    """
    findings: list[Finding] = []
    skipped_families = set()
    for name, check in checks:
        family, _, _ = name.partition(".")
        if family in skipped_families:
            continue
        try:
            outcome = await _call(check, context, limit_s)
            findings += [finding.named(name) for finding in outcome]
        except (TimeoutError, ShardcacheError, OSError) as exn:
            skipped_families.add(family)
            # The finding is about doctor itself, which could not check the family.
            unchecked = _unchecked(family, exn, limit_s)
            findings.append(unchecked.named(f"doctor.{family}"))
    return _with_proposals(context, findings)


async def _call(check: CheckFunction, context: Context, limit_s: float) -> Sequence[Finding]:
    """Return the findings of a check. Raises as the check, or TimeoutError."""
    async with timeout(limit_s):
        outcome = await common.in_thread(partial(check, context))
    if isinstance(outcome, Awaitable):
        outcome = await outcome
    if outcome is None:
        return []
    if isinstance(outcome, Finding):
        return [outcome]
    return outcome


def _unchecked(family: str, error: Exception, limit_s: float) -> Finding:
    """Return the finding that a family could not be checked.

    Args:
        family: name of the family.
        error: the error of the check that could not be carried out.
        limit_s: the time limit of the check.
    """
    if isinstance(error, ShardcacheError):
        return error_finding(error)
    found = f"the {family} could not be checked"
    if isinstance(error, TimeoutError):
        cause = (
            f"no answer within {limit_s:g} s: a disk or the server of a network filesystem hangs"
        )
        return failed(found, cause, "dmesg | tail -50; mount -t nfs,nfs4,cifs,fuse,lustre")
    return failed(found, str(error), "sudo shardcache doctor")


def _with_proposals(context: Context, findings: Sequence[Finding]) -> list[Finding]:
    """Put the option values that findings propose into all remedies that start a daemon.

    These remedies are the text that `start_command` returned for the doctor's own options.
    """
    proposed: dict[str, str] = {}
    for finding in findings:
        proposed |= finding.proposes
    if "cache_dir" in proposed:
        # The capacity was proposed for the disk that the cache should not be on.
        proposed.pop("capacity", None)
    command = printable(redact(start_command(context)))
    better_command = printable(redact(start_command(context, proposed)))
    return [
        replace(finding, remedy=better_command) if finding.remedy == command else finding
        for finding in findings
    ]


def print_report(findings: Sequence[Finding], counts: Mapping[str, int]) -> None:
    """Print the findings by family and url, each with its cause and fix, and a summary.

    Args:
        findings: the findings.
        counts: number of findings in each state.
    """
    console = common.make_console()
    for (family, url), group in groupby(findings, attrgetter("family", "subject")):
        heading = Text.assemble((family, "bold"))
        if url:
            heading.append(f"  {url}")
        console.print(heading)
        for finding in group:
            _print_finding(console, finding)
    _print_summary(console, findings, counts)


def _print_finding(console: Console, finding: Finding) -> None:
    """Print a finding in columns: sign, state, check, and what was found."""
    sign, style = SIGNS[finding.state]
    _, _, name = finding.check.partition(".")
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, width=_STATE_WIDTH)
    grid.add_column(no_wrap=True, width=_NAME_WIDTH)
    grid.add_column(overflow="fold")
    # The sign and the state repeat what the colour says, since not everybody sees colours.
    grid.add_row(
        Text(sign, style),
        Text(finding.state, style),
        name.replace("_", " "),
        Text(finding.found),
    )
    if finding.cause:
        grid.add_row("", "", Text("  why", "dim"), Text(finding.cause))
    console.print(Padding(grid, (0, 0, 0, 2), expand=False))
    if finding.remedy:
        # The remedy is not in the grid: the terminal wraps it, not rich, so that it can be copied
        # as one command.
        label = "  fix".ljust(_NAME_WIDTH + 1)
        line = Text.assemble((_INDENT + label, "dim"), finding.remedy)
        console.print(line, soft_wrap=True)


def _print_summary(
    console: Console,
    findings: Sequence[Finding],
    counts: Mapping[str, int],
) -> None:
    """Print the numbers of failures and warnings, and the problem to fix first."""
    failures = "no check failed"
    if counts["failed"]:
        failures = f"{common.quantity(counts['failed'], 'check')} failed"
    console.print(Text(f"{failures}, {common.quantity(counts['warning'], 'warning')}", "bold"))
    fixable = [finding for finding in findings if finding.remedy]
    failures_to_fix = [finding for finding in fixable if finding.state == "failed"]
    warnings_to_fix = [finding for finding in fixable if finding.state == "warning"]
    most_urgent = failures_to_fix or warnings_to_fix
    if most_urgent:
        # The first problem should be fixed first, since later checks depend on earlier ones.
        first = most_urgent[0]
        console.print(f"do first ({first.check}): {first.remedy}", markup=False, soft_wrap=True)
