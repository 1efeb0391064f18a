"""Claims on connections and byte credit, and the order in which they are served.

A claim stands for one request that needs a connection slot; the `Scheduler` grants slots to claims
by their rank, and `Bandwidth` grants byte credit by the claims' priorities. A priority class is a
level of urgency: claims of a lower class always go first. A client is whoever needs a part, usually
a training job. Clients of the same class share the slots equally.
"""

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

_MAX_CLIENTS = 1024  # number of clients whose last turn is remembered: the ones served last


@dataclass(frozen=True, slots=True)
class Priority:
    """Priority of a part, compared with others when a connection slot or byte credit is granted.

    Attributes:
        priority_class: a lower class always goes first, and `WAITING` may also preempt any other
            class.
        deadline_s: the time when a reader began to wait or will need the shard, always by the same
            clock. Of one client's claims in a class, the one with the earliest deadline goes first.
        client: the job, or other client, that needs the part; None for no client in particular. The
            clients of a class get equal numbers of connections.
        streamed: True if a reader reads the shard as it arrives, so that the order of parts matters
            more than throughput. Other parts, which no reader waits for, are paused if they would
            slow this download down. That ends when its own parts no longer arrive.
    """

    priority_class: int
    deadline_s: float = math.inf
    client: Hashable | None = None
    streamed: bool = False

    @property
    def waiting(self) -> bool:
        """True if a reader is waiting for the part."""
        return self.priority_class == WAITING


AskPriority = Callable[[], Priority]
"""Returns a download's current priority. The function also identifies the download."""


class Pausable(Protocol):
    """Work that runs while its claim holds a slot, and pauses otherwise."""

    def halt(self) -> None:
        """Pause."""

    def resume(self) -> None:
        """Continue after `halt`."""


@dataclass(slots=True, eq=False)
class Claim:
    """One request's claim on a connection slot.

    The same claim is used for each attempt at the request, so that a retry keeps its place among
    claims of equal urgency.

    Attributes:
        ask_priority: returns the download's current priority; all claims of a download have the
            same function.
        origin_name: name of the origin whose concurrency limit applies to the claim.
        work: the work to pause if the claim is preempted; None while there is none, so that the
            claim cannot be preempted.
        arrival: place of the claim among claims of equal urgency; lower goes first.
        group: the claim's group. The scheduler sets this and the attributes below for each attempt.
        granted: done once the attempt has got a slot.
        generation: generation of the origin's limit when the slot was granted.
        concurrency: number of slots held on the origin when the slot was granted, this claim's
            included.
        was_paused: True if the claim has been paused during the attempt, even if it has a slot
            again.
    """

    ask_priority: AskPriority
    origin_name: str = ""
    work: Pausable | None = None
    # By default, claims are numbered as they are made.
    arrival: int = field(default_factory=count().__next__)
    group: "ClaimGroup" = field(init=False)
    granted: asyncio.Future[None] = field(init=False)
    generation: int = 0
    concurrency: int = 0
    was_paused: bool = False

    def again(self) -> "Claim":
        """Return a claim for a second request for the same bytes, with the same place in order."""
        return Claim(self.ask_priority, self.origin_name, arrival=self.arrival)


@dataclass(slots=True, eq=False)
class ClaimGroup:
    """Claims of one download on one origin.

    Attributes:
        ask_priority: returns the download's current priority.
        origin: state of the origin.
        priority: the priority that `ask_priority` returned last.
        queued: the claims that wait for a slot, in the order of their arrival.
        count: number of claims that wait for a slot or hold one.
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
        """Number of slots that the group's claims hold."""
        return self.count - len(self.queued)

    @property
    def is_admitted(self) -> bool:
        """True if one of the group's claims may get a free slot."""
        if self.origin.is_full:
            return False
        if not self.origin.cleared or self.origin.link.connections is not None:
            return True

        # The link is cleared for a streamed download, and it is not measured yet. Only claims that
        # readers wait for may begin, and the streamed download may have only one of them at a time.
        if not self.priority.waiting:
            return False
        return not (self.priority.streamed and self.held)


class RoundRobin:
    """Order in which the most recent clients were last served."""

    def __init__(self) -> None:
        self._turns = count(1)
        # Number of each client's last turn. The client served last is at the end.
        self._last: dict[Hashable, int] = {}

    def serve(self, client: Hashable) -> None:
        """Record a client's turn."""
        self._last.pop(client, None)
        self._last[client] = next(self._turns)
        if len(self._last) > _MAX_CLIENTS:
            oldest = next(iter(self._last))
            del self._last[oldest]

    def last(self, client: Hashable) -> int:
        """Return the number of a client's last turn; 0 if the client was not served yet.

        Later turns have larger numbers.
        """
        return self._last.get(client, 0)


class Rank(NamedTuple):
    """Place of a claim in the order of service.

    The lowest rank goes first. The fields are compared in their order, each one only if all before
    it are equal.
    """

    # 1. A lower class always goes first: readers that wait, then plans, then `warm`.
    priority_class: int
    # 2. In a class, the client that holds the fewest slots goes first, so that clients share the
    #    slots equally.
    held_by_client: int
    # 3. Of clients with equally many slots, the client that was served longest ago goes first.
    last_turn: int
    # 4. Of a client's streamed downloads, the one that holds the fewest slots goes first, so that
    #    they share equally. The number is 0 for other downloads.
    held_by_download: int
    # 5. The claim with the earliest deadline goes first.
    deadline_s: float
    # 6. The claim that arrived first goes first.
    arrival: int


class Ranking:
    """Ranks of claims, which depend on the claims that hold a slot at present."""

    def __init__(self, round_robin: RoundRobin) -> None:
        self._round_robin = round_robin
        # Number of slots held, by class and client.
        self._held: Counter[tuple[int, Hashable]] = Counter()

    def granted(self, claim: Claim) -> None:
        """Count a claim that has just got a slot."""
        self._held[_class_and_client(claim)] += 1

    def released(self, claim: Claim) -> None:
        """Stop counting a claim that has just lost or released its slot."""
        key = _class_and_client(claim)
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]

    def recount(self, holding: Iterable[Claim]) -> None:
        """Count all claims that hold a slot, after their priorities may have changed."""
        self._held = Counter(map(_class_and_client, holding))

    def rank(self, claim: Claim) -> Rank:
        """Return the present rank of a claim."""
        group = claim.group
        priority = group.priority
        held_by_download = group.held if priority.streamed else 0
        return Rank(
            priority.priority_class,
            self._held[_class_and_client(claim)],
            self._round_robin.last(priority.client),
            held_by_download,
            priority.deadline_s,
            claim.arrival,
        )


def _class_and_client(claim: Claim) -> tuple[int, Hashable]:
    """Return the priority class and client of a claim, by which the held slots are counted."""
    priority = claim.group.priority
    return priority.priority_class, priority.client
