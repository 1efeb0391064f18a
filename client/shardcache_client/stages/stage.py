"""What a stage is: it regroups the samples of a rank, and says after each group where to read on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from shardcache_client.order.rounds import Topology

Agree = Callable[[str, int], int]
"""Returns the greatest value that any rank passes under a name, once all have passed one."""


class Placed(NamedTuple):
    """An item, and its place among those of its reader's epoch."""

    place: int
    item: Any


class Mark(NamedTuple):
    """Where a reader is in its epoch, after what a stage has given.

    The same reader reads on from `place` and makes the group again, without what was given of it. Others, among whom
    the rest is divided anew, leave out single places.

    Attributes:
        place: the first place of the group of samples that is being given, or of the next.
        group: number of groups before it.
        given: number of items that were given of it.
        beyond: bits: the nth says that the sample at `place + n` was given, or refused.
        again: number of places, from `place` on, that were given before the group: a sample of them is repeated if the
            group has none.
    """

    place: int = 0
    group: int = 0
    given: int = 0
    beyond: int = 0
    again: int = 0

    @property
    def first(self) -> int:
        """The first place of the group."""
        return self.place + self.again


@dataclass(frozen=True, slots=True)
class StageRun:
    """What a stage knows of the epoch that it regroups.

    Attributes:
        reader: the rank, or its worker in a plain DataLoader.
        seed: of the dataset.
        epoch: number of the epoch.
        start: where the reader resumes.
        places: number of the reader's places in the epoch; None if it is not known.
    """

    reader: Topology
    seed: int
    epoch: int
    start: Mark
    places: int | None


class Stage(Protocol):
    """A stage of a dataset. Can be pickled if its functions can."""

    @property
    def name(self) -> str:
        """What its groups depend on: a stage of another name makes other groups."""

    @property
    def is_in_step(self) -> bool:
        """True if readers of all ranks pass the same places, so that one rank's state tells where all are."""

    def regrouped(self, samples: Iterator[Placed], run: StageRun) -> Iterator[tuple[Any, Mark]]:
        """Yield what the stage makes of the samples from `run.start` on, each with the mark after it.

        Ranks that train together are given equally many. Raises what the stage's functions raise.
        """


def one_by_one(samples: Iterator[Placed]) -> Iterator[tuple[Any, Mark]]:
    """Yield the samples as they are, each with the mark after it."""
    for place, item in samples:
        yield item, Mark(place + 1)
