"""Outcome of one kind of fault, and the table of all kinds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table


@dataclass(slots=True)
class Result:
    """The count of one kind of fault.

    Attributes:
        part: of the campaign.
        fault: what was done, in a few words.
        injected: how often it really happened, not how often it was asked for.
        wrong: shards, samples or answers of which a byte was not the one in the store.
        hangs: what neither ended nor failed within its limit.
        lost: samples that should have come and did not, or came twice.
        untyped: failures that were no error of `shardcache.errors`; a process that died counts as one.
        recovery_s: from the end of the fault until all was well again, each time; empty where nothing has to recover.
        first_failure: how to see the first thing that went wrong again; empty when nothing did.
    """

    part: str
    fault: str
    injected: int = 0
    wrong: int = 0
    hangs: int = 0
    lost: int = 0
    untyped: int = 0
    recovery_s: list[float] = field(default_factory=list)
    first_failure: str = ""

    @property
    def passed(self) -> bool:
        """True if the fault happened and did no harm."""
        return self.injected > 0 and not (self.wrong or self.hangs or self.lost or self.untyped)

    def fail(self, kind: str, how: str) -> None:
        """Count one `wrong`, `hangs`, `lost` or `untyped`, and keep the first story."""
        setattr(self, kind, getattr(self, kind) + 1)
        self.first_failure = self.first_failure or how

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, the median and the longest recovery in place of all."""
        recovery = {"recovery_median_s": self._median_s, "recovery_most_s": max(self.recovery_s, default=None)}
        return {key: value for key, value in asdict(self).items() if key != "recovery_s"} | recovery

    @property
    def _median_s(self) -> float | None:
        return statistics.median(self.recovery_s) if self.recovery_s else None

    def cells(self) -> tuple[str, ...]:
        """Return its line of the table."""
        harm = (self.wrong, self.hangs, self.lost, self.untyped)
        recovery = f"{self._median_s:.2f} / {max(self.recovery_s):.2f}" if self.recovery_s else ""
        verdict = "[green]ok[/]" if self.passed else "[red]FAILED[/]"
        return (self.part, self.fault, f"{self.injected:,}", *map(str, harm), recovery, verdict)


def render(results: Sequence[Result], title: str) -> Table:
    """Return the table for a terminal."""
    table = Table(title=title, title_justify="left")
    for name in ("part", "fault"):
        table.add_column(name)
    for name in ("injected", "wrong", "hangs", "lost", "untyped", "recovery s (median / most)", ""):
        table.add_column(name, justify="right")
    for before, result in zip((None, *results), results, strict=False):
        if before is not None and before.part != result.part:
            table.add_section()
        table.add_row(*result.cells())
    return table
