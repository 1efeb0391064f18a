"""Waits for shards, and the stages of the transfers being waited for."""

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
    """Stage of a transfer, in human-readable words."""

    ASKING = "asking the object store for the shard's version"
    SPACE = "waiting for space in the cache"
    NETWORK = "downloading from the object store"
    DISK = "checking and indexing"


class Stages:
    """History of a transfer's stages, each with its start by the monotonic clock."""

    def __init__(self) -> None:
        self._begun: list[tuple[Stage, float]] = [(Stage.ASKING, time.monotonic())]

    def __repr__(self) -> str:
        return f"Stages({' → '.join(stage.name.lower() for stage, _ in self._begun)})"

    @property
    def present(self) -> Stage:
        """The current stage."""
        return self._begun[-1][0]

    @property
    def present_since_s(self) -> float:
        """Start of the current stage."""
        return self._begun[-1][1]

    def enter(self, stage: Stage) -> None:
        """Begin a stage."""
        self._begun.append((stage, time.monotonic()))

    @property
    def begun_s(self) -> float:
        """Start of the first stage."""
        return self._begun[0][1]

    def between(self, since_s: float, until_s: float) -> Iterator[tuple[Stage, float, float]]:
        """Yield stage, start and end of each part of a time interval; a stage may occur more than once."""
        for (stage, begun_s), (_, ended_s) in itertools.pairwise([*self._begun, (Stage.DISK, math.inf)]):
            first_s, last_s = max(since_s, begun_s), min(until_s, ended_s)
            if first_s < last_s:
                yield stage, first_s, last_s

    def spent_s(self, since_s: float, until_s: float) -> dict[Stage, float]:
        """Return the time spent in each stage during an interval."""
        spent_s: defaultdict[Stage, float] = defaultdict(float)
        for stage, first_s, last_s in self.between(since_s, until_s):
            spent_s[stage] += last_s - first_s
        return spent_s


class Holder(Protocol):
    """A reader, as the owner of holds on shards."""

    def leased_shards(self) -> int:
        """Return the number of shards held for the reader."""

    def kept_waiting(self) -> Collection[Holder]:
        """Return the readers that keep their shards until this one gets its own."""


@dataclass(slots=True, eq=False)
class Wait:
    """One caller's wait for a shard, or for more of an arriving one.

    Attributes:
        party: the reader's job; None outside a job.
        since_s: when the reader began to wait; None while it still has something to read.
        partial: True if the caller accepts a shard that is still arriving.
        stages: the stages of the transfer being waited for, once there is one.
        holder: the waiting reader; None if the caller is not a reader.
    """

    party: Hashable | None = None
    since_s: float | None = None
    partial: bool = False
    stages: Stages | None = None
    holder: Holder | None = None
