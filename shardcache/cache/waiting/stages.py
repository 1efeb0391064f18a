"""Stages of a transfer, and the time spent in each."""

import enum
import itertools
import math
import time
from collections import defaultdict


class Stage(enum.StrEnum):
    """Stage of a transfer, in human-readable words."""

    ASKING = "asking the object store for the shard's version"
    SPACE = "waiting for space in the cache"
    NETWORK = "downloading from the object store"
    DISK = "checking and indexing"


class Stages:
    """History of a transfer's stages, each with its start by the monotonic clock."""

    def __init__(self, stage: Stage = Stage.ASKING, since_s: float | None = None) -> None:
        """Begin in a stage, now or at a time by the monotonic clock."""
        begun_s = time.monotonic() if since_s is None else since_s
        self._begun: list[tuple[Stage, float]] = [(stage, begun_s)]

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

    def spent_s(self, since_s: float, until_s: float) -> dict[Stage, float]:
        """Return the time spent in each stage during an interval."""
        spent_s: defaultdict[Stage, float] = defaultdict(float)
        present_goes_on = (self.present, math.inf)
        starts = [*self._begun, present_goes_on]
        for (stage, begun_s), (_, ended_s) in itertools.pairwise(starts):
            overlap_s = min(until_s, ended_s) - max(since_s, begun_s)
            if overlap_s > 0:
                spent_s[stage] += overlap_s
        return spent_s
