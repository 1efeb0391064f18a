"""Targets of fuzzing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fuzz import answers, files, mutators, sessions

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Target:
    """A function that takes any bytes and raises only when a promise is broken.

    Attributes:
        check: the function.
        mutate: how inputs are changed, where libFuzzer's own way would seldom get past a checksum.
        what: was done, in a few words.
    """

    check: Callable[[bytes], None]
    what: str
    mutate: Callable[[bytes, int, int, mutators.Mutate], bytes] | None = None


TARGETS = {
    "tar": Target(files.whole, "any bytes as a tar", mutators.tar),
    "arriving": Target(files.arriving, "any bytes as a tar that arrives", mutators.tar),
    "sidecar": Target(files.sidecar, "any bytes as a sidecar", mutators.sidecar),
    "message": Target(sessions.message, "any bytes as a reader's message", mutators.lines),
    "session": Target(sessions.session, "any messages to a daemon", mutators.lines),
    "answers": Target(answers.check, "any answers to a reader", mutators.lines),
}


def kept(kind: str, name: str) -> list[Path]:
    """Return a target's inputs that are kept: its `corpus`, or what was `found` with it."""
    return sorted((FOLDER / kind / name).glob("*"))
