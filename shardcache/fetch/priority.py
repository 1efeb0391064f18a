"""Claims of parts on connection slots and bandwidth, and the priorities by which they compete."""

from __future__ import annotations

import math
from asyncio import Future
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

WAITING = 0
"""The most urgent class: a reader has nothing to read until this part arrives."""

_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class Priority:
    """Priority of a part, compared with others when a connection slot or byte credit is granted.

    Attributes:
        klass: a lower class always goes first; `WAITING` may also preempt any other class.
        deadline_s: within a class and a client, the earlier goes first: the time when a reader began to wait, or will
            need the shard. All priorities of a class use one clock.
        client: the job, or other client, that needs the part. The clients of a class get equal numbers of connections,
            however many parts each of them wants; priorities of the same client, or of None, are ordered by deadline
            alone.
        alone: True if a reader reads the shard as it arrives, so that order matters more than throughput: parts that no
            reader waits for are paused as far as they would slow it down. Lasts as long as parts arrive.
    """

    klass: int
    deadline_s: float = math.inf
    client: Hashable | None = None
    alone: bool = False

    @property
    def waiting(self) -> bool:
        """True if a reader is waiting for the part."""
        return self.klass == WAITING


class Pausable(Protocol):
    """Work that runs while its claim holds a slot, and pauses otherwise."""

    def halt(self) -> None:
        """Pause."""

    def resume(self) -> None:
        """Continue after `halt`."""


@dataclass(slots=True, eq=False)
class Claim:
    """One part's claim on a connection slot; reused for each attempt, so that retries keep their place among equals.

    Attributes:
        priority: returns the current priority.
        origin: origin under whose concurrency limit it falls.
        work: can be paused while the slot is held; None where nothing can.
        arrival: a number that grows from claim to claim.
        granted: done once the current attempt got a slot.
        generation: that of the origin's limit when it did.
        paused: True if it was preempted during the current attempt.
        concurrency: slots held on its origin when it was granted one, including its own.
    """

    priority: Callable[[], Priority]
    origin: str = ""
    work: Pausable | None = None
    arrival: int = field(default_factory=count().__next__)
    granted: Future[None] | None = None
    generation: int = 0
    paused: bool = False
    concurrency: int = 0

    def again(self) -> Claim:
        """Return a claim for a hedged request, with the same place among equals."""
        return Claim(self.priority, self.origin, arrival=self.arrival)


class RoundRobin:
    """Order in which the most recent clients were last served."""

    def __init__(self) -> None:
        self._turns = count(1)
        self._last: dict[Hashable, int] = {}  # the client served last is at the end

    def serve(self, client: Hashable) -> None:
        """Record a client's turn."""
        self._last.pop(client, None)
        self._last[client] = next(self._turns)
        if len(self._last) > _REMEMBERED:
            del self._last[next(iter(self._last))]

    def last(self, client: Hashable) -> int:
        """Return the number of a client's last turn, later turns having larger numbers; 0 for none."""
        return self._last.get(client, 0)
