"""Findings: a fact, its severity, its cause, and the command that mends it."""

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
    """How bad it is; only FAILED makes the command fail."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        check: stable name, `family.what`.
        state: how bad it is.
        found: what was seen, a phrase without a full stop.
        cause: why it is so, or what comes of it; empty where all is well.
        remedy: the command, or else the words, that mend it; empty where all is well.
        subject: the url it is about; empty for the node.
        figures: what was measured, with the unit in each name.
    """

    check: str
    state: State
    found: str
    cause: str = ""
    remedy: str = ""
    subject: str = ""
    figures: Figures = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return every field by its name."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """Build from what `to_json` gave."""
        return cls(**{**row, "state": State(row["state"])})


def ok(check: str, found: str, *, subject: str = "", figures: Figures = _NOTHING) -> Finding:
    """Return that all is well."""
    return _finding(check, State.OK, found, subject=subject, figures=figures)


def skipped(check: str, why: str, *, subject: str = "") -> Finding:
    """Return why nothing was looked at."""
    return _finding(check, State.SKIPPED, why, subject=subject)


def warning(
    check: str, found: str, cause: str, remedy: str, *, subject: str = "", figures: Figures = _NOTHING
) -> Finding:
    """Return what works, but not as well as it could or not for long."""
    return _finding(check, State.WARNING, found, cause, remedy, subject, figures)


def failed(
    check: str, found: str, cause: str, remedy: str, *, subject: str = "", figures: Figures = _NOTHING
) -> Finding:
    """Return what keeps shards from being fetched, kept or read."""
    return _finding(check, State.FAILED, found, cause, remedy, subject, figures)


def of_error(check: str, error: ShardcacheError, cause: str = "", *, subject: str = "", command: str = "") -> Finding:
    """Return an error as what it means here; `command` helps to follow its remedy."""
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
