"""The interface of stages that turn an item into at most one item: `map`, `filter`, decoding."""

from asyncio import CancelledError
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

SILENT_ENDS = (StopIteration, GeneratorExit, CancelledError)
"""Exceptions that would silently end the epoch, or its worker, if a user's function raised them.

`except Exception` does not catch all of them.
"""


class Dropped(Enum):
    """Results that a stage returns in place of an item that is left out, each with the reason."""

    FILTERED = "filter() rejected the sample"
    INCOMPLETE = "a member is missing, and missing='skip'"


class ItemStage(Protocol):
    """A stage that turns an item into at most one item. Can be pickled if its functions can.

    The stage sees one item at a time, and knows neither position nor rank. So the result is the
    same in any process, and samples keep their numbers unless the stage leaves samples out. A stage
    that makes groups of several samples is a `Stage`.
    """

    @property
    def leaves_out(self) -> bool:
        """True if the stage may leave items out without an error."""

    @property
    def apply(self) -> Callable[[Any], Any]:
        """Function that turns an item into another, or into a `Dropped`; it may raise anything."""
