"""The heart of the daemon: from every session's plan and what is here, what to fetch next and what to evict. Pure.

The rules are those of P. Cao, E. Felten, A. Karlin and K. Li, "A Study of Integrated Prefetching and Caching
Strategies", SIGMETRICS 1995: fetch the missing shard that is needed soonest; evict the one needed furthest ahead; never
evict a shard that is needed before the one fetched; and do it at the first chance.

The last needs care. A fetch that takes free space, or the space of what nobody plans, costs nothing, so it is made as
soon as there is space, however far ahead. One that evicts a planned shard too early evicts the wrong one: the shards
read in between, and then not needed for an epoch, would have been better victims. A job that goes round a dataset
twice the size of the cache would so find none of it. Such a fetch has its first chance when no better victim can
come any more without making it late: a lead time before its shard is needed (the fixed horizon of R. Patterson et al.,
"Informed Prefetching and Caching", SOSP 1995). With a lead of 0 this is Belady's MIN.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Protocol

from shardcache.plan.residents import Residents
from shardcache.plan.timeline import NEVER, Missing, Timeline


class Aliases(Protocol):
    """What leads from the names that plans use to keys in the cache, and back."""

    def key(self, name: str) -> str:
        """Return the key that a name leads to."""

    def names(self, key: str) -> Collection[str]:
        """Return every name that leads to a key."""


class Schedule:
    """Plans and residents together. Each method is of the moment that `tick` told last, in seconds of one clock."""

    def __init__(self, aliases: Aliases) -> None:
        self._aliases = aliases
        self._timeline = Timeline()
        self._residents = Residents(self._timeline, aliases.names)

    def __repr__(self) -> str:
        return f"Schedule({self._timeline!r}, {self._residents!r})"

    @property
    def now_s(self) -> float:
        """The present moment."""
        return self._timeline.now_s

    def tick(self, now_s: float) -> None:
        """Say what time it is; never earlier than before."""
        self._timeline.tick(now_s)
        self._residents.settle()

    # What sessions do

    def declare(self, session: Hashable, seconds_per_shard: float | None = None, job: Hashable | None = None) -> None:
        """Begin a session's plan, in place of a former one; `extend` gives it its shards.

        Args:
            seconds_per_shard: its pace, where that is known before it has read anything.
            job: whose other sessions are as fast as this one.
        """
        former = self._timeline.course(session)
        self._timeline.declare(session, seconds_per_shard, job)
        if former is not None:
            self._residents.forget(former)

    def extend(self, session: Hashable, names: Collection[str]) -> None:
        """Add shards to the end of a session's plan, in reading order."""
        self._timeline.extend(session, names)
        for name in names:
            self._residents.planned(self._aliases.key(name))

    def forget(self, session: Hashable) -> None:
        """Drop a session and its plan."""
        course = self._timeline.forget(session)
        if course is not None:
            self._residents.forget(course)

    def waits(self, session: Hashable, position: int, stalled_s: float = 0.0) -> None:
        """Note that a session has nothing to read until it gets the shard at `position`.

        Args:
            stalled_s: how long it has stood still so far, all told; the same in the two that follow.
        """
        self._passed(self._timeline.waits(session, position, stalled_s))

    def reads(self, session: Hashable, position: int, stalled_s: float = 0.0) -> None:
        """Note that a session takes the shard at `position` into its hands; what it has there already may stay."""
        self._passed(self._timeline.reads(session, position, stalled_s))

    def done(self, session: Hashable, position: int, stalled_s: float = 0.0) -> None:
        """Note that a session gives the shard at `position` back."""
        self._passed(self._timeline.done(session, position, stalled_s))

    def _passed(self, names: Iterable[str]) -> None:
        for name in names:
            self._residents.passed(self._aliases.key(name))

    # What becomes of shards

    def arrived(self, key: str, size_bytes: int) -> None:
        """Note that a shard is in the cache."""
        self._residents.add(key, size_bytes)

    def gone(self, key: str) -> None:
        """Note that a shard is no longer in the cache."""
        self._residents.remove(key)
        for name in self._aliases.names(key):
            self._timeline.evicted(name)

    def missed(self, name: str) -> None:
        """Note that a shard which was thought to come does not."""
        self._timeline.evicted(name)

    def held(self, key: str) -> None:
        """Note that a shard is in use and cannot go."""
        self._residents.hold(key)

    def freed(self, key: str) -> None:
        """Note that a shard is no longer in use, if it is here."""
        self._residents.free(key)

    def found(self, key: str) -> None:
        """Note that a shard was here when somebody asked for it."""
        self._residents.use_again(key)

    def renamed(self, name: str, keys: Iterable[str]) -> None:
        """Note that a name which led to one of the keys now leads to another of them."""
        for key in keys:
            self._residents.passed(key)
        self._timeline.evicted(name)

    # Decisions

    def next_use_s(self, key: str) -> float:
        """Return when a shard is needed next, NEVER where no plan says so."""
        use = self._timeline.next_use(self._aliases.names(key))
        return NEVER if use is None else use[0]

    def next_missing(self, cared_for: Callable[[str], bool]) -> Missing | None:
        """Return the shard to fetch next; None when there is nothing to fetch.

        Args:
            cared_for: whether a shard is here, or coming, or not worth a try.
        """
        return self._timeline.next_missing(cared_for)

    def upcoming(self) -> Iterator[str]:
        """Yield the name of the shard that each session takes next."""
        return self._timeline.upcoming()

    def ahead(self, session: Hashable, until_s: float, most: int) -> Iterator[tuple[float, int, str]]:
        """Yield when a session needs which shard, by position and name, in order; up to a time, and `most` at most."""
        return self._timeline.ahead(session, until_s, most)

    def covered_until_s(self, session: Hashable, cared_for: Callable[[str], bool], coming: Iterable[str]) -> float:
        """Return when a session needs the first shard that is not here, NEVER when all that it planned are.

        Args:
            cared_for: as for `next_missing`.
            coming: those of which that is true only because they are on their way.
        """
        return self._timeline.covered_until(session, cared_for, coming)

    def shards_per_s(self, session: Hashable) -> float:
        """Return a session's pace while it does not wait; 0 while that is unknown."""
        course = self._timeline.course(session)
        return 1 / course.pace_s if course is not None and course.measures else 0.0

    def victims(self, wanted_bytes: int, needed_at_s: float, lead_s: float) -> list[str] | None:
        """Return what to evict for a shard of so many bytes that is needed at a time; None: it has to wait."""
        early = needed_at_s > self._timeline.now_s + lead_s
        return self._residents.victims(wanted_bytes, needed_at_s, spare_planned=early)
