"""Whose turn it is among parties that are equal otherwise."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count

_REMEMBERED = 1024


class Rotation:
    """Remembers, of the parties served last, which of them was served longest ago."""

    def __init__(self) -> None:
        self._turns = count(1)
        self._last: dict[Hashable, int] = {}  # who was served last is at the end

    def serve(self, party: Hashable) -> Hashable:
        """Note that it is this party's turn now; return the one that is forgotten for it, or None."""
        self._last.pop(party, None)
        self._last[party] = next(self._turns)
        if len(self._last) <= _REMEMBERED:
            return None
        forgotten = next(iter(self._last))
        del self._last[forgotten]
        return forgotten

    def last(self, party: Hashable) -> int:
        """Return when a party had its last turn, as a number that grows; 0 for never."""
        return self._last.get(party, 0)
