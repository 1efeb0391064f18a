"""Job timelines: the shards that each job's readers need in the next minutes, and whether they are cached."""

from __future__ import annotations

import enum
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

from shardcache.cache.catalog.aliases import AliasTable
from shardcache.cache.loop_turns import Turns
from shardcache.cache.planner import Planner
from shardcache.cache.readers.readers import Reader, Readers
from shardcache.cache.transfers.transfers import Transfers
from shardcache.redact import HIDDEN, redact
from shardcache.store.store import Store

HORIZON_S = 300.0
BINS = 60
# Positions examined per reader: the horizon at one shard per second; takes a third of a millisecond.
_MOST_USES = 300
_SOONEST = 5
_MOST_GAPS = 12

Sight = Callable[[str], bool]


class Presence(enum.StrEnum):
    """State of a shard that a reader will need."""

    CACHED = "cached"
    FETCHING = "fetching"
    MISSING = "missing"
    FAILED = "failed"  # missing, and not prefetched again


Need = tuple[float, int, Presence]
"""Seconds until a reader needs a shard, the shard's position in its plan, and the shard's state."""


@dataclass(frozen=True, slots=True)
class Use:
    """One reader's need of one shard.

    Attributes:
        in_s: time until the need, at the reader's pace; 0 if it is already waiting or reading.
        job, uid: the reader's job and its user.
    """

    in_s: float
    url: str
    job: str
    uid: int
    presence: Presence

    def to_json(self, sight: Sight) -> dict[str, Any]:
        """Return the use as JSON; the url is hidden if `sight` rejects it."""
        url = redact(self.url) if sight(self.url) else HIDDEN
        return {"in_s": self.in_s, "url": url, "job": self.job, "uid": self.uid, "presence": self.presence.value}


@dataclass(slots=True)
class Lane:
    """Timeline of one job, all its readers together.

    Attributes:
        counts: by presence, the number of shards needed in each of the horizon's `BINS` equal intervals.
        looked_s: how far ahead all of its readers' plans were examined.
        soonest: the first few uses.
        gaps: the first few uses of shards that are not cached.
    """

    job: str
    uid: int
    counts: dict[Presence, list[int]] = field(default_factory=lambda: {each: [0] * BINS for each in Presence})
    looked_s: float = HORIZON_S
    soonest: list[Use] = field(default_factory=list)
    gaps: list[Use] = field(default_factory=list)

    def add(self, needs: Sequence[Need], url: Callable[[int], str]) -> None:
        """Add one reader's needs, soonest first.

        Args:
            needs: the reader's needs.
            url: returns the url of the shard at a position of its plan.
        """
        for in_s, _, presence in needs:
            self.counts[presence][min(int(in_s * BINS / HORIZON_S), BINS - 1)] += 1
        if len(needs) == _MOST_USES:
            self.looked_s = min(self.looked_s, needs[-1][0])
        missing = [need for need in needs if need[2] is not Presence.CACHED]
        self.soonest = _first(_SOONEST, self.soonest, self._uses(needs[:_SOONEST], url))
        self.gaps = _first(_MOST_GAPS, self.gaps, self._uses(missing[:_MOST_GAPS], url))

    def _uses(self, needs: Iterable[Need], url: Callable[[int], str]) -> Iterator[Use]:
        for in_s, position, presence in needs:
            yield Use(round(in_s, 2), url(position), self.job, self.uid, presence)

    def to_json(self, sight: Sight) -> dict[str, Any]:
        """Return the timeline as JSON; urls that `sight` rejects are hidden."""
        return {
            "name": self.job,
            "uid": self.uid,
            "looked_s": self.looked_s,
            "counts": {presence.value: counts for presence, counts in self.counts.items()},
            "soonest": [use.to_json(sight) for use in self.soonest],
        }


class JobTimelines:
    """Builds the timelines of all jobs."""

    def __init__(
        self, store: Store, planner: Planner, aliases: AliasTable, transfers: Transfers, readers: Readers, turns: Turns
    ) -> None:
        self._store = store
        self._planner = planner
        self._aliases = aliases
        self._transfers = transfers
        self._readers = readers
        self._turns = turns

    async def look(self) -> list[Lane]:
        """Return a lane for each job with readers, sharing the event loop between readers."""
        lanes: dict[tuple[str, int], Lane] = {}
        for reader in list(self._readers):
            await self._turns.wait()
            lane = lanes.setdefault(reader.job.key, Lane(reader.job.name, reader.job.uid))
            lane.add(self._needs(reader), partial(_url, reader))
        return list(lanes.values())

    def _needs(self, reader: Reader) -> list[Need]:
        now = self._planner.now
        now_s, presence = now.now_s, self._presence
        ahead = now.ahead(reader, now_s + HORIZON_S, _MOST_USES)
        return [(max(0.0, use_s - now_s), position, presence(name)) for use_s, position, name in ahead]

    def _presence(self, name: str) -> Presence:
        if self._aliases.key(name) in self._store.shards:
            return Presence.CACHED
        if name in self._transfers:
            return Presence.FETCHING
        return Presence.FAILED if name in self._transfers.failures else Presence.MISSING


def _url(reader: Reader, position: int) -> str:
    return reader.ref(position).url


def gaps(lanes: Iterable[Lane]) -> list[Use]:
    """Return the soonest uses of shards that are not cached, one per shard, over all jobs.

    A shard that is being fetched is always among them: its transfer is shown, with the job that it is for.
    """
    soonest: dict[str, Use] = {}
    for use in sorted((use for lane in lanes for use in lane.gaps), key=attrgetter("in_s")):
        soonest.setdefault(use.url, use)
    uses = enumerate(soonest.values())
    return [use for number, use in uses if number < _MOST_GAPS or use.presence is Presence.FETCHING]


def _first(most: int, *uses: Iterable[Use]) -> list[Use]:
    return list(itertools.islice(heapq.merge(*uses, key=attrgetter("in_s")), most))
