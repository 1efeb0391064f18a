"""Who waits for a shard, since when, and for which stage of its way."""

from __future__ import annotations

import enum
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass
from typing import Protocol


class Stage(enum.StrEnum):
    """What a transfer is at, in words for people."""

    ASKING = "asking the store for its version"
    SPACE = "waiting for space in the cache"
    NETWORK = "downloading from the store"
    DISK = "checking and indexing"


class Stages:
    """The stages that a transfer went through and when each began, by the monotonic clock."""

    def __init__(self) -> None:
        self._begun: list[tuple[Stage, float]] = [(Stage.ASKING, time.monotonic())]

    def __repr__(self) -> str:
        return f"Stages({' → '.join(stage.name.lower() for stage, _ in self._begun)})"

    @property
    def present(self) -> Stage:
        """The one that it is at."""
        return self._begun[-1][0]

    @property
    def present_since_s(self) -> float:
        """When that began."""
        return self._begun[-1][1]

    def enter(self, stage: Stage) -> None:
        """Begin a stage."""
        self._begun.append((stage, time.monotonic()))

    @property
    def begun_s(self) -> float:
        """When the first one began."""
        return self._begun[0][1]

    def between(self, since_s: float, until_s: float) -> Iterator[tuple[Stage, float, float]]:
        """Yield each stage that fell between two moments, and from when to when it did; some come more than once."""
        for (stage, begun_s), (_, ended_s) in itertools.pairwise([*self._begun, (Stage.DISK, math.inf)]):
            first_s, last_s = max(since_s, begun_s), min(until_s, ended_s)
            if first_s < last_s:
                yield stage, first_s, last_s

    def spent_s(self, since_s: float, until_s: float) -> dict[Stage, float]:
        """Return how much of the time between two moments fell into each stage."""
        spent_s: defaultdict[Stage, float] = defaultdict(float)
        for stage, first_s, last_s in self.between(since_s, until_s):
            spent_s[stage] += last_s - first_s
        return spent_s


class Holder(Protocol):
    """A reader, as far as it keeps shards in place."""

    def in_hand(self) -> int:
        """Return how many shards it keeps in place."""

    def kept_waiting(self) -> Collection[Holder]:
        """Return the readers that keep their shards until this one has its own."""


@dataclass(slots=True, eq=False)
class Wait:
    """One asker's wait for a shard, or for more of one.

    Attributes:
        party: the job that it is part of; None for what is no job's.
        since_s: when the reader had nothing to read any more; None while it has.
        partial: whether it would read a shard that is still arriving.
        stages: those of the transfer that it waits for, once there is one.
        holder: the reader that waits; None for a wait that is no reader's.
        url: of the shard; empty for what is no reader's.
    """

    party: Hashable | None = None
    since_s: float | None = None
    partial: bool = False
    stages: Stages | None = None
    holder: Holder | None = None
    url: str = ""
