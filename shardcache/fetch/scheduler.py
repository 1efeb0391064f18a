"""Scheduler for the node's connections: grants them by priority, preempts the least urgent."""

import asyncio
import math
from bisect import insort
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from shardcache.errors import OriginBusyError
from shardcache.fetch.estimates import HEDGED_SHARE, Aimd, Hedging, Link

WAITING = 0
"""The most urgent class: a reader has nothing to read until this part arrives."""

# Origins and clients remembered: those in use and the most recent ones.
_MAX_ORIGINS = 64
_MAX_CLIENTS = 1024
# A download whose parts do not arrive holds up the others for no longer than this.
_ALONE_S = 1.0
# Priorities change with every step of a reader; asking all downloads at each part would take longer than some parts do.
ASK_AGAIN_S = 0.02


@dataclass(frozen=True, slots=True)
class Priority:
    """Priority of a part, compared with others when a connection slot or byte credit is granted.

    Attributes:
        klass: a lower class always goes first; `WAITING` may also preempt any other class.
        deadline_s: within a class and a client, the earlier goes first: the time when a reader began to wait, or will
            need the shard, by one clock.
        client: the job, or other client, that needs the part. The clients of a class get equal numbers of connections.
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
    """One part's claim on a connection slot; reused for each attempt, so that retries keep their place among equals."""

    priority: Callable[[], Priority]  # returns the current one
    origin: str = ""  # under whose concurrency limit it falls
    work: Pausable | None = None  # while the slot is held; None where nothing can be paused
    arrival: int = field(default_factory=count().__next__)
    # of the present attempt
    group: "_Group" = field(init=False)
    granted: asyncio.Future[None] = field(init=False)  # done once it got a slot
    generation: int = 0  # of the origin's limit when it did
    concurrency: int = 0  # slots held on the origin then, including its own
    paused: bool = False  # True if it was preempted

    def again(self) -> "Claim":
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
        if len(self._last) > _MAX_CLIENTS:
            del self._last[next(iter(self._last))]

    def last(self, client: Hashable) -> int:
        """Return the number of a client's last turn, later turns having larger numbers; 0 for none."""
        return self._last.get(client, 0)


@dataclass(frozen=True, slots=True)
class OriginLoad:
    """Requests in flight to one origin, paused ones excluded; its current limit, and how often that was lowered."""

    name: str
    connections: int
    limit: int
    throttled: int


class Limit(NamedTuple):
    """A limit on downloads, in words; `holds` is True while one waits because of it."""

    name: str
    text: str
    holds: bool


@dataclass(slots=True, eq=False)
class OriginState:
    """State of one origin, and what is known of it."""

    name: str
    aimd: Aimd
    hedging: Hedging
    link: Link = field(default_factory=Link)
    held: int = 0  # slots
    cleared: bool = False  # True while claims that no reader waits for are paused for one that is `alone`

    @property
    def usable(self) -> int:
        """Connections that it accepts and its link can use."""
        return min(self.aimd.limit, self.link.connections or self.aimd.limit)

    @property
    def is_full(self) -> bool:
        """True if it accepts no further request, or a claim that is `alone` needs the rest of the link."""
        return self.held >= (self.usable if self.cleared else self.aimd.limit)


@dataclass(slots=True, eq=False)
class _Group:
    """Claims of one download on one origin."""

    ask: Callable[[], Priority]
    origin: OriginState
    priority: Priority  # what `ask` returned last
    queued: list[Claim] = field(default_factory=list)  # first come first
    count: int = 0  # of claims that wait or hold a slot

    def enqueue(self, claim: Claim) -> None:
        insort(self.queued, claim, key=lambda one: one.arrival)

    @property
    def is_admitted(self) -> bool:
        """True if a claim may get a free slot; while the link is cleared and not measured yet, a reader's first."""
        origin, priority = self.origin, self.priority
        begins = priority.waiting and not (priority.alone and len(self.queued) < self.count)
        return not origin.is_full and (begins or not origin.cleared or origin.link.connections is not None)


