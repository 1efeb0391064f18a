"""Stages of a transfer, and the time spent in each.

A stage is the step that a transfer is in, such as downloading. Status pages and timelines show the
stages. The stages of a transfer also give the causes of a reader's wait for that transfer.
"""

import enum
import itertools
import math
import time
from collections import defaultdict
from typing import NamedTuple


class Stage(enum.StrEnum):
    """Stage of a transfer, in human-readable words."""

    ASKING = "asking the object store for the shard's version"
    SPACE = "waiting for space in the cache"
    NETWORK = "downloading from the object store"
    DISK = "checking and indexing"


class _Begun(NamedTuple):
    """A stage that was begun."""

    stage: Stage
    since_s: float  # by the monotonic clock


class Stages:
    """History of a transfer's stages, each with its start by the monotonic clock."""

    def __init__(self, stage: Stage = Stage.ASKING, since_s: float | None = None) -> None:
        """Begin in a stage.

        Args:
            stage: the first stage.
            since_s: its start by the monotonic clock; None for now.
        """
        begun_s = time.monotonic() if since_s is None else since_s
        self._begun = [_Begun(stage, begun_s)]

    @property
    def present(self) -> Stage:
        """The current stage."""
        return self._begun[-1].stage

    @property
    def present_since_s(self) -> float:
        """Start of the current stage."""
        return self._begun[-1].since_s

    def enter(self, stage: Stage) -> None:
        """Begin a stage."""
        self._begun.append(_Begun(stage, time.monotonic()))

    def spent_s(self, since_s: float, until_s: float) -> dict[Stage, float]:
        """Return the time spent in each stage during an interval of the monotonic clock.

        Stages without any time in the interval are left out.
        """
        totals_s: defaultdict[Stage, float] = defaultdict(float)
        end = _Begun(self.present, math.inf)  # the present stage has no end yet
        for begun, following in itertools.pairwise([*self._begun, end]):
            # The part of the stage, from its start to that of the next, within the interval.
            overlap_s = min(until_s, following.since_s) - max(since_s, begun.since_s)
            if overlap_s > 0:
                totals_s[begun.stage] += overlap_s
        return totals_s
