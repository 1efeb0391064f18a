"""The report as text: one line per finding; below each problem, its cause and fix."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardcache.cache.operations.origin_probe.findings import Finding, State
from shardcache.cli.display.output import count as counted
from shardcache.cli.doctor.runner import count

# A sign and a word: not everybody sees colours.
_SIGNS = {State.OK: "✓", State.WARNING: "!", State.FAILED: "✗", State.SKIPPED: "-"}
_MEND = " " * 12 + "  fix         "
_STYLES = {State.OK: "green", State.WARNING: "yellow", State.FAILED: "bold red", State.SKIPPED: "dim"}


def show(console: Console, findings: Sequence[Finding]) -> None:
    """Print the findings by family and url, and a summary."""
    for (family, subject), group in groupby(findings, _heading):
        console.print(Text.assemble((family, "bold"), f"  {subject}" if subject else ""))
        for finding in group:
            console.print(Padding(_line(finding), (0, 0, 0, 2), expand=False))
            if finding.remedy:
                # Wrapped by the terminal, so that it can be copied as one command.
                console.print(Text.assemble((_MEND, "dim"), finding.remedy), soft_wrap=True)
    console.print(Text(_sum(findings), "bold"))


def _heading(finding: Finding) -> tuple[str, str]:
    family = finding.check.partition(".")[0]
    return ("store" if finding.subject else family, finding.subject)


def _line(finding: Finding) -> Table:
    line, style = Table.grid(padding=(0, 1)), _STYLES[finding.state]
    line.add_column(no_wrap=True)
    line.add_column(no_wrap=True, width=7)
    line.add_column(no_wrap=True, width=13)
    line.add_column(overflow="fold")
    what = finding.check.partition(".")[2].replace("_", " ")
    line.add_row(Text(_SIGNS[finding.state], style), Text(finding.state, style), what, Text(finding.found))
    if finding.cause:
        line.add_row("", "", Text("  why", "dim"), Text(finding.cause))
    return line


def _sum(findings: Sequence[Finding]) -> str:
    failures, warnings = count(findings, State.FAILED), count(findings, State.WARNING)
    if failures:
        return f"{counted(failures, 'check')} failed, {counted(warnings, 'warning')}"
    return f"no check failed, {counted(warnings, 'warning')}"
