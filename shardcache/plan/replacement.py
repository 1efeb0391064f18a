"""Which shards go when space is needed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A shard that may be evicted: no lease holds it."""

    key: str
    size_bytes: int


def choose_victims(
    candidates: Iterable[Candidate],
    wanted_bytes: int,
    next_use: Callable[[str], float],
    needed_in: float,
) -> list[str] | None:
    """Return the keys of the first candidates that free `wanted_bytes` together, or None when they cannot.

    Candidates come least recently used first. One that is needed before the shard which it would make room for
    (`needed_in`), or at the same time, stays: evicting it would only move the miss (Cao et al. 1995, rule 3).
    """
    victims: list[str] = []
    for candidate in candidates:
        if wanted_bytes <= 0:
            break
        if next_use(candidate.key) > needed_in:
            victims.append(candidate.key)
            wanted_bytes -= candidate.size_bytes
    return victims if wanted_bytes <= 0 else None
