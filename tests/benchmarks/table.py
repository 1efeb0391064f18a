"""The one table of results, for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table


@dataclass(frozen=True, slots=True)
class Target:
    """Limit to be reached: at least (`≥`), at most (`≤`) or exactly (`=`, to two decimals)."""

    sign: str
    limit: float

    def __str__(self) -> str:
        return f"{self.sign} {self.limit:g}"

    def met_by(self, value: float) -> bool:
        """Return whether the value reaches the target."""
        if self.sign == "=":
            return round(value, 2) == self.limit
        return value >= self.limit if self.sign == "≥" else value <= self.limit


@dataclass(frozen=True, slots=True)
class Row:
    """One line: our figure, next to a peer's of the same kind (best or median) where there is a peer.

    Attributes:
        target: for the ratio where there is a peer, else for the figure; None for what is shown as a mark only.
    """

    part: str  # which benchmark
    measure: str  # what was measured, with its unit
    ours: float
    peer: str | None = None  # who is compared, or None where the figure itself has the target
    theirs: float | None = None
    target: Target | None = None

    @property
    def ratio(self) -> float | None:
        """Our figure divided by the peer's."""
        return self.ours / self.theirs if self.theirs else None

    @property
    def met(self) -> bool | None:
        """True if the target is reached; None without a target."""
        judged = self.ours if self.peer is None else self.ratio
        return None if self.target is None or judged is None else self.target.met_by(judged)

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON, ratio and verdict included."""
        target = None if self.target is None else str(self.target)
        return {**asdict(self), "target": target, "ratio": self.ratio, "met": self.met}


def render(rows: Sequence[Row], title: str) -> Table:
    """Return the table for a terminal."""
    table = Table(title=title, title_justify="left")
    for name in ("part", "measure"):
        table.add_column(name)
    for name in ("shardcache", "peer", "peer's", "ratio", "target", ""):
        table.add_column(name, justify="left" if name == "peer" else "right")
    for before, row in zip((None, *rows), rows, strict=False):
        if before is not None and before.part != row.part:
            table.add_section()
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> tuple[str, ...]:
    verdict = {True: "[green]met[/]", False: "[red]missed[/]", None: ""}[row.met]
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    theirs = "" if row.theirs is None else _figure(row.theirs)
    return (
        *(row.part, row.measure, _figure(row.ours), row.peer or ""),
        *(theirs, ratio, "" if row.target is None else str(row.target), verdict),
    )


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
