"""The core of the daemon: what to fetch next and what to evict, decided from all plans. Pure.

Pure means without I/O, a clock or an event loop: `Planner` sets the time, the cache reports what
happens to shards, and simulations use the same code.

The rules are those of P. Cao, E. Felten, A. Karlin and K. Li, "A Study of Integrated Prefetching
and Caching Strategies", SIGMETRICS 1995: fetch the missing shard that is needed soonest; evict the
shard that is needed furthest ahead; never evict a shard that is needed before the fetched one; and
do all this at the first opportunity.

The last rule needs care. A fetch into free space, or into the space of unplanned shards, which are
in no plan, costs nothing, so it starts as soon as there is space, however far ahead. A fetch that
evicts a planned shard too early evicts the wrong one: the shards that are read in between, and then
not needed for an epoch, would have been better victims. A job that loops over a dataset twice the
size of the cache would get no hits at all. Such a fetch therefore waits for a better victim until
it must start to be in time: a lead time before its shard is needed (the fixed horizon of R.
Patterson et al., "Informed Prefetching and Caching", SOSP 1995). With a lead time of 0, this is L.
Belady's MIN ("A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal 1966).

A resident is a cached shard. The time of its next use shifts constantly, with each session's pace
and progress, but no queue is ever sorted again. Each plan has a queue of residents, ordered by
their positions in the plan, which never change. A resident is in the queue of one plan at most, and
another plan may come to need it sooner. So the resident's next use is at the time by that queue, or
before it.

To find the resident that is needed furthest ahead, take the one with the latest time by its queue.
If its next use is at that time, no resident is needed later. Otherwise it moves to the queue of its
next use, and the search goes on.
"""

import heapq
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

from shardcache.plan.reader_plan import NEVER, ReaderPlan
from shardcache.plan.sieve import Sieve
from shardcache.plan.timeline import Session, Timeline

# Stale entries, whose resident is gone or queued elsewhere, are dropped from a queue once it has
# this many entries more than twice the number of residents.
_SLACK = 64
_BATCH = 32  # number of residents of ended plans that are queued again at a time

_Entry = tuple[int, str]
"""Entry of a queue: the negative position of a shard in the plan, and its key.

The first entry of a heap is the smallest, so it is the one with the furthest position.
"""


class Aliases(Protocol):
    """Mapping between the shard names in plans and the keys in the cache."""

    def key(self, name: str) -> str:
        """Return the key for a name."""

    def names(self, key: str) -> Collection[str]:
        """Return every name for a key."""


class SameName:
    """The aliases of shards whose keys are their only names, as in simulations."""

    def key(self, name: str) -> str:
        """Return the key for a name."""
        return name

    def names(self, key: str) -> Collection[str]:
        """Return every name for a key."""
        return (key,)


@dataclass(slots=True, eq=False)
class Resident:
    """A cached shard.

    Attributes:
        key: key of the shard in the cache.
        size_bytes: number of bytes that its eviction frees.
        held: True while the shard is in use and cannot be evicted; it is in no queue then.
        used_again: True if the shard was requested while it was cached. It is False again once the
            shard is unplanned: `Sieve` then remembers the use.
        plan: the plan whose queue the shard is in; None while it is held or unplanned.
        position: position in that plan.
    """

    key: str
    size_bytes: int
    held: bool = False
    used_again: bool = False
    plan: ReaderPlan | None = None
    position: int = 0


