"""All sessions' plans merged: how soon each shard is needed, and which missing one is needed first.

Pure: no I/O, no clock. The measure of time is a session's own: the number of shards that it will read before this
one. A waiting reader's shard is 0 away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

NEVER = math.inf


@dataclass(slots=True)
class _Course:
    """One session's plan: shards in reading order, and how far it has come.

    `frontier` is the first position that may still be missing; everything before it was seen to be present.
    """

    shards: Sequence[str]
    cursor: int = 0
    frontier: int = 0
    positions: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for position, shard in enumerate(self.shards):
            self.positions.setdefault(shard, []).append(position)

    def next_position(self, shard: str) -> int | None:
        """Return where the shard is read next, at or after the cursor."""
        positions = self.positions.get(shard, ())
        return next((position for position in positions if position >= self.cursor), None)


class Timeline:
    """The plans of all sessions, by session."""

    def __init__(self) -> None:
        self._courses: dict[Hashable, _Course] = {}

    def __repr__(self) -> str:
        return f"Timeline(sessions={len(self._courses)})"

    def declare(self, session: Hashable, shards: Sequence[str]) -> None:
        """Set or replace a session's plan: shards, by name, in the order in which it will read them."""
        self._courses[session] = _Course(shards)

    def advance(self, session: Hashable, position: int) -> None:
        """Note that a session reads at `position` now; it never goes back."""
        course = self._courses.get(session)
        if course is not None:
            course.cursor = max(course.cursor, position)
            course.frontier = max(course.frontier, course.cursor)

    def forget(self, session: Hashable) -> None:
        """Drop a session and its plan."""
        self._courses.pop(session, None)

    def next_use(self, shard: str) -> float:
        """Return how many shards some session reads before it needs this one: the least of all, or NEVER."""
        return min(self._distances(shard), default=NEVER)

    def _distances(self, shard: str) -> Iterator[int]:
        for course in self._courses.values():
            position = course.next_position(shard)
            if position is not None:
                yield position - course.cursor

    def evicted(self, shard: str) -> None:
        """Note that a shard is missing again."""
        for course in self._courses.values():
            position = course.next_position(shard)
            if position is not None:
                course.frontier = min(course.frontier, position)

    def next_missing(self, present: Callable[[str], bool]) -> tuple[str, float] | None:
        """Return the missing shard that is needed soonest and its distance, or None when all are present."""
        best: tuple[str, float] | None = None
        for course in self._courses.values():
            while course.frontier < len(course.shards) and present(course.shards[course.frontier]):
                course.frontier += 1
            distance = course.frontier - course.cursor
            if course.frontier < len(course.shards) and (best is None or distance < best[1]):
                best = course.shards[course.frontier], distance
        return best
