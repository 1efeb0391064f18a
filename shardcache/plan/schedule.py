"""The core of the daemon: decides from all plans and the cached shards what to fetch next and what to evict. Pure.

The rules are those of P. Cao, E. Felten, A. Karlin and K. Li, "A Study of Integrated Prefetching and Caching
Strategies", SIGMETRICS 1995: fetch the missing shard that is needed soonest; evict the one needed furthest ahead; never
evict a shard that is needed before the one fetched; and do it at the first opportunity.

The last rule needs care. A fetch into free space, or into the space of unplanned shards, costs nothing, so it starts as
soon as there is space, however far ahead. A fetch that evicts a planned shard too early evicts the wrong one: the
shards read in between, and then not needed for an epoch, would have been better victims. A job that loops over a
dataset twice the size of the cache would get no hits at all. So the first opportunity for such a fetch is when waiting
for a better victim would make it late: a lead time before its shard is needed (the fixed horizon of R. Patterson et
al., "Informed Prefetching and Caching", SOSP 1995). With a lead time of 0 this is Belady's MIN.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Generic, Protocol

from shardcache.plan.residents import Policy, Residents
from shardcache.plan.sieve import Sieve
from shardcache.plan.timeline import NEVER, Missing, Session, Timeline


class Aliases(Protocol):
    """Mapping between the shard names in plans and the keys in the cache."""

    def key(self, name: str) -> str:
        """Return the key for a name."""

    def names(self, key: str) -> Collection[str]:
        """Return every name for a key."""


class Schedule(Generic[Session]):
    """Plans and cached shards together. Each method refers to the time of the last `tick`, in seconds of one clock.

    Args:
        unplanned: eviction order of the shards that no plan contains; SIEVE unless given.
    """

    def __init__(self, aliases: Aliases, unplanned: Policy | None = None) -> None:
        self._aliases = aliases
        self._timeline: Timeline[Session] = Timeline()
        self._residents = Residents(self._timeline, aliases.names, Sieve() if unplanned is None else unplanned)

    def __repr__(self) -> str:
        return f"Schedule({self._timeline!r}, {self._residents!r})"

    @property
    def now_s(self) -> float:
        """The current time."""
        return self._timeline.now_s

    def tick(self, now_s: float) -> None:
        """Set the current time, which must not decrease."""
        self._timeline.tick(now_s)
        self._residents.settle()

    # Events of sessions

    def declare(self, session: Session, seconds_per_shard: float | None = None, job: Hashable | None = None) -> None:
        """Begin a session's plan, replacing any previous one; `extend` adds its shards.

        Args:
            seconds_per_shard: its pace, if known in advance.
            job: its job, whose sessions are assumed to have the same pace.
        """
        previous = self._timeline.reader_plan(session)
        self._timeline.declare(session, seconds_per_shard, job)
        if previous is not None:
            self._residents.forget(previous)

    def extend(self, session: Session, names: Collection[str]) -> None:
        """Append shards to a session's plan, in reading order."""
        self._timeline.extend(session, names)
        for name in names:
            self._residents.planned(self._aliases.key(name))

    def forget(self, session: Session) -> None:
        """Drop a session and its plan."""
        reader_plan = self._timeline.forget(session)
        if reader_plan is not None:
            self._residents.forget(reader_plan)

    def waits(self, session: Session, position: int, waited_s: float = 0.0) -> None:
        """Record that a session has nothing to read until it gets the shard at `position`.

        Args:
            waited_s: its total waiting time so far; also in `reads` and `done`.
        """
        self._passed(self._timeline.waits(session, position, waited_s))

    def reads(self, session: Session, position: int, waited_s: float = 0.0) -> None:
        """Record that a session takes the shard at `position`; it may keep others that it took before."""
        self._passed(self._timeline.reads(session, position, waited_s))

    def done(self, session: Session, position: int, waited_s: float = 0.0) -> None:
        """Record that a session releases the shard at `position`."""
        self._passed(self._timeline.done(session, position, waited_s))

    def _passed(self, names: Iterable[str]) -> None:
        for name in names:
            self._residents.passed(self._aliases.key(name))

    # Events of shards

    def arrived(self, key: str, size_bytes: int) -> None:
        """Record that a shard is in the cache."""
        self._residents.add(key, size_bytes)

    def gone(self, key: str) -> None:
        """Record that a shard is no longer in the cache."""
        self._residents.remove(key)
        for name in self._aliases.names(key):
            self._timeline.evicted(name)

    def missed(self, name: str) -> None:
        """Record that an expected shard does not arrive."""
        self._timeline.evicted(name)

    def held(self, key: str) -> None:
        """Record that a shard is in use and cannot be evicted."""
        self._residents.hold(key)

    def freed(self, key: str) -> None:
        """Record that a shard, if it is cached, is no longer in use."""
        self._residents.free(key)

    def found(self, key: str) -> None:
        """Record that a shard was cached when it was requested."""
        self._residents.use_again(key)

    def renamed(self, name: str, keys: Iterable[str]) -> None:
        """Record that a name now maps to another one of the keys."""
        for key in keys:
            self._residents.passed(key)
        self._timeline.evicted(name)

    # Decisions

    def next_use_s(self, key: str) -> float:
        """Return when a shard is needed next, NEVER if no plan contains it."""
        use = self._timeline.next_use(self._aliases.names(key))
        return NEVER if use is None else use[0]

    def next_missing(self, cared_for: Callable[[str], bool]) -> Missing[Session] | None:
        """Return the shard to fetch next, or None if there is nothing to fetch.

        Args:
            cared_for: returns True for a shard that is cached, being fetched, or not worth an attempt.
        """
        return self._timeline.next_missing(cared_for)

    def ahead(self, session: Session, until_s: float, limit: int) -> Iterator[tuple[float, int, str]]:
        """Yield (time, position, name) of the shards that a session needs until a time, in order, at most `limit`."""
        return self._timeline.ahead(session, until_s, limit)

    def covered_until_s(self, session: Session, cared_for: Callable[[str], bool], coming: Iterable[str]) -> float:
        """Return when a session needs its first shard that is not cached, NEVER if all are.

        Args:
            cared_for: as for `next_missing`.
            coming: names for which it is True only because they are being fetched.
        """
        return self._timeline.covered_until(session, cared_for, coming)

    def shards_per_s(self, session: Session) -> float:
        """Return a session's pace, without waits; 0 if it is unknown."""
        reader_plan = self._timeline.reader_plan(session)
        return 1 / reader_plan.pace_s if reader_plan is not None and reader_plan.measures else 0.0

    def victims(self, wanted_bytes: int, needed_at_s: float, lead_s: float) -> list[str] | None:
        """Return the keys to evict for a shard of `wanted_bytes` needed at `needed_at_s`, or None if it has to wait."""
        early = needed_at_s > self._timeline.now_s + lead_s
        return self._residents.victims(wanted_bytes, needed_at_s, spare_planned=early)
