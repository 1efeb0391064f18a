"""The stage of `map`, and of a function given as `decode`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Map:
    """Makes one item of each; see `ItemStage`.

    Attributes:
        apply: the user's function itself, as a method would be one more call for each sample.
    """

    apply: Callable[[Any], Any]

    leaves_out: ClassVar[bool] = False
