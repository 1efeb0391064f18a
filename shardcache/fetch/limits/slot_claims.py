"""Claims on connections and byte credit, and the order in which they are served."""

import asyncio
import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import NamedTuple, Protocol

from shardcache.fetch.limits.origin_states import OriginState

WAITING = 0
"""The most urgent class: a reader has nothing to read until this part arrives."""

# Clients remembered: those in use and the most recent ones.
_MAX_CLIENTS = 1024


@dataclass(frozen=True, slots=True)
class Priority:
    """Priority of a part, compared with others when a connection slot or byte credit is granted.

    Attributes:
        klass: a lower class always goes first; `WAITING` may also preempt any other class.
        deadline_s: within a class and a client, the earlier goes first: the time when a reader
            began to wait, or will need the shard, by one clock.
        client: the job, or other client, that needs the part. The clients of a class get equal
            numbers of connections.
        alone: True if a reader reads the shard as it arrives, so that order matters more than
            throughput: parts that no reader waits for are paused as far as they would slow it
            down. Lasts as long as parts arrive.
    """

    klass: int
    deadline_s: float = math.inf
    client: Hashable | None = None
    alone: bool = False

    @property
    def waiting(self) -> bool:
        """True if a reader is waiting for the part."""
        return self.klass == WAITING


AskPriority = Callable[[], Priority]
"""Returns a download's current priority; also stands for the download itself."""


class Pausable(Protocol):
    """Work that runs while its claim holds a slot, and pauses otherwise."""

    def halt(self) -> None:
        """Pause."""

    def resume(self) -> None:
        """Continue after `halt`."""


@dataclass(slots=True, eq=False)
class Claim:
    """One part's claim on a connection slot.

    It is reused for each attempt, so that retries keep their place among equals.

    Attributes:
        ask_priority: returns the current one; the claims of a download have the same.
        origin_name: of the origin under whose concurrency limit it falls.
        work: set while the slot is held; None where nothing can be paused.
        arrival: its place among equals.
        group: set by the scheduler for each attempt, as is all that follows.
        granted: done once the attempt has got a slot.
        generation: of the origin's limit at that time.
        concurrency: slots held on the origin at that time, including its own.
        was_paused: True if it has been preempted, even if it has a slot again.
    """

    ask_priority: AskPriority
    origin_name: str = ""
    work: Pausable | None = None
    arrival: int = field(default_factory=count().__next__)  # the number of claims before it
    group: "ClaimGroup" = field(init=False)
    granted: asyncio.Future[None] = field(init=False)
    generation: int = 0
    concurrency: int = 0
    was_paused: bool = False

    def again(self) -> "Claim":
        """Return a claim for a hedged request, with the same place among equals."""
        return Claim(self.ask_priority, self.origin_name, arrival=self.arrival)


@dataclass(slots=True, eq=False)
class ClaimGroup:
    """Claims of one download on one origin.

    Attributes:
        priority: what `ask_priority` returned last.
        queued: the claims that wait for a slot, first come first.
        count: of claims that wait or hold a slot.
    """

    ask_priority: AskPriority
    origin: OriginState
    priority: Priority
    queued: list[Claim] = field(default_factory=list)
    count: int = 0

    def enqueue(self, claim: Claim) -> None:
        """Queue a claim by its arrival."""
        insort(self.queued, claim, key=attrgetter("arrival"))

    @property
    def held(self) -> int:
        """Number of slots that its claims hold."""
        return self.count - len(self.queued)

    @property
    def is_admitted(self) -> bool:
        """True if one of its claims may get a free slot."""
        if self.origin.is_full:
            return False
        if not self.origin.cleared or self.origin.link.connections is not None:
            return True

        # The link is cleared for a download that is `alone`, and not measured yet: only readers'
        # claims may begin, and of that download one at a time.
        if not self.priority.waiting:
            return False
        return not (self.priority.alone and self.held)


class RoundRobin:
    """Order in which the most recent clients were last served."""

    def __init__(self) -> None:
        self._turns = count(1)
        self._last: dict[Hashable, int] = {}  # the client served last is at the end

    def serve(self, client: Hashable) -> None:
        """Record a client's turn."""
        self._last.pop(client, None)
        self._last[client] = next(self._turns)
        if len(self._last) > _MAX_CLIENTS:
            oldest = next(iter(self._last))
            del self._last[oldest]

    def last(self, client: Hashable) -> int:
        """Return the number of a client's last turn; 0 for none.

        Later turns have larger numbers.
        """
        return self._last.get(client, 0)


class Rank(NamedTuple):
    """Place of a claim in the order of service: the lowest goes first."""

    # 1. A lower class always goes first: readers that wait, then plans, then `warm`.
    klass: int
    # 2. In a class, the client goes first that holds the fewest slots: clients share equally.
    held_by_client: int
    # 3. Of such clients, the one that was served longest ago.
    last_turn: int
    # 4. Of its downloads that are `alone`, the one that holds the fewest slots: they share equally,
    #    and all others have 0.
    held_by_download: int
    # 5. The earliest deadline.
    deadline_s: float
    # 6. The first to arrive.
    arrival: int


class Ranking:
    """Ranks of claims, given those that hold a slot at present."""

    def __init__(self, round_robin: RoundRobin) -> None:
        self._round_robin = round_robin
        self._held: Counter[tuple[int, Hashable]] = Counter()  # by class and client

    def granted(self, claim: Claim) -> None:
        """Count a claim that holds a slot from now on."""
        self._held[_share_of(claim)] += 1

    def released(self, claim: Claim) -> None:
        """Count a claim that holds its slot no longer."""
        share = _share_of(claim)
        self._held[share] -= 1
        if not self._held[share]:
            del self._held[share]

    def recount(self, holding: Iterable[Claim]) -> None:
        """Count all claims that hold a slot, after their priorities may have changed."""
        self._held = Counter(map(_share_of, holding))

    def rank(self, claim: Claim) -> Rank:
        """Return the rank of a claim."""
        group = claim.group
        priority = group.priority
        held_by_download = group.held if priority.alone else 0
        return Rank(
            priority.klass,
            self._held[_share_of(claim)],
            self._round_robin.last(priority.client),
            held_by_download,
            priority.deadline_s,
            claim.arrival,
        )


def _share_of(claim: Claim) -> tuple[int, Hashable]:
    """Return the class and client of a claim: the clients of a class share its slots equally."""
    priority = claim.group.priority
    return priority.klass, priority.client
