"""Findings: a fact with its severity, its cause, and the command that fixes it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Self

from shardcache.errors import ShardcacheError
from shardcache.redact import printable, redact

Figures = Mapping[str, float]
_NOTHING: Figures = MappingProxyType({})


class State(enum.StrEnum):
    """Severity of a finding; only FAILED makes the command fail."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        check: stable name, `family.check`.
        state: severity.
        found: the observation, a phrase without a full stop.
        cause: the reason, or the consequence; empty for `OK`.
        remedy: the command, or else advice, that fixes it; empty for `OK`.
        subject: the url concerned; empty for the node.
        figures: measurements, with the unit in each name.
    """

    check: str
    state: State
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
        return cls(**{**row, "state": State(row["state"])})


def ok(check: str, found: str, *, subject: str = "", figures: Figures = _NOTHING) -> Finding:
    """Return a finding that nothing is wrong."""
    return _finding(check, State.OK, found, subject=subject, figures=figures)


def skipped(check: str, why: str, *, subject: str = "") -> Finding:
    """Return a finding that the check was skipped, with the reason."""
    return _finding(check, State.SKIPPED, why, subject=subject)


def warning(
    check: str, found: str, cause: str, remedy: str, *, subject: str = "", figures: Figures = _NOTHING
) -> Finding:
    """Return a finding of something that works, but poorly or not for long."""
    return _finding(check, State.WARNING, found, cause, remedy, subject, figures)


def failed(
    check: str, found: str, cause: str, remedy: str, *, subject: str = "", figures: Figures = _NOTHING
) -> Finding:
    """Return a finding of something that keeps shards from being fetched, kept or read."""
    return _finding(check, State.FAILED, found, cause, remedy, subject, figures)


def of_error(check: str, error: ShardcacheError, cause: str = "", *, subject: str = "", command: str = "") -> Finding:
    """Return the finding of a failure for an error; `command` helps to carry out the error's remedy."""
    remedy = f"{command}   # {error.remedy}" if command else error.remedy
    return failed(check, error.message, cause, remedy, subject=subject)


def _finding(
    check: str,
    state: State,
    found: str,
    cause: str = "",
    remedy: str = "",
    subject: str = "",
    figures: Figures = _NOTHING,
) -> Finding:
    found, cause, remedy, subject = (printable(redact(text)) for text in (found, cause, remedy, subject))
    return Finding(check, state, found, cause, remedy, subject, dict(figures))
