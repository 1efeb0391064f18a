"""The interface of stages that make at most one item of each: `map`, `filter`, decoding."""

from asyncio import CancelledError
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

ENDS = (StopIteration, GeneratorExit, CancelledError)
"""Exceptions by which a user's function would silently end the epoch, or its worker."""


class Dropped(Enum):
    """Results of a stage in place of an item that is left out, each with the reason."""

    FILTERED = "filter() rejected the sample"
    INCOMPLETE = "a member is missing, and missing='skip'"


class ItemStage(Protocol):
    """A stage that makes at most one item of each. Can be pickled if its functions can.

    It knows one item at a time, and neither position nor rank. So samples keep their numbers in any
    process that runs it, unless it leaves some out. A stage that makes groups of several samples is
    a `Stage`.
    """

    @property
    def leaves_out(self) -> bool:
        """True if it may leave items out, without an error."""

    @property
    def apply(self) -> Callable[[Any], Any]:
        """Function from an item to the one made of it, or to a `Dropped`; it may raise anything."""
