"""The interface of stages that regroup a rank's samples, and mark the position after each item.

A stage turns a reader's samples into items such as batches or blocks, in groups. A reader is a
rank, or one of its workers in a plain DataLoader. A place is a position in the reader's order of
samples; a mark is the reader's position between two items, from which it can resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from shardcache_client.order.topology import Topology

Agree = Callable[[str, int], int]
"""Returns the greatest value that any rank passes under a name, once all ranks have passed one."""


class Placed(NamedTuple):
    """An item with its place.

    Attributes:
        place: the item's place in its reader's epoch, from 0; -1 for no item.
        item: the item.
    """

    place: int
    item: Any


class Mark(NamedTuple):
    """A reader's position in its epoch, between two items that a stage gives.

    If the numbers of ranks and workers are the same after a resume, the same reader resumes at
    `place`, makes the group again, and leaves out the items of the group that were given. If they
    differ, the rest is divided among other readers, which leave out single places by `beyond`.

    Attributes:
        place: the first place of the group that is being given, or of the next group; if `again` is
            not 0, an earlier place.
        group: number of groups before this group.
        given: number of items of the group that were given.
        beyond: bit n is set if the sample at `place + n` was given, or refused.
        again: number of places from `place` to the group's first place. Their samples were given; a
            reader that resumes reads them again, to repeat one of them if the group has no sample.
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
class EpochFacts:
    """Facts about the epoch that a stage regroups.

    Attributes:
        reader: the rank, or its worker in a plain DataLoader.
        seed: the dataset's seed.
        epoch: number of the epoch.
        start: the mark from which the epoch is read.
        places: number of the reader's places in the epoch; None if it is unknown.
    """

    reader: Topology
    seed: int
    epoch: int
    start: Mark
    places: int | None


class Stage(Protocol):
    """A stage of a dataset that regroups samples. Can be pickled if its functions can."""

    @property
    def name(self) -> str:
        """Identifier of the way in which the stage groups samples, kept in states.

        A stage with another name makes other groups, and cannot resume within a group.
        """

    @property
    def is_in_step(self) -> bool:
        """True if all ranks are at the same places after the same number of items.

        The state of one rank is then enough to resume all ranks.
        """

    def regrouped(self, samples: Iterator[Placed], facts: EpochFacts) -> Iterator[tuple[Any, Mark]]:
        """Yield the items that the stage makes of samples, each with the mark after it.

        Ranks that train together get equal numbers of items. Raises any error of the stage's
        functions.

        Args:
            samples: the reader's samples from `facts.start` on.
            facts: facts about the epoch.
        """


def one_by_one(samples: Iterator[Placed]) -> Iterator[tuple[Any, Mark]]:
    """Yield the samples as they are, each with the mark after it."""
    for place, item in samples:
        yield item, Mark(place + 1)
