"""Scheduler for the node's connections: grants them by priority, preempts the least urgent."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from shardcache.errors import OriginBusyError
from shardcache.fetch.hedging import HEDGED_SHARE, Hedging
from shardcache.fetch.origin_states import Aimd, Limit, OriginLoad, OriginState
from shardcache.fetch.slot_claims import AskPriority, Claim, ClaimGroup, Rank, Ranking, RoundRobin
from shardcache.fetch.stopwatch import now_s

# Origins remembered: those in use and the most recent ones.
_MAX_ORIGINS = 64
# A download whose parts do not arrive holds up the others for no longer than this.
_ALONE_S = 1.0
# Priorities change with every step of a reader. To ask all downloads for theirs at each part would
# take longer than some parts do.
ASK_AGAIN_S = 0.02


class Scheduler:
    """Fixed number of connection slots; a waiting reader's claim preempts one nobody waits for.

    `Rank` has the order in which claims get a slot.

    While a claim is `alone`, only as many claims on its origin run as saturate the link, the most
    urgent ones: more would delay each of its parts. On a link that is not measured yet, it runs
    alone, with the first of other readers.

    A preempted claim pauses, and queues for another slot with its own priority. At most as many
    claims are paused as there are slots, so at most twice as many claims as slots occupy memory.

    Args:
        count: slots of all origins together, and the initial limit of each origin.
        hedged_share: the most parts of an origin whose requests are hedged, as a share of all.
    """

    def __init__(self, count: int, hedged_share: float = HEDGED_SHARE) -> None:
        self._count = count
        self._hedged_share = hedged_share
        self._groups: dict[tuple[AskPriority, str], ClaimGroup] = {}
        self._origins: dict[str, OriginState] = {}  # the one used last is at the end
        self._holding: dict[Claim, None] = {}
        self._paused: dict[Claim, None] = {}  # queued again, until they get another slot
        self._round_robin = RoundRobin()
        # Until when each download that is `alone` has precedence.
        self._alone_until_s: WeakKeyDictionary[AskPriority, float] = WeakKeyDictionary()
        self._ask_again_s = 0.0
        self.pauses = 0  # number of times that a claim was preempted, or paused for one `alone`

    def __repr__(self) -> str:
        queued = sum(len(group.queued) for group in self._groups.values())
        return f"<Scheduler {len(self._holding)} of {self._count} held, {queued} queued>"

    def loads(self) -> list[OriginLoad]:
        """Return the load on each of the origins used last."""
        latest = list(self._origins.values())[-_MAX_ORIGINS:]
        return [origin.load for origin in latest]

    def limits(self, name: str | None = None) -> Iterator[Limit]:
        """Yield the limit of an origin that throttles, or of each, and that on all connections."""
        queued = [group.origin for group in self._groups.values() if group.queued]
        for origin in self._origins.values():
            if origin.aimd.is_lowered and name in (None, origin.name):
                limit = origin.aimd.limit
                text = f"{origin.name} throttles to {limit} of {self._count} connections"
                yield Limit("throttling", text, origin in queued and origin.is_full)

        held = len(self._holding)
        text = f"{held} of {self._count} connections"
        yield Limit("connections", text, bool(queued) and held >= self._count)

    def origin(self, name: str) -> OriginState:
        """Return the state of an origin, now the one used last.

        Unused ones beyond `_MAX_ORIGINS` are forgotten.
        """
        origin = self._origins.pop(name, None)
        if origin is None:
            origin = OriginState(name, Aimd(self._count), Hedging(self._hedged_share))
        self._origins[name] = origin

        excess = len(self._origins) - _MAX_ORIGINS
        if excess > 0:
            self._forget(excess, origin)
        return origin

    def _forget(self, excess: int, newest: OriginState) -> None:
        """Forget up to `excess` of the unused origins."""
        used = {newest, *(group.origin for group in self._groups.values())}
        unused = [origin for origin in self._origins.values() if origin not in used]
        for origin in unused[:excess]:
            del self._origins[origin.name]

    def took(self, claim: Claim, size_bytes: int, time_s: float) -> None:
        """Record the size and read time of a part that arrived while `claim` held its slot."""
        origin = self.origin(claim.origin)
        mean_concurrency = (claim.concurrency + origin.held) / 2
        origin.link.took(size_bytes, time_s, mean_concurrency)
        if claim.priority in self._alone_until_s:
            if not self._is_alone(claim.priority):
                self._ask_again_s = 0.0  # its precedence had expired, and begins again
            self._prolong(claim.priority)

    def share(self, origin: OriginState) -> int:
        """Return how many connections to an origin each of its downloads can have at a time."""
        downloads = sum(group.origin is origin for group in self._groups.values())
        return max(1, origin.usable // max(1, downloads))

    @asynccontextmanager
    async def hold(self, claim: Claim) -> AsyncIterator[None]:
        """Hold a slot during the block; it may be preempted while `claim.work` is set.

        A block that ends with OriginBusyError lowers the origin's limit; one that succeeds may
        raise it.
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
        """Ask for all priorities and reassign slots; to be called when one is more urgent now.

        Otherwise, priorities are asked for when a claim comes or goes, if `ASK_AGAIN_S` has passed.
        """
        self._ask_again_s = 0.0
        self._deal()

    def _enter(self, claim: Claim) -> None:
        claim.granted = asyncio.get_running_loop().create_future()
        claim.paused = False
        priority = claim.priority()
        key = (claim.priority, claim.origin)
        group = self._groups.get(key)
        if group is None:
            group = ClaimGroup(claim.priority, self.origin(claim.origin), priority)
            self._groups[key] = group
        group.priority = priority
        group.count += 1
        group.enqueue(claim)
        claim.group = group

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
        """Reassign the slots.

        1. If a download is `alone`, claims that no reader waits for pause on its origin.
        2. Free slots go to the claims whose origin has room, by their ranks.
        3. When there is no slot left, or no room at an origin, a waiting reader's claim takes the
           slot of the least urgent claim that no reader waits for.
        """
        if now_s() >= self._ask_again_s:
            self._ask_all()

        self._clear_links()

        while len(self._holding) < self._count:
            claim = self._first(lambda group: group.is_admitted)
            if claim is None:
                break
            self._grant(claim)

        while True:
            claim = self._preemptor()
            if claim is None:
                break
            origin = claim.group.origin
            self._pause_one(origin if origin.is_full else None)
            self._grant(claim)

    def _ask_all(self) -> None:
        self._ask_again_s = now_s() + ASK_AGAIN_S
        asked = {ask: ask() for ask in {group.ask for group in self._groups.values()}}
        for group in self._groups.values():
            group.priority = asked[group.ask]

    def _clear_links(self) -> None:
        """Pause claims that nobody waits for, where they would slow down one that is `alone`."""
        alone = [group for group in self._groups.values() if group.priority.alone]
        cleared = {group.origin for group in alone if self._is_alone(group.ask)}
        for origin in self._origins.values():
            origin.cleared = origin in cleared

        for origin in cleared:
            room = origin.link.connections or 0
            while origin.held > room and self._may_pause_more:
                has_paused = self._pause_one(origin)
                if not has_paused:
                    break

    def _is_alone(self, ask: AskPriority) -> bool:
        """Return whether a download that is `alone` has precedence.

        It has for `_ALONE_S` from the first call, and from each of its parts.
        """
        if ask not in self._alone_until_s:
            self._prolong(ask)
        return now_s() < self._alone_until_s[ask]

    def _prolong(self, ask: AskPriority) -> None:
        self._alone_until_s[ask] = now_s() + _ALONE_S
        asyncio.get_running_loop().call_later(_ALONE_S, self.deal)

    @property
    def _may_pause_more(self) -> bool:
        return len(self._paused) < self._count

    def _preemptor(self) -> Claim | None:
        """Return a waiting reader's claim that preempts another, which no reader waits for."""
        victims = {claim.group.origin for claim in self._victims(None)}
        if not victims:
            return None

        def preempts(group: ClaimGroup) -> bool:
            return group.priority.waiting and (group.origin in victims or group.is_admitted)

        if self._may_pause_more:
            return self._first(preempts)
        # Of claims that are paused already, one may change places with another.
        paused = [claim for claim in self._paused if preempts(claim.group)]
        return min(paused, key=self._rank(), default=None)

    def _first(self, may: Callable[[ClaimGroup], bool]) -> Claim | None:
        """Return the first claim to serve, of those at the head of their groups."""
        heads = [group.queued[0] for group in self._groups.values() if group.queued and may(group)]
        return min(heads, key=self._rank(), default=None)

    def _rank(self) -> Callable[[Claim], Rank]:
        """Return the order in which claims are served now."""
        return Ranking(self._holding, self._round_robin).rank

    def _victims(self, origin: OriginState | None) -> list[Claim]:
        """Return the claims that may be paused, of one origin or of all."""
        victims: list[Claim] = []
        for claim in self._holding:
            group = claim.group
            if claim.work is None or group.priority.waiting:
                continue
            if origin in (None, group.origin):
                victims.append(claim)
        return victims

    def _grant(self, claim: Claim) -> None:
        group = claim.group
        group.queued.remove(claim)
        self._holding[claim] = None
        group.origin.held += 1
        self._round_robin.serve(group.priority.client)
        self._paused.pop(claim, None)
        if not claim.granted.done():  # done if it was paused, or has just been cancelled
            claim.generation = group.origin.aimd.generation
            claim.concurrency = group.origin.held
            claim.granted.set_result(None)
        elif claim.work is not None:
            claim.work.resume()

    def _pause_one(self, origin: OriginState | None) -> bool:
        """Pause the least urgent claim of an origin, or of all; return whether there was one."""
        claim = max(self._victims(origin), key=_urgency, default=None)
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


def _urgency(claim: Claim) -> tuple[int, float, int]:
    """Return the order in which claims are paused: by class, deadline and arrival, latest first."""
    priority = claim.group.priority
    return priority.klass, priority.deadline_s, claim.arrival
