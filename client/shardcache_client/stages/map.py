"""The stage of `map`, and of a function given as `decode`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Map:
    """Turns each item into another by the user's function; see `ItemStage`.

    Attributes:
        apply: the user's function. It is an attribute, because a method that calls it would be one
            more call for each sample.
    """

    apply: Callable[[Any], Any]

    leaves_out: ClassVar[bool] = False
