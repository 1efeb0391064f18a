"""Round-robin among otherwise equal parties."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count

_REMEMBERED = 1024


class RoundRobin:
    """Order in which the most recent parties were last served."""

    def __init__(self) -> None:
        self._turns = count(1)
        self._last: dict[Hashable, int] = {}  # the party served last is at the end

    def serve(self, party: Hashable) -> Hashable:
        """Record a party's turn; return the party forgotten to make room, or None."""
        self._last.pop(party, None)
        self._last[party] = next(self._turns)
        if len(self._last) <= _REMEMBERED:
            return None
        forgotten = next(iter(self._last))
        del self._last[forgotten]
        return forgotten

    def last(self, party: Hashable) -> int:
        """Return the number of a party's last turn, later turns having larger numbers; 0 for none."""
        return self._last.get(party, 0)
