"""What a part offers for a connection: how much somebody needs it."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

WAITING = 0
"""The most urgent class: a reader has nothing to read until this arrives."""


@dataclass(frozen=True, slots=True)
class Bid:
    """A claim on a connection, held against others at the moment when one is to be given away.

    Attributes:
        klass: a lower one always goes first; `WAITING` may also take a connection from whoever bids another.
        deadline_s: within a class and a party the earlier goes first: since when a reader waits, or when it will
            need the shard. All bids of a class use one clock.
        party: who needs it. The parties of a class get equal numbers of connections, however many parts each of them
            wants; bids that name the same party, such as None, go by their deadlines alone.
        alone: whether a reader reads the shard as it arrives, so that order matters more than throughput: claims for
            which nobody waits rest as far as they would slow it down. It lasts as long as parts arrive.
    """

    klass: int
    deadline_s: float = math.inf
    party: Hashable | None = None
    alone: bool = False

    @property
    def waiting(self) -> bool:
        """Whether a reader waits for it now."""
        return self.klass == WAITING
