"""Findings: a fact with its severity, its cause, and the command that fixes it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Self

from shardcache.errors import ShardcacheError
from shardcache.redact import printable, redact

Figures = Mapping[str, float]
_NOTHING: Figures = MappingProxyType({})


class Severity(enum.StrEnum):
    """Severity of a finding; only FAILED makes the command fail."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        check: stable name, `family.check`; empty until `named`.
        state: severity.
        found: the observation, a phrase without a full stop.
        cause: the reason, or the consequence; empty for `OK`.
        remedy: the command, or else advice, that fixes it; empty for `OK`.
        subject: the url concerned; empty for the node.
        figures: measurements, with the unit in each name.
    """

    check: str
    state: Severity
    found: str
    cause: str = ""
    remedy: str = ""
    subject: str = ""
    figures: Figures = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return every field by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """Build a finding from the output of `to_json`."""
        return cls(**{**row, "state": Severity(row["state"])})

    def named(self, check: str, subject: str = "") -> Self:
        """Return the finding with the names of its check and its url; those that it already has stay."""
        return replace(self, check=self.check or check, subject=self.subject or printable(redact(subject)))


def ok(found: str, *, figures: Figures = _NOTHING) -> Finding:
    """Return a finding that nothing is wrong."""
    return _finding(Severity.OK, found, figures=figures)


def skipped(why: str) -> Finding:
    """Return a finding that the check was skipped, with the reason."""
    return _finding(Severity.SKIPPED, why)


def warning(found: str, cause: str, remedy: str, *, figures: Figures = _NOTHING) -> Finding:
    """Return a finding of something that works, but poorly or not for long."""
    return _finding(Severity.WARNING, found, cause, remedy, figures)


def failed(found: str, cause: str, remedy: str, *, figures: Figures = _NOTHING) -> Finding:
    """Return a finding of something that keeps shards from being fetched, kept or read."""
    return _finding(Severity.FAILED, found, cause, remedy, figures)


def of_error(error: ShardcacheError, cause: str = "", *, command: str = "") -> Finding:
    """Return the finding of a failure for an error; `command` helps to carry out the error's remedy."""
    return failed(error.message, cause, f"{command}   # {error.remedy}" if command else error.remedy)


def _finding(state: Severity, found: str, cause: str = "", remedy: str = "", figures: Figures = _NOTHING) -> Finding:
    found, cause, remedy = (printable(redact(text)) for text in (found, cause, remedy))
    return Finding("", state, found, cause, remedy, figures=dict(figures))
