"""The interface of stages that regroup a rank's samples, and mark the position after each item."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from shardcache_client.order.sequences.rounds import Topology

Agree = Callable[[str, int], int]
"""Returns the greatest value that any rank passes under a name, once all have passed one."""


class Placed(NamedTuple):
    """An item, and its place among those of its reader's epoch."""

    place: int
    item: Any


class Mark(NamedTuple):
    """A reader's position in its epoch, between two items that a stage gives.

    The same reader resumes at `place`, makes the group again, and leaves out the items of the group
    that were given. Other readers, among whom the rest is divided, leave out single places.

    Attributes:
        place: the first place of the group of samples that is being given, or of the next one; with
            `again`, an earlier place.
        group: number of groups before this one.
        given: number of items of the group that were given.
        beyond: bit n is set if the sample at `place + n` was given, or refused.
        again: number of places, from `place` on, that were given before the group: a sample of them
            is repeated if the group has none.
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
    """A stage of a dataset that regroups samples. Can be pickled if its functions can."""

    @property
    def name(self) -> str:
        """Identifier of its groups: a stage of another name makes other groups."""

    @property
    def is_in_step(self) -> bool:
        """True if the readers of all ranks pass the same places: one's state is that of all."""

    def regrouped(self, samples: Iterator[Placed], facts: EpochFacts) -> Iterator[tuple[Any, Mark]]:
        """Yield the items that the stage makes of samples, each with the mark after it.

        Ranks that train together get equal numbers of items. Raises what the stage's functions
        raise.

        Args:
            samples: those from `facts.start` on.
            facts: about the epoch.
        """


def one_by_one(samples: Iterator[Placed]) -> Iterator[tuple[Any, Mark]]:
    """Yield the samples as they are, each with the mark after it."""
    for place, item in samples:
        yield item, Mark(place + 1)
