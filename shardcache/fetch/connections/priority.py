"""Priority of a part in the competition for connection slots and bandwidth."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

WAITING = 0
"""The most urgent class: a reader has nothing to read until this part arrives."""


@dataclass(frozen=True, slots=True)
class Priority:
    """Priority of a part, compared with others when a connection slot or byte credit is granted.

    Attributes:
        klass: a lower class always goes first; `WAITING` may also preempt any other class.
        deadline_s: within a class and a party, the earlier goes first: the time when a reader began to wait, or will
            need the shard. All priorities of a class use one clock.
        party: the job, or other client, that needs the part. The parties of a class get equal numbers of connections,
            however many parts each of them wants; priorities of the same party, or of None, are ordered by deadline
            alone.
        alone: True if a reader reads the shard as it arrives, so that order matters more than throughput: parts that no
            reader waits for are paused as far as they would slow it down. Lasts as long as parts arrive.
    """

    klass: int
    deadline_s: float = math.inf
    party: Hashable | None = None
    alone: bool = False

    @property
    def waiting(self) -> bool:
        """True if a reader is waiting for the part."""
        return self.klass == WAITING
