"""The rule by which slots are dealt, in its plainest form: for comparison with the quick one."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from shardcache.errors import OriginBusyError
from shardcache.fetch.aimd import Aimd
from shardcache.fetch.bid import Bid
from shardcache.fetch.line import Line
from shardcache.fetch.rotation import Rotation
from shardcache.fetch.slots import Claim

_ALONE_S = 1.0


class BruteSlots:
    """`Slots` by its rule: at each step every claim of queue and holders is asked and compared.

    Of those in the queue goes first: the lowest class; in it the party that holds fewest slots, then the one that
    was served longest ago; of its claims that with the earliest deadline, then the first come.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._holding: list[Claim] = []
        self._queue: list[Claim] = []
        self._held: Counter[str] = Counter()
        self._limits: dict[str, Aimd] = {}
        self._rotation = Rotation()
        self._lines: defaultdict[str, Line] = defaultdict(Line)
        self._cleared = set[str]()
        self._alone_until_s: WeakKeyDictionary[Callable[[], Bid], float] = WeakKeyDictionary()  # of each download
        self.pauses = 0

    def took(self, claim: Claim, size_bytes: int, time_s: float) -> None:
        """Record a part that arrived, and how long it was read."""
        self._lines[claim.store].took(size_bytes, time_s, (claim.company + self._held[claim.store]) / 2)
        if claim.bid in self._alone_until_s:
            self._prolong(claim.bid)

    def _prolong(self, ask: Callable[[], Bid]) -> None:
        loop = asyncio.get_running_loop()
        self._alone_until_s[ask] = loop.time() + _ALONE_S
        loop.call_later(_ALONE_S, self.deal)

    @asynccontextmanager
    async def hold(self, claim: Claim) -> AsyncIterator[None]:
        """Hold a slot for the block, with interruptions while `claim.work` is set.

        A block that ends with OriginBusyError lowers its store's limit, one that ends well may raise it.
        """
        limit = self._limits.setdefault(claim.store, Aimd(self._count))
        claim._granted, claim.paused = asyncio.get_running_loop().create_future(), False
        self._queue.append(claim)
        try:
            self.deal()
            await claim._granted
            yield
            limit.succeeded(claim._generation)
        except OriginBusyError:
            limit.refused(claim._generation)
            raise
        finally:
            self._leave(claim)
            self.deal()

    def deal(self) -> None:
        """Give every slot to whom it belongs at this moment; call it when a bid became more urgent."""
        bids = _Bids()
        self._cleared = self._find_cleared(bids)
        for store in self._cleared:
            resting = [holder for holder in self._holding if holder.store == store and _may_rest(holder, bids)]
            for holder in sorted(resting, key=lambda holder: _urgency(holder, bids), reverse=True):
                if self._held[store] > (self._lines[store].connections or 0) and self._may_pause_more:
                    self._pause(holder)
        while (claim := self._best(self._grantable(bids), bids)) is not None:
            self._grant(claim, bids)
        while (claim := self._best(self._usurpers(bids), bids)) is not None:
            self._pause(max(self._victims(claim, bids), key=lambda victim: _urgency(victim, bids)))
            self._grant(claim, bids)

    def _find_cleared(self, bids: _Bids) -> set[str]:
        """Return the stores of which somebody has the line to himself."""
        loop, stores = asyncio.get_running_loop(), set[str]()
        for claim in (*self._holding, *self._queue):
            if bids.of(claim).alone:
                if claim.bid not in self._alone_until_s:
                    self._prolong(claim.bid)
                if loop.time() < self._alone_until_s[claim.bid]:
                    stores.add(claim.store)
        return stores

    def _grantable(self, bids: _Bids) -> list[Claim]:
        if len(self._holding) >= self._count:
            return []
        open_to_all = [claim for claim in self._queue if not self._is_full(claim.store)]
        return [claim for claim in open_to_all if bids.of(claim).waiting or not self._rests(claim.store)]

    def _rests(self, store: str) -> bool:
        return store in self._cleared and self._lines[store].connections is None

    @property
    def _may_pause_more(self) -> bool:
        return sum(claim._begun for claim in self._queue) < self._count

    def _usurpers(self, bids: _Bids) -> list[Claim]:
        more = self._may_pause_more
        urgent = [claim for claim in self._queue if bids.of(claim).waiting and (more or claim._begun)]
        return [claim for claim in urgent if self._victims(claim, bids)]

    def _victims(self, claim: Claim, bids: _Bids) -> list[Claim]:
        within = self._is_full(claim.store)
        return [
            holder
            for holder in self._holding
            if _may_rest(holder, bids) and (holder.store == claim.store or not within)
        ]

    def _best(self, claims: list[Claim], bids: _Bids) -> Claim | None:
        if len(claims) <= 1:
            return claims[0] if claims else None
        held = Counter((bids.of(holder).klass, bids.of(holder).party) for holder in self._holding)

        def rank(claim: Claim) -> tuple[int, int, int, float, int]:
            bid = bids.of(claim)
            share = held[bid.klass, bid.party]
            return bid.klass, share, self._rotation.last(bid.party), bid.deadline_s, claim.arrival

        return min(claims, key=rank)

    def _grant(self, claim: Claim, bids: _Bids) -> None:
        self._queue.remove(claim)
        self._holding.append(claim)
        self._held[claim.store] += 1
        self._rotation.serve(bids.of(claim).party)
        assert claim._granted is not None
        if not claim._begun:
            claim._generation = self._limits[claim.store].generation
            claim.company = self._held[claim.store]
            claim._granted.set_result(None)
        elif claim.work is not None:
            claim.work.resume()

    def _pause(self, claim: Claim) -> None:
        assert claim.work is not None
        claim.work.halt()
        claim.paused = True
        self._leave(claim)
        self._queue.append(claim)
        self.pauses += 1

    def _leave(self, claim: Claim) -> None:
        if claim in self._holding:
            self._holding.remove(claim)
            self._held[claim.store] -= 1
        else:
            self._queue.remove(claim)

    def _is_full(self, store: str) -> bool:
        limits = [self._limits[store].limit]
        line = self._lines[store].connections
        if store in self._cleared and line is not None:
            limits.append(line)
        return self._held[store] >= min(limits)


class _Bids:
    """What is bid at one moment. The parts of a download share one callable, which is asked once."""

    def __init__(self) -> None:
        self._known: dict[Callable[[], Bid], Bid] = {}

    def of(self, claim: Claim) -> Bid:
        """Return what a claim bids."""
        bid = self._known.get(claim.bid)
        if bid is None:
            bid = self._known[claim.bid] = claim.bid()
        return bid


def _may_rest(holder: Claim, bids: _Bids) -> bool:
    return holder.work is not None and not bids.of(holder).waiting


def _urgency(claim: Claim, bids: _Bids) -> tuple[int, float, int]:
    bid = bids.of(claim)
    return bid.klass, bid.deadline_s, claim.arrival
