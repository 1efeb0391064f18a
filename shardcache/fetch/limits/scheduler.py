"""Scheduler for the node's connections: grants them by priority, preempts the least urgent."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from shardcache.errors import OriginBusyError
from shardcache.fetch.limits.hedging import HEDGED_SHARE, Hedging
from shardcache.fetch.limits.origin_states import Aimd, Limit, OriginLoad, OriginState
from shardcache.fetch.limits.slot_claims import (
    AskPriority,
    Claim,
    ClaimGroup,
    Ranking,
    RoundRobin,
)
from shardcache.fetch.stopwatch import now_s

# Origins remembered: those in use and the most recent ones.
_MAX_ORIGINS = 64
# How long a download that is `alone` has precedence after each of its parts: one whose parts do not
# arrive holds up the others for no longer.
_ALONE_S = 1.0
# Time between two rounds of asking all downloads for their priorities. They change with every step
# of a reader, but to ask at each part would take longer than some parts do.
ASK_AGAIN_S = 0.02


class Scheduler:
    """Fixed number of connection slots; a waiting reader's claim preempts one nobody waits for.

    Each part of a download has a claim; a download's claims on one origin are a group. `Rank` has
    the order in which claims get a slot.

    A download is `alone` if a reader reads its shard as it arrives. On its origin, only the most
    urgent claims run then, and no more of them than saturate the link: others would delay each of
    its parts. While the link is not measured yet, one part of the download runs at a time; beside
    it, only claims that other readers wait for may begin.

    A preempted claim pauses, and queues for another slot with its own priority. At most as many
    claims are paused as there are slots, so at most twice as many claims as slots occupy memory.

    Args:
        slots: for all origins together; also the initial limit of each origin.
        hedged_share: the most parts of an origin whose requests are hedged, as a share of all.
    """

    def __init__(self, slots: int, hedged_share: float = HEDGED_SHARE) -> None:
        self._slots = slots
        self._hedged_share = hedged_share
        self._groups: dict[tuple[AskPriority, str], ClaimGroup] = {}
        self._origins: dict[str, OriginState] = {}  # the one used last is at the end
        self._holding: dict[Claim, None] = {}
        self._paused: dict[Claim, None] = {}  # queued again, until they get another slot
        self._round_robin = RoundRobin()
        self._ranking = Ranking(self._round_robin)
        # End of the precedence of each download that is `alone`. A download's key is its function
        # that returns its priority.
        self._alone_until_s: WeakKeyDictionary[AskPriority, float] = WeakKeyDictionary()
        self._ask_due_s = 0.0  # when all priorities are to be asked for again
        self.pauses = 0  # number of times that a claim was preempted, or paused for one `alone`

    def __repr__(self) -> str:
        queued = sum(len(group.queued) for group in self._groups.values())
        return f"<Scheduler {len(self._holding)} of {self._slots} held, {queued} queued>"

    @asynccontextmanager
    async def hold(self, claim: Claim) -> AsyncIterator[None]:
        """Hold a slot during the block; it may be preempted while `claim.work` is set.

        A block that ends with OriginBusyError lowers the origin's limit; one that succeeds may
        raise it.
        """
        self._enter(claim)
        aimd = claim.group.origin.aimd
        try:
            self._reassign()
            await claim.granted
            yield
            aimd.succeeded(claim.generation)
        except OriginBusyError:
            aimd.refused(claim.generation)
            raise
        finally:
            self._leave(claim)
            self._reassign()

    def reconsider(self) -> None:
        """Ask for all priorities and reassign slots; to be called when one is more urgent now.

        Without a call, that happens when a claim comes or goes, if `ASK_AGAIN_S` has passed.
        """
        self._ask_due_s = 0.0
        self._reassign()

    def took(self, claim: Claim, size_bytes: int, time_s: float) -> None:
        """Record the size and read time of a part that arrived while `claim` held its slot."""
        origin = self.origin(claim.origin_name)
        mean_concurrency = (claim.concurrency + origin.held) / 2  # of its beginning and its end
        origin.link.took(size_bytes, time_s, mean_concurrency)

        download = claim.ask_priority
        if download in self._alone_until_s:
            if not self._has_precedence(download):
                self._ask_due_s = 0.0  # its precedence had expired, and begins again
            self._prolong(download)

    def share(self, origin: OriginState) -> int:
        """Return how many connections to an origin each of its downloads can have at a time."""
        downloads = sum(group.origin is origin for group in self._groups.values())
        connections = origin.usable // max(1, downloads)
        return max(1, connections)

    def origin(self, name: str) -> OriginState:
        """Return the state of an origin, a new one for a new name. It is then the one used last.

        Unused ones beyond `_MAX_ORIGINS` are forgotten.
        """
        origin = self._origins.pop(name, None)
        if origin is None:
            origin = OriginState(name, Aimd(self._slots), Hedging(self._hedged_share))
        self._origins[name] = origin

        excess = len(self._origins) - _MAX_ORIGINS
        if excess > 0:
            self._forget(excess, origin)
        return origin

    def _forget(self, excess: int, newest: OriginState) -> None:
        """Forget up to `excess` of the unused origins; the newest is about to be used."""
        used = {newest, *(group.origin for group in self._groups.values())}
        unused = [origin for origin in self._origins.values() if origin not in used]
        for origin in unused[:excess]:
            del self._origins[origin.name]

    def loads(self) -> list[OriginLoad]:
        """Return the load on each of the origins used last."""
        latest = list(self._origins.values())[-_MAX_ORIGINS:]
        return [origin.load for origin in latest]

    def limits(self, name: str | None = None) -> Iterator[Limit]:
        """Yield the limit of each origin that throttles, then the one on all connections.

        A limit holds if claims wait because of it.

        Args:
            name: of the only origin to look at; None for all.
        """
        awaited_origins = [group.origin for group in self._groups.values() if group.queued]
        for origin in self._origins.values():
            is_wanted = name is None or name == origin.name
            if is_wanted and origin.aimd.is_lowered:
                limit = origin.aimd.limit
                text = f"{origin.name} throttles to {limit} of {self._slots} connections"
                is_awaited = origin in awaited_origins
                yield Limit("throttling", text, holds=is_awaited and origin.is_full)

        held = len(self._holding)
        text = f"{held} of {self._slots} connections"
        yield Limit("connections", text, holds=bool(awaited_origins) and held >= self._slots)

    def _enter(self, claim: Claim) -> None:
        """Queue a claim for a slot, in the group of its download."""
        claim.granted = asyncio.get_running_loop().create_future()
        claim.was_paused = False

        key = (claim.ask_priority, claim.origin_name)
        group = self._groups.get(key)
        if group is None:
            priority = claim.ask_priority()
            group = ClaimGroup(claim.ask_priority, self.origin(claim.origin_name), priority)
            self._groups[key] = group
        group.count += 1
        group.enqueue(claim)
        claim.group = group

    def _leave(self, claim: Claim) -> None:
        """Remove a claim, whether it holds a slot, is paused, or never got one."""
        group = claim.group
        if claim in self._holding:
            self._release(claim)
        else:
            self._paused.pop(claim, None)
            group.queued.remove(claim)
        group.count -= 1
        if not group.count:
            del self._groups[group.ask_priority, group.origin.name]

    def _reassign(self) -> None:
        """Reassign the slots.

        1. If a download is `alone`, claims that no reader waits for pause on its origin.
        2. Free slots go to the claims whose origin has room, by their ranks.
        3. When there is no slot left, or no room at an origin, a waiting reader's claim takes the
           slot of the least urgent claim that no reader waits for.
        """
        if now_s() >= self._ask_due_s:
            self._ask_all_priorities()

        # 1. Pause
        self._clear_links()

        # 2. Fill
        while len(self._holding) < self._slots:
            claim = self._first(lambda group: group.is_admitted)
            if claim is None:
                break
            self._grant(claim)

        # 3. Preempt
        while True:
            claim = self._preemptor()
            if claim is None:
                break
            origin = claim.group.origin
            if origin.is_full:
                self._pause_one(origin)
            else:
                self._pause_one(None)  # slots are short, not room at the origin
            self._grant(claim)

    def _ask_all_priorities(self) -> None:
        """Ask each download once for its priority, and rank all claims by the answers."""
        self._ask_due_s = now_s() + ASK_AGAIN_S
        downloads = {group.ask_priority for group in self._groups.values()}
        priorities = {ask_priority: ask_priority() for ask_priority in downloads}
        for group in self._groups.values():
            group.priority = priorities[group.ask_priority]
        self._ranking.recount(self._holding)

    def _clear_links(self) -> None:
        """Pause claims that no reader waits for, where they would slow down one that is `alone`."""
        alone = [group for group in self._groups.values() if group.priority.alone]
        cleared = {group.origin for group in alone if self._has_precedence(group.ask_priority)}
        for origin in self._origins.values():
            origin.cleared = origin in cleared

        for origin in cleared:
            room = origin.link.connections or 0  # none while the link is not measured
            while origin.held > room and self._may_pause_more:
                has_paused = self._pause_one(origin)
                if not has_paused:
                    break

    def _has_precedence(self, download: AskPriority) -> bool:
        """Return whether a download that is `alone` has precedence still.

        It begins with the first call for the download.
        """
        if download not in self._alone_until_s:
            self._prolong(download)
        return now_s() < self._alone_until_s[download]

    def _prolong(self, download: AskPriority) -> None:
        """Give a download precedence for `_ALONE_S` from now; others may be served after that."""
        self._alone_until_s[download] = now_s() + _ALONE_S
        asyncio.get_running_loop().call_later(_ALONE_S, self.reconsider)

    @property
    def _may_pause_more(self) -> bool:
        return len(self._paused) < self._slots

    def _preemptor(self) -> Claim | None:
        """Return the waiting reader's claim that is to preempt another, if any can be preempted."""
        if not any(group.queued and group.priority.waiting for group in self._groups.values()):
            return None
        preemptible = {claim.group.origin for claim in self._victims(None)}
        if not preemptible:
            return None

        def may_preempt(group: ClaimGroup) -> bool:
            if not group.priority.waiting:
                return False
            # A claim may always take the slot of another claim on its origin. That of a claim on
            # another origin is of use only if its own has room.
            return group.origin in preemptible or group.is_admitted

        if self._may_pause_more:
            return self._first(may_preempt)
        # No more claims may pause. So only a paused claim can preempt another, and changes places
        # with it.
        paused = [claim for claim in self._paused if may_preempt(claim.group)]
        return min(paused, key=self._ranking.rank, default=None)

    def _first(self, is_eligible: Callable[[ClaimGroup], bool]) -> Claim | None:
        """Return the first claim to serve of those queued in eligible groups."""
        groups = [group for group in self._groups.values() if group.queued and is_eligible(group)]
        heads = [group.queued[0] for group in groups]
        return min(heads, key=self._ranking.rank, default=None)

    def _victims(self, origin: OriginState | None) -> list[Claim]:
        """Return the claims that may be paused: on one origin, or on all for None."""
        victims: list[Claim] = []
        for claim in self._holding:
            group = claim.group
            if claim.work is None or group.priority.waiting:
                continue
            if origin in (None, group.origin):
                victims.append(claim)
        return victims

    def _grant(self, claim: Claim) -> None:
        """Give a queued claim a slot: its first one, or another after a pause."""
        group = claim.group
        group.queued.remove(claim)
        self._holding[claim] = None
        self._ranking.granted(claim)
        group.origin.held += 1
        self._round_robin.serve(group.priority.client)
        self._paused.pop(claim, None)
        if not claim.granted.done():
            claim.generation = group.origin.aimd.generation
            claim.concurrency = group.origin.held
            claim.granted.set_result(None)
        elif claim.work is not None:
            claim.work.resume()
        # Otherwise it has just been cancelled, or its work has ended: it is about to leave.

    def _pause_one(self, origin: OriginState | None) -> bool:
        """Pause the least urgent claim on an origin, on any for None; return False if none may be.

        It queues again.
        """
        claim = max(self._victims(origin), key=_pausing_order, default=None)
        if claim is None or claim.work is None:
            return False
        claim.work.halt()
        claim.was_paused = True
        self._release(claim)
        self._paused[claim] = None
        claim.group.enqueue(claim)
        self.pauses += 1
        return True

    def _release(self, claim: Claim) -> None:
        del self._holding[claim]
        self._ranking.released(claim)
        claim.group.origin.held -= 1


def _pausing_order(claim: Claim) -> tuple[int, float, int]:
    """Return a key by which the claim that is to pause first is the greatest: the least urgent."""
    priority = claim.group.priority
    return priority.klass, priority.deadline_s, claim.arrival