class Scheduler:
    """Fixed number of connection slots; a waiting reader's claim preempts one that no reader waits for.

    The lowest class goes first; within it the client that holds the fewest slots, then the client served longest ago;
    of its claims the one with the earliest deadline, then the first to arrive; those `alone` share equally.

    While a claim is `alone`, only as many claims on its origin run as saturate the link, the most urgent ones: more
    would delay each of its parts. On a link that is not measured yet, it runs alone, with the first of other readers.

    A preempted claim pauses, and queues for another slot with its own priority. At most as many claims are paused as
    there are slots, so at most twice as many claims as slots occupy memory.
    """

    def __init__(self, count: int, hedged_share: float = HEDGED_SHARE) -> None:
        self._count = count  # slots of all origins together, and the initial limit of each origin
        self._hedged_share = hedged_share
        self._groups: dict[tuple[Callable[[], Priority], str], _Group] = {}
        self._origins: dict[str, OriginState] = {}  # the one used last is at the end
        self._holding: dict[Claim, None] = {}
        self._paused: dict[Claim, None] = {}  # queued again, until they get another slot
        self._round_robin = RoundRobin()
        self._alone_until_s: WeakKeyDictionary[Callable[[], Priority], float] = WeakKeyDictionary()  # by download
        self._ask_again_s = 0.0
        self.pauses = 0  # number of times that a claim was preempted, or paused for one that is `alone`

    def __repr__(self) -> str:
        queued = sum(len(group.queued) for group in self._groups.values())
        return f"<Scheduler {len(self._holding)} of {self._count} held, {queued} queued>"

    def loads(self) -> list[OriginLoad]:
        """Return the load on each of the origins used last."""
        latest = list(self._origins.values())[-_MAX_ORIGINS:]
        return [OriginLoad(one.name, one.held, one.aimd.limit, one.aimd.generation) for one in latest]

    def limits(self, origin: str | None = None) -> Iterator[Limit]:
        """Yield the limit of an origin that throttles, or of each that does, and that on all connections."""
        queued = [group.origin for group in self._groups.values() if group.queued]
        for one in self._origins.values():
            if one.aimd.is_lowered and origin in (None, one.name):
                text = f"{one.name} throttles to {one.aimd.limit} of {self._count} connections"
                yield Limit("throttling", text, one in queued and one.is_full)
        held = len(self._holding)
        yield Limit("connections", f"{held} of {self._count} connections", bool(queued) and held >= self._count)

    def origin(self, name: str) -> OriginState:
        """Return the state of an origin, now the one used last; unused ones beyond `_MAX_ORIGINS` are forgotten."""
        origin = self._origins.pop(name, None) or OriginState(name, Aimd(self._count), Hedging(self._hedged_share))
        self._origins[name] = origin
        if (excess := len(self._origins) - _MAX_ORIGINS) > 0:
            used = {origin, *(group.origin for group in self._groups.values())}
            for unused in [one for one in self._origins.values() if one not in used][:excess]:
                del self._origins[unused.name]
        return origin

    def took(self, claim: Claim, size_bytes: int, time_s: float) -> None:
        """Record the size and read time of a part that arrived while `claim` held its slot."""
        origin = self.origin(claim.origin)
        origin.link.took(size_bytes, time_s, (claim.concurrency + origin.held) / 2)
        if claim.priority in self._alone_until_s:
            if not self._is_alone(claim.priority):
                self._ask_again_s = 0.0  # its precedence had expired, and begins again
            self._prolong(claim.priority)

    def share(self, origin: OriginState) -> int:
        """Return the number of connections to an origin that each of its downloads can have at the same time."""
        downloads = sum(group.origin is origin for group in self._groups.values())
        return max(1, origin.usable // max(1, downloads))

    @asynccontextmanager
    async def hold(self, claim: Claim) -> AsyncIterator[None]:
        """Hold a slot during the block; it may be preempted while `claim.work` is set.

        A block that ends with OriginBusyError lowers the origin's limit; one that succeeds may raise it.
        """
        self._enter(claim)
        aimd = claim.group.origin.aimd
        try:
            self._deal()
            await claim.granted
            yield
            aimd.succeeded(claim.generation)
        except OriginBusyError:
            aimd.refused(claim.generation)
            raise
        finally:
            self._leave(claim)
            self._deal()

    def deal(self) -> None:
        """Ask for all priorities and reassign slots; call it when a priority has become more urgent.

        Otherwise, priorities are asked for when a claim comes or goes, if `ASK_AGAIN_S` has passed.
        """
        self._ask_again_s = 0.0
        self._deal()

    def _enter(self, claim: Claim) -> None:
        claim.granted, claim.paused = asyncio.get_running_loop().create_future(), False
        ask, priority = claim.priority, claim.priority()
        if (group := self._groups.get((ask, claim.origin))) is None:
            group = self._groups[ask, claim.origin] = _Group(ask, self.origin(claim.origin), priority)
        claim.group, group.priority = group, priority
        group.count += 1
        group.enqueue(claim)

    def _leave(self, claim: Claim) -> None:
        group = claim.group
        if claim in self._holding:
            self._release(claim)
        else:
            self._paused.pop(claim, None)
            group.queued.remove(claim)
        group.count -= 1
        if not group.count:
            del self._groups[group.ask, group.origin.name]

    def _deal(self) -> None:
        if now_s() >= self._ask_again_s:
            self._ask_all()
        self._clear()
        while len(self._holding) < self._count and (claim := self._first(lambda group: group.is_admitted)) is not None:
            self._grant(claim)
        while (claim := self._preemptor()) is not None:
            self._pause_one(claim.group.origin if claim.group.origin.is_full else None)
            self._grant(claim)

    def _ask_all(self) -> None:
        self._ask_again_s = now_s() + ASK_AGAIN_S
        asked = {ask: ask() for ask in {group.ask for group in self._groups.values()}}
        for group in self._groups.values():
            group.priority = asked[group.ask]

    def _clear(self) -> None:
        """Pause claims that no reader waits for, as far as they would slow down a claim that is `alone`."""
        alone = [group for group in self._groups.values() if group.priority.alone]
        cleared = {group.origin for group in alone if self._is_alone(group.ask)}
        for origin in self._origins.values():
            origin.cleared = origin in cleared
        for origin in cleared:
            while origin.held > (origin.link.connections or 0) and self._may_pause_more and self._pause_one(origin):
                pass

    def _is_alone(self, ask: Callable[[], Priority]) -> bool:
        """Return whether a download has precedence: for `_ALONE_S` from the first call, and from each of its parts."""
        if ask not in self._alone_until_s:
            self._prolong(ask)
        return now_s() < self._alone_until_s[ask]

    def _prolong(self, ask: Callable[[], Priority]) -> None:
        self._alone_until_s[ask] = now_s() + _ALONE_S
        asyncio.get_running_loop().call_later(_ALONE_S, self.deal)

    @property
    def _may_pause_more(self) -> bool:
        return len(self._paused) < self._count

    def _preemptor(self) -> Claim | None:
        """Return a waiting reader's claim that preempts another, which no reader waits for."""
        victims = {claim.group.origin for claim in self._victims(None)}

        def preempts(group: _Group) -> bool:
            return group.priority.waiting and (group.origin in victims or group.is_admitted)

        if not victims:
            return None
        if self._may_pause_more:
            return self._first(preempts)
        return min((claim for claim in self._paused if preempts(claim.group)), key=self._rank(), default=None)

    def _first(self, may: Callable[[_Group], bool]) -> Claim | None:
        """Return the first claim to serve, of those at the head of their groups."""
        heads = [group.queued[0] for group in self._groups.values() if group.queued and may(group)]
        return min(heads, key=self._rank(), default=None)

    def _rank(self) -> Callable[[Claim], tuple[int, int, int, int, float, int]]:
        """Return the order in which claims are served."""
        held = Counter((claim.group.priority.klass, claim.group.priority.client) for claim in self._holding)

        def rank(claim: Claim) -> tuple[int, int, int, int, float, int]:
            group, priority = claim.group, claim.group.priority
            klass, client, own = priority.klass, priority.client, priority.alone * (group.count - len(group.queued))
            return klass, held[klass, client], self._round_robin.last(client), own, priority.deadline_s, claim.arrival

        return rank

    def _victims(self, origin: OriginState | None) -> list[Claim]:
        """Return the claims that may be paused, of one origin or of all."""
        return [
            claim
            for claim in self._holding
            if claim.work is not None and not claim.group.priority.waiting and origin in (None, claim.group.origin)
        ]

    def _grant(self, claim: Claim) -> None:
        group = claim.group
        group.queued.remove(claim)
        self._holding[claim] = None
        group.origin.held += 1
        self._round_robin.serve(group.priority.client)
        self._paused.pop(claim, None)
        if not claim.granted.done():  # done if it was paused, or has just been cancelled
            claim.generation, claim.concurrency = group.origin.aimd.generation, group.origin.held
            claim.granted.set_result(None)
        elif claim.work is not None:
            claim.work.resume()

    def _pause_one(self, origin: OriginState | None) -> bool:
        """Pause the least urgent claim of an origin, or of all; return whether there was one."""

        def urgency(claim: Claim) -> tuple[int, float, int]:
            priority = claim.group.priority
            return priority.klass, priority.deadline_s, claim.arrival

        claim = max(self._victims(origin), key=urgency, default=None)
        if claim is None or claim.work is None:
            return False
        claim.work.halt()
        claim.paused = True
        self._release(claim)
        self._paused[claim] = None
        claim.group.enqueue(claim)
        self.pauses += 1
        return True

    def _release(self, claim: Claim) -> None:
        del self._holding[claim]
        claim.group.origin.held -= 1


def now_s() -> float:
    """Return the time by the event loop's clock."""
    return asyncio.get_running_loop().time()
