"""Lanes: the shards that each job needs in the next minutes, and whether they are cached."""

import enum
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardcache.cache.views.visibility import Visible, shown
from shardcache.cache.waiting.waits import JobKey
from shardcache.shared.protocol import Json

# Plans are examined so far ahead.
HORIZON_S = 300.0
# Equal intervals of the horizon, for each of which shards are counted.
BINS = 60
# Positions of a plan that are examined: enough for one shard per second.
MAX_USES = 300
# Uses that are shown one by one: the soonest of each job, and those of shards that are not cached.
_MAX_SOONEST = 5
_MAX_GAPS = 12


class Presence(enum.StrEnum):
    """State of a shard that a reader will need."""

    CACHED = "cached"
    FETCHING = "fetching"
    MISSING = "missing"
    FAILED = "failed"  # missing, and not prefetched again


class Use(NamedTuple):
    """One job's need of one shard, at the reader's pace; compared by its time first."""

    in_s: float  # time until the need; 0 if the reader is already waiting or reading
    url: str
    client: JobKey
    presence: Presence

    def to_json(self, visible: Visible) -> Json:
        """Return the use as JSON; the url is hidden unless it is `visible`."""
        job, uid = self.client
        return {
            "in_s": round(self.in_s, 2),
            "url": shown(self.url, visible),
            "job": job,
            "uid": uid,
            "presence": self.presence.value,
        }


def _no_counts() -> dict[Presence, list[int]]:
    return {presence: [0] * BINS for presence in Presence}


@dataclass(slots=True)
class Lane:
    """The shards that one job's readers need in the next minutes.

    Attributes:
        client: the job.
        counts: by presence, the number of shards needed in each interval of the horizon.
        looked_s: seconds from now up to which the plans of all its readers were examined.
        soonest: the first few uses.
        gaps: the first few uses of shards that are not cached.
    """

    client: JobKey
    counts: dict[Presence, list[int]] = field(default_factory=_no_counts)
    looked_s: float = HORIZON_S
    soonest: list[Use] = field(default_factory=list)
    gaps: list[Use] = field(default_factory=list)

    def add(self, uses: Sequence[Use]) -> None:
        """Add one reader's uses, soonest first."""
        for use in uses:
            number = min(int(use.in_s * BINS / HORIZON_S), BINS - 1)
            self.counts[use.presence][number] += 1
        is_cut_short = len(uses) == MAX_USES
        if is_cut_short:
            self.looked_s = min(self.looked_s, uses[-1].in_s)

        self.soonest = sorted([*self.soonest, *uses[:_MAX_SOONEST]])[:_MAX_SOONEST]
        missing = (use for use in uses if use.presence is not Presence.CACHED)
        first_missing = itertools.islice(missing, _MAX_GAPS)
        self.gaps = sorted([*self.gaps, *first_missing])[:_MAX_GAPS]

    def to_json(self, visible: Visible) -> Json:
        """Return the timeline as JSON; urls that are not `visible` are hidden."""
        name, uid = self.client
        return {
            "name": name,
            "uid": uid,
            "looked_s": self.looked_s,
            "counts": {presence.value: counts for presence, counts in self.counts.items()},
            "soonest": [use.to_json(visible) for use in self.soonest],
        }


def gaps(lanes: Iterable[Lane]) -> list[Use]:
    """Return the soonest uses of shards that are not cached, one per shard, over all jobs.

    Beyond the first few, only shards that are being fetched are among them: the page shows each
    transfer with the job that it is for.
    """
    soonest: dict[str, Use] = {}
    for use in sorted(use for lane in lanes for use in lane.gaps):
        soonest.setdefault(use.url, use)
    uses = list(soonest.values())
    fetched_later = [use for use in uses[_MAX_GAPS:] if use.presence is Presence.FETCHING]
    return uses[:_MAX_GAPS] + fetched_later