class Schedule(Timeline[Session]):
    """The plans of all sessions, and the cached shards in eviction order.

    Shards in no plan are evicted first, then planned shards, the furthest next use first.

    Args:
        aliases: the keys of the names in plans.
    """

    def __init__(self, aliases: Aliases) -> None:
        super().__init__()
        self._aliases = aliases
        self._unplanned = Sieve()
        self._residents: dict[str, Resident] = {}  # by key
        # The queues are heaps, with the furthest position first. An entry is stale if its resident
        # is no longer cached, or was queued elsewhere later.
        self._queues: dict[ReaderPlan, list[_Entry]] = {}
        self._orphans: list[_Entry] = []  # entries of the queues of ended plans

    def __repr__(self) -> str:
        residents = len(self._residents)
        return f"Schedule({super().__repr__()}, {residents=}, unplanned={self._unplanned!r})"

    def tick(self, now_s: float) -> None:
        """Set the current time, which must not decrease."""
        super().tick(now_s)
        self._requeue_orphans()

    # Events of sessions

    def extend(self, session: Session, names: Collection[str]) -> None:
        """Append shards to a session's plan, in reading order."""
        super().extend(session, names)
        for name in names:
            resident = self._residents.get(self._aliases.key(name))
            if resident is None or resident.held:
                continue
            # A resident in another plan's queue stays there, even if this plan needs it sooner:
            # `_furthest_planned` moves it once the difference matters.
            if resident.plan is None or resident.plan.ended:
                self._enqueue(resident)

    def forget(self, session: Session) -> ReaderPlan | None:
        """Drop a session and its plan; return the plan, now ended, or None if it had none."""
        plan = super().forget(session)
        if plan is not None:
            self._orphans += self._queues.pop(plan, ())
            if len(self._orphans) > 2 * len(self._residents) + _SLACK:
                # Sessions end faster than ticks and searches for victims drop these entries.
                distinct = set(self._orphans)
                self._orphans = [
                    (position, key) for position, key in distinct if self._is_orphan(key)
                ]
        return plan

    def _move(self, plan: ReaderPlan, position: int) -> list[str]:
        """Advance a plan's cursor, and queue the passed shards by their next uses; return them."""
        passed = super()._move(plan, position)
        for name in passed:
            self._requeue(self._aliases.key(name))
        return passed

    # Events of shards

    def arrived(self, key: str, size_bytes: int) -> None:
        """Record that a shard is in the cache."""
        resident = Resident(key, size_bytes)
        self._residents[key] = resident
        self._enqueue(resident)

    def gone(self, key: str) -> None:
        """Record that a shard is no longer in the cache."""
        resident = self._residents.pop(key, None)
        if resident is not None:
            self._unplanned.gone(key)
            if resident.plan is not None:
                self._drop_if_furthest(resident.plan, (-resident.position, key))
        for name in self._aliases.names(key):
            self.missing_again(name)

    def _drop_if_furthest(self, plan: ReaderPlan, entry: _Entry) -> None:
        """Drop the entry of a removed shard if it is the furthest of its queue.

        This is so after an eviction. Any other entry is stale from now on, and is dropped once it
        is the furthest.
        """
        queue = self._queues.get(plan)
        if queue and queue[0] == entry:
            self._pop(plan)

    def held(self, key: str) -> None:
        """Record that a shard is in use and cannot be evicted."""
        resident = self._residents[key]
        resident.held = True
        resident.plan = None
        self._unplanned.gone(key)

    def freed(self, key: str) -> None:
        """Record that a shard is no longer in use; no-op if it is no longer cached."""
        resident = self._residents.get(key)
        if resident is not None:
            resident.held = False
            self._enqueue(resident)

    def used(self, key: str) -> None:
        """Record that a cached shard was requested, or a part was retained for a reader."""
        self._residents[key].used_again = True
        if key in self._unplanned:
            self._unplanned.used(key)

    def renamed(self, name: str, *, previous_key: str, key: str) -> None:
        """Record that a name in plans maps to another key now."""
        # The name's uses were those of the previous key, and are those of the new one.
        self._requeue(previous_key)
        self._requeue(key)
        self.missing_again(name)  # the shard may not be cached under its new key

    # Queues

    def _requeue(self, key: str) -> None:
        """Queue a shard again after its next use has changed.

        No-op if it is not cached, or is in use.
        """
        resident = self._residents.get(key)
        if resident is not None and not resident.held:
            self._enqueue(resident)

    def _enqueue(self, resident: Resident) -> None:
        """Put a shard into the queue of its soonest use, or among the unplanned shards."""
        use = self.next_use(self._aliases.names(resident.key))
        if use is None:
            resident.plan = None
            if resident.key not in self._unplanned:
                self._unplanned.arrived(resident.key, used=resident.used_again)
                resident.used_again = False
            return
        self._unplanned.gone(resident.key)
        plan, position = use
        if resident.plan is not plan or resident.position != position:
            resident.plan = plan
            resident.position = position
            self._push(plan, position, resident.key)

    def _push(self, plan: ReaderPlan, position: int, key: str) -> None:
        """Add an entry to a plan's queue, and drop stale entries if there are many."""
        queue = self._queues.setdefault(plan, [])
        heapq.heappush(queue, (-position, key))
        if len(queue) > 2 * len(self._residents) + _SLACK:  # most entries are stale
            current = [entry for entry in set(queue) if self._is_current(plan, entry)]
            heapq.heapify(current)
            self._queues[plan] = current

    def _pop(self, plan: ReaderPlan) -> _Entry:
        """Remove the furthest entry of a plan's queue, and return it."""
        queue = self._queues[plan]
        entry = heapq.heappop(queue)
        if not queue:
            del self._queues[plan]
        return entry

    def _is_current(self, plan: ReaderPlan, entry: _Entry) -> bool:
        """Return whether an entry of a plan's queue is not stale."""
        negative_position, key = entry
        resident = self._residents.get(key)
        if resident is None or resident.plan is not plan:
            return False
        return resident.position == -negative_position

    def _is_orphan(self, key: str) -> bool:
        """Return whether a shard is cached, and in the queue of a plan that has ended."""
        resident = self._residents.get(key)
        return resident is not None and resident.plan is not None and resident.plan.ended

    def _requeue_orphans(self) -> None:
        """Queue a batch of the shards whose plan has ended.

        All of them at once would block the event loop.
        """
        for _, key in self._orphans[-_BATCH:]:
            if self._is_orphan(key):
                self._enqueue(self._residents[key])
        del self._orphans[-_BATCH:]

    # Decisions

    def next_use_s(self, key: str) -> float:
        """Return when a shard is needed next; NEVER if no plan contains it."""
        use = self.next_use(self._aliases.names(key))
        if use is None:
            return NEVER
        plan, position = use
        return plan.start_s + plan.pace_s * position

    def victims(self, wanted_bytes: int, needed_at_s: float, lead_s: float) -> list[str] | None:
        """Return keys to evict for an incoming shard; None if they cannot free enough yet.

        Unplanned shards are chosen first, in SIEVE's order, then planned shards, the furthest next
        use first. Chosen shards whose bytes turn out not to be needed are spared.

        Args:
            wanted_bytes: number of bytes to free; 0 or less needs no victims.
            needed_at_s: time at which the incoming shard is needed.
            lead_s: time before the need from which on planned shards may be evicted.
        """
        if wanted_bytes <= 0:
            return []
        is_early = needed_at_s > self.now_s + lead_s
        missing_bytes = wanted_bytes
        chosen: list[Resident] = []
        for resident, use_s in self._furthest():
            # 1. A shard that is needed before the incoming one, or at the same time, is not
            #    evicted: that would only move the miss to that shard.
            if use_s <= needed_at_s:
                return None
            # 2. A planned shard is not evicted before the lead time: a shard that is read until
            #    then may be a better victim.
            if is_early and use_s < NEVER:
                return None
            # 3. Any other shard may be evicted. They come with the furthest next use first.
            chosen.append(resident)
            missing_bytes -= resident.size_bytes
            if missing_bytes <= 0:
                return _without_spare(chosen, -missing_bytes)
        return None

    def _furthest(self) -> Iterator[tuple[Resident, float]]:
        """Yield the shards that may be evicted and the times of their next use, furthest first.

        The time of an unplanned shard is NEVER.
        """
        yielded: set[str] = set()
        while True:
            for key in self._unplanned.victims():
                if key not in yielded:
                    yielded.add(key)
                    yield self._residents[key], NEVER
            if not self._orphans:
                break
            # Residents of ended plans become unplanned if no other plan needs them. So queue a
            # batch of them again, and look for further unplanned shards.
            self._requeue_orphans()
        yield from self._furthest_planned()

    def _furthest_planned(self) -> Iterator[tuple[Resident, float]]:
        """Yield the shards of all queues and the times of their next use, furthest first.

        When the iteration ends, the yielded shards are back in their queues.
        """
        yielded: dict[str, tuple[ReaderPlan, _Entry]] = {}  # by key, the queue's plan and the entry
        try:
            while True:
                furthest = self._furthest_queue()
                if furthest is None:
                    return
                use_s, plan = furthest
                entry = self._pop(plan)
                _, key = entry
                # Stale and duplicate entries are dropped once they are the furthest.
                if key in yielded or not self._is_current(plan, entry):
                    continue
                # If another plan needs the resident sooner, it moves to that plan's queue.
                if self.next_use_s(key) < use_s:
                    self._enqueue(self._residents[key])
                    continue
                yielded[key] = (plan, entry)
                yield self._residents[key], use_s
        finally:
            for plan, entry in yielded.values():
                heapq.heappush(self._queues.setdefault(plan, []), entry)

    def _furthest_queue(self) -> tuple[float, ReaderPlan] | None:
        """Return the furthest use among the first entries of all queues, and the queue's plan."""
        furthest: tuple[float, ReaderPlan] | None = None
        for plan, queue in self._queues.items():
            negative_position, _ = queue[0]
            position = -negative_position
            use_s = plan.start_s + plan.pace_s * position
            if furthest is None or use_s > furthest[0]:
                furthest = (use_s, plan)
        return furthest


def _without_spare(chosen: list[Resident], spare_bytes: int) -> list[str]:
    """Return the keys of the chosen shards, without shards whose bytes are not needed.

    Shards with the soonest next use are spared first.

    Args:
        chosen: the shards, the furthest next use first.
        spare_bytes: number of bytes that the chosen shards have beyond those to be freed.
    """
    needed: list[str] = []  # the soonest next use first
    for resident in reversed(chosen):
        if resident.size_bytes <= spare_bytes:
            spare_bytes -= resident.size_bytes
        else:
            needed.append(resident.key)
    return needed[::-1]
