"""The stage of `filter`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from shardcache_client.stages.item_stage import Dropped


@dataclass(frozen=True, slots=True)
class Filter:
    """Leaves out the items for which the user's function returns a false value; see `ItemStage`.

    Attributes:
        function: the user's function.
    """

    function: Callable[[Any], object]

    leaves_out: ClassVar[bool] = True

    def apply(self, item: Any) -> Any:
        """Return the item, or a `Dropped` if it is left out."""
        if self.function(item):
            return item
        return Dropped.FILTERED
