"""The interface of stages that make at most one item of each: `map`, `filter`, decoding."""

from asyncio import CancelledError
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

ENDS = (StopIteration, GeneratorExit, CancelledError)
"""Exceptions of a user's function that would silently end what runs it: the epoch, or a worker."""


class Dropped(Enum):
    """Results of a stage that are not yielded."""

    FILTERED = "filter() rejected the sample"
    INCOMPLETE = "a member is missing, and missing='skip'"


class ItemStage(Protocol):
    """A stage that makes at most one item of each. Can be pickled if its functions can.

    It knows one item at a time: no position, no rank. So samples keep their numbers, whoever runs
    it, unless it leaves some out. A stage that makes groups of several samples is a `Stage`.
    """

    @property
    def leaves_out(self) -> bool:
        """True if it may leave items out, without an error."""

    @property
    def apply(self) -> Callable[[Any], Any]:
        """Returns what becomes of an item, or a `Dropped`; may raise anything."""
