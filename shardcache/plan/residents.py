"""The cached shards in eviction order: unplanned shards first, then by furthest next use. Pure.

The order is that of L. Belady's MIN ("A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal 1966). Next uses shift all the time, with each session's pace and progress, yet no queue is ever re-sorted:
every resident is in the queue of one plan that names it, by position, and the order within a plan never changes.
The use by that plan is no sooner than the resident's soonest use by any plan. So the furthest among the ends of all
queues is the furthest resident of all, if its soonest use is the one it is queued for; if not, it moves to the queue of
that use, and the next is examined.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from shardcache.plan.reader_plan import ReaderPlan
from shardcache.plan.timeline import NEVER, Timeline

_SLACK = 64
_BATCH = 32


class Policy(Protocol):
    """Eviction order of the shards that no plan contains.

    A policy knows only what may be evicted: a shard that is in use or planned is gone for it, and arrives again
    afterwards.
    """

    def __contains__(self, key: str) -> bool:
        """Return whether a shard has arrived and is not gone."""

    def arrived(self, key: str, *, used: bool = False) -> None:
        """Add a shard; `used` if it was requested while cached, since it was last gone."""

    def used(self, key: str) -> None:
        """Record that one of the shards was requested."""

    def gone(self, key: str) -> None:
        """Remove a shard, if it is one of them."""

    def victims(self) -> Iterator[str]:
        """Yield all shards, the first to evict first. This alone removes none; the next call yields the same order."""


@dataclass(slots=True, eq=False)
class Resident:
    """A cached shard.

    Attributes:
        size_bytes: bytes that its eviction frees.
        held: True while it is in use; it is in no queue then.
        used_again: True if it was requested while cached, since it last arrived in the policy.
        reader_plan, position: the queue that it is in, and its position there; no plan while it is held or unplanned.
    """

    key: str
    size_bytes: int
    held: bool = False
    used_again: bool = False
    reader_plan: ReaderPlan | None = None
    position: int = 0


class Residents:
    """The cached shards, queued for eviction.

    Args:
        names: returns every name that plans may use for a key.
        unplanned: eviction order of unplanned shards.
    """

    def __init__(self, timeline: Timeline[Any], names: Callable[[str], Collection[str]], unplanned: Policy) -> None:
        self._timeline = timeline
        self._names = names
        self._residents: dict[str, Resident] = {}
        self._unplanned = unplanned
        self._queues: dict[ReaderPlan, list[tuple[int, str]]] = {}  # heaps: the furthest position first
        self._orphans: list[tuple[int, str]] = []  # queue entries of plans that have ended

    def __repr__(self) -> str:
        return f"Residents(shards={len(self)}, unplanned={self._unplanned!r})"

    def __len__(self) -> int:
        return len(self._residents)

    def __contains__(self, key: str) -> bool:
        return key in self._residents

    def add(self, key: str, size_bytes: int) -> None:
        """Add a cached shard."""
        self._residents[key] = Resident(key, size_bytes)
        self._queue(self._residents[key])

    def remove(self, key: str) -> None:
        """Remove a shard, if it is cached."""
        resident = self._residents.pop(key, None)
        if resident is not None:
            self._unplanned.gone(key)
            queue = self._queues.get(resident.reader_plan) if resident.reader_plan is not None else None
            if resident.reader_plan is not None and queue and queue[0] == (-resident.position, key):
                self._pop(
                    resident.reader_plan
                )  # always the case for victims; other entries are dropped when they are reached

    def hold(self, key: str) -> None:
        """Exempt a shard from eviction because it is in use."""
        resident = self._residents[key]
        resident.held, resident.reader_plan = True, None
        self._unplanned.gone(key)

    def free(self, key: str) -> None:
        """Queue a shard that is no longer in use."""
        resident = self._residents.get(key)
        if resident is not None:
            resident.held = False
            self._queue(resident)

    def use_again(self, key: str) -> None:
        """Record that a cached shard was requested."""
        self._residents[key].used_again = True
        if key in self._unplanned:
            self._unplanned.used(key)

    def planned(self, key: str) -> None:
        """Queue a shard, if it is cached, that one more plan contains."""
        resident = self._residents.get(key)
        # It may stay in another plan's queue: its place there is no sooner than its soonest use.
        if resident is not None and not resident.held and (resident.reader_plan is None or resident.reader_plan.ended):
            self._queue(resident)

    def passed(self, key: str) -> None:
        """Requeue a shard, if it is cached, that a plan has passed or no longer contains."""
        resident = self._residents.get(key)
        if resident is not None and not resident.held:
            self._queue(resident)

    def forget(self, reader_plan: ReaderPlan) -> None:
        """Drop the queue of a plan that has ended; `settle` requeues its shards."""
        self._orphans += self._queues.pop(reader_plan, ())
        if len(self._orphans) > 2 * len(self) + _SLACK:  # no victim was needed for a long time
            self._orphans = [entry for entry in set(self._orphans) if self._is_lost(entry[1])]

    def settle(self) -> None:
        """Requeue a batch of shards whose plan has ended: all at once would block the event loop."""
        for _, key in self._orphans[-_BATCH:]:
            if self._is_lost(key):
                self._queue(self._residents[key])
        del self._orphans[-_BATCH:]

    def _is_lost(self, key: str) -> bool:
        resident = self._residents.get(key)
        return resident is not None and resident.reader_plan is not None and resident.reader_plan.ended

    def _queue(self, resident: Resident) -> None:
        use = self._timeline.next_use(self._names(resident.key))
        if use is None:
            resident.reader_plan = None
            if resident.key not in self._unplanned:
                self._unplanned.arrived(resident.key, used=resident.used_again)
                resident.used_again = False
            return
        self._unplanned.gone(resident.key)
        _, reader_plan, position = use
        if (resident.reader_plan, resident.position) != (reader_plan, position):
            resident.reader_plan, resident.position = reader_plan, position
            self._push(reader_plan, position, resident.key)

    def _push(self, reader_plan: ReaderPlan, position: int, key: str) -> None:
        queue = self._queues.setdefault(reader_plan, [])
        heapq.heappush(queue, (-position, key))
        if len(queue) > 2 * len(self) + _SLACK:  # mostly stale entries
            self._queues[reader_plan] = [entry for entry in set(queue) if self._is_true(reader_plan, entry)]
            heapq.heapify(self._queues[reader_plan])

    def _is_true(self, reader_plan: ReaderPlan, entry: tuple[int, str]) -> bool:
        resident = self._residents.get(entry[1])
        return resident is not None and resident.reader_plan is reader_plan and resident.position == -entry[0]

    # Victims

    def victims(self, wanted_bytes: int, needed_at_s: float, *, spare_planned: bool) -> list[str] | None:
        """Return keys to evict for a shard needed at `needed_at_s`, or None if they cannot free `wanted_bytes`.

        Unplanned shards come first, in the policy's order, then those with the furthest next use; chosen shards whose
        bytes turn out not to be needed are spared. No shard is evicted that is needed before the incoming one, or at
        the same time: that would only move the miss.

        Args:
            spare_planned: evict only unplanned shards.
        """
        chosen: list[tuple[str, int]] = []
        missing_bytes = wanted_bytes
        if missing_bytes > 0:
            for resident, use_s in self._furthest():
                if use_s <= needed_at_s or (spare_planned and use_s < NEVER):
                    break
                chosen.append((resident.key, resident.size_bytes))
                missing_bytes -= resident.size_bytes
                if missing_bytes <= 0:
                    break
        return None if missing_bytes > 0 else _without_the_needless(chosen, -missing_bytes)

    def _furthest(self) -> Iterator[tuple[Resident, float]]:
        """Yield the shards that may be evicted and the times of their next use, furthest first."""
        given: set[str] = set()
        while True:
            for key in self._unplanned.victims():
                if key not in given:
                    given.add(key)
                    yield self._residents[key], NEVER
            if not self._orphans:
                break
            self.settle()
        yield from self._furthest_planned()

    def _furthest_planned(self) -> Iterator[tuple[Resident, float]]:
        given: dict[str, tuple[ReaderPlan, int]] = {}
        try:
            while (end := self._furthest_end()) is not None:
                use_s, reader_plan = end
                position, key = self._pop(reader_plan)
                # Stale and duplicate entries are dropped when they reach the end of their queue.
                if key in given or not self._is_true(reader_plan, (position, key)):
                    continue
                use = self._timeline.next_use(self._names(key))
                if use is not None and use[0] < use_s:
                    self._queue(self._residents[key])
                    continue
                given[key] = reader_plan, position
                yield self._residents[key], use_s
        finally:
            for key, (reader_plan, position) in given.items():
                heapq.heappush(self._queues.setdefault(reader_plan, []), (position, key))

    def _furthest_end(self) -> tuple[float, ReaderPlan] | None:
        """Return the furthest use among the ends of all queues, and the queue's plan."""
        furthest: tuple[float, ReaderPlan] | None = None
        for reader_plan, queue in self._queues.items():
            use_s = reader_plan.start_s - reader_plan.pace_s * queue[0][0]
            if furthest is None or use_s > furthest[0]:
                furthest = use_s, reader_plan
        return furthest

    def _pop(self, reader_plan: ReaderPlan) -> tuple[int, str]:
        queue = self._queues[reader_plan]
        entry = heapq.heappop(queue)
        if not queue:
            del self._queues[reader_plan]
        return entry


def _without_the_needless(chosen: Iterable[tuple[str, int]], spare_bytes: int) -> list[str]:
    """Return the chosen keys without those whose bytes are not needed, sparing the soonest needed first."""
    kept: list[str] = []
    for key, size_bytes in reversed(list(chosen)):
        if size_bytes <= spare_bytes:
            spare_bytes -= size_bytes
        else:
            kept.append(key)
    return kept[::-1]
