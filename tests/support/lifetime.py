"""Context managers of several parts, which end in reverse order."""

from contextlib import ExitStack
from typing import Self


class Lifetime:
    """A context manager that begins its parts on entering, and ends them on leaving or failing.

    Attributes:
        parts: more parts, which are to end with the others, may be added to it within the block.
    """

    parts: ExitStack

    def begin(self) -> None:
        """Begin each part and add it, or what ends it, to `parts`."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        with ExitStack() as self.parts:
            self.begin()
            self.parts = self.parts.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.parts.close()
