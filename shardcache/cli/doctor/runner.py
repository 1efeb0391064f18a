"""The table of checks of `shardcache doctor`, the runner of the checks, and the report.

A check is a function that returns findings, the lines of the report. Checks with the same first
part of their name are a family, such as "disk"; the report has a section for each family.
"""

from asyncio import timeout
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

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
from shardcache.cli.doctor.context import Context, Finding, failed, finding_of, start_command
from shardcache.errors import ShardcacheError
from shardcache.redact import printable, redact

Findings = Finding | Sequence[Finding] | None
Check = tuple[str, Callable[[Context], Findings | Awaitable[Findings]]]
"""A check: the name of its findings, `family.check`, and its function, which runs in a thread.

A check that uses asyncio returns a coroutine, which is awaited without a time limit: such a check
only uses the network, and has time-outs of its own. The function raises ShardcacheError or OSError
if the check cannot be carried out.
"""

CHECKS: Sequence[Check] = (
    ("socket.path", daemon_checks.socket_place),
    ("socket.daemon", daemon_checks.listener),
    ("daemon.health", daemon_checks.health),
    ("daemon.refused", daemon_checks.refused),
    ("daemon.s3", s3_checks.endpoint),
    ("config.file", daemon_checks.options),
    ("cache.folder", disk_checks.folder),
    ("cache.filesystem", disk_checks.filesystem),
    ("cache.space", disk_checks.space),
    ("disk.write", disk_checks.speed),
    ("kernel.open_files", kernel_checks.open_files),
    ("kernel.shared_memory", kernel_checks.shared_memory),
    ("tier.bypass", tier_checks.bypasses),
    ("tier.reach", tier_checks.reach),
    ("origin.reach", store_checks.probe),
)

# The sign of each state, and the style of the sign.
SIGNS = {
    "ok": ("✓", "green"),
    "warning": ("!", "yellow"),
    "failed": ("✗", "bold red"),
    "skipped": ("-", "dim"),
}

# Time limit of a check. Checks have shorter time-outs for the network. If a check exceeds this
# limit, then a disk hangs, or the server of a network filesystem.
_LIMIT_S = 30.0

# Layout of a finding.
_STATE_COLUMNS = 7
_NAME_COLUMNS = 13
_INDENT = " " * 12  # aligns the word "fix" with the names of checks


async def examine(
    context: Context,
    checks: Sequence[Check] = CHECKS,
    *,
    limit_s: float = _LIMIT_S,
) -> list[Finding]:
    """Run the checks one after another, and return all findings.

    A check that blocks for longer than `limit_s` is abandoned. If a check cannot be carried out,
    the later checks of its family are skipped, and a single finding says so.
    """
    findings: list[Finding] = []
    skipped_families = set()
    for name, check in checks:
        family, _, _ = name.partition(".")
        if family in skipped_families:
            continue
        try:
            async with timeout(limit_s):
                outcome = await common.in_thread(partial(check, context))
            if isinstance(outcome, Awaitable):
                outcome = await outcome
            if isinstance(outcome, Finding):
                outcome = [outcome]
            findings += [finding.named(name) for finding in outcome or ()]
        except (TimeoutError, ShardcacheError, OSError) as exn:
            skipped_families.add(family)
            # The finding is about doctor itself, which could not check the family.
            unchecked = _unchecked(family, exn, limit_s)
            findings.append(unchecked.named(f"doctor.{family}"))
    return _with_proposals(context, findings)


def _with_proposals(context: Context, findings: Sequence[Finding]) -> list[Finding]:
    """Put the option values that findings propose into all remedies that start a daemon."""
    proposed: dict[str, str] = {}
    for finding in findings:
        proposed |= finding.proposes
    if "cache_dir" in proposed:
        # The capacity was proposed for a disk that should not be used.
        proposed.pop("capacity", None)
    command = printable(redact(start_command(context)))
    better_command = printable(redact(start_command(context, proposed)))
    result = []
    for finding in findings:
        if finding.remedy == command:
            result.append(replace(finding, remedy=better_command))
        else:
            result.append(finding)
    return result


def _unchecked(family: str, error: Exception, limit_s: float) -> Finding:
    """Return the finding that a family could not be checked.

    Args:
        family: name of the family.
        error: the error of the check that could not be carried out.
        limit_s: the time limit of checks, for the text.
    """
    if isinstance(error, ShardcacheError):
        return finding_of(error)
    found = f"the {family} could not be checked"
    if isinstance(error, TimeoutError):
        cause = (
            f"no answer within {limit_s:g} s: a disk or the server of a network filesystem hangs"
        )
        return failed(found, cause, "dmesg | tail -50; mount -t nfs,nfs4,cifs,fuse,lustre")
    return failed(found, str(error), "sudo shardcache doctor")


def show(findings: Sequence[Finding], counts: Mapping[str, int]) -> None:
    """Print the findings by family and url, each with its cause and fix, and a summary.

    Args:
        findings: the findings.
        counts: number of findings in each state.
    """
    console = common.make_console()
    groups = groupby(findings, lambda finding: (finding.family, finding.subject))
    for (family, subject), group in groups:
        console.print(Text.assemble((family, "bold"), f"  {subject}" if subject else ""))
        for finding in group:
            _print_finding(console, finding)
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


def _print_finding(console: Console, finding: Finding) -> None:
    """Print a finding in columns: sign, state, check, and what was found."""
    sign, style = SIGNS[finding.state]
    line = Table.grid(padding=(0, 1))
    line.add_column(no_wrap=True)
    line.add_column(no_wrap=True, width=_STATE_COLUMNS)
    line.add_column(no_wrap=True, width=_NAME_COLUMNS)
    line.add_column(overflow="fold")
    _, _, name = finding.check.partition(".")
    name = name.replace("_", " ")
    # The state and the sign say what the colour says, since not everybody sees colours.
    line.add_row(Text(sign, style), Text(finding.state, style), name, Text(finding.found))
    if finding.cause:
        line.add_row("", "", Text("  why", "dim"), Text(finding.cause))
    console.print(Padding(line, (0, 0, 0, 2), expand=False))
    if finding.remedy:
        # The terminal wraps the remedy, not rich, so that it can be copied as one command.
        console.print(
            Text.assemble((f"{_INDENT}{'  fix':<{_NAME_COLUMNS + 1}}", "dim"), finding.remedy),
            soft_wrap=True,
        )
