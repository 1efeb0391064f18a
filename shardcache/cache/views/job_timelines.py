"""Lanes: the shards that each job needs in the next minutes, and whether they are cached.

The dashboard draws a lane, a horizontal bar of the next minutes, for each job. A use is one
reader's predicted need of one shard. A gap is a use of a shard that is not cached. `LiveView` makes
the lanes.
"""

import enum
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardcache.cache.views.visibility import Visible, shown
from shardcache.cache.waiting.waits import JobKey
from shardcache.shared.protocol import Json

# Time from now on for which plans are examined.
HORIZON_S = 300.0
# Number of equal intervals of this time, for each of which shards are counted.
BINS = 60
# Maximum number of positions of a plan that are examined, which is enough for a shard per second.
MAX_USES = 300
# Maximum numbers of uses that are shown one by one: the soonest of each job, and the soonest gaps.
_MAX_SOONEST = 5
_MAX_GAPS = 12


class Presence(enum.StrEnum):
    """State of a shard that a reader will need."""

    CACHED = "cached"
    FETCHING = "fetching"
    MISSING = "missing"
    FAILED = "failed"  # the shard is missing, and not prefetched as its transfer failed


class Use(NamedTuple):
    """The need of a job's reader for a shard, as predicted by its pace. Uses compare by `in_s`.

    Attributes:
        in_s: seconds until the need; 0 if the reader already waits for the shard or reads it.
        url: url of the shard.
        client: the job.
        presence: state of the shard.
    """

    in_s: float
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
    """Return a count of 0 for each state and interval."""
    return {presence: [0] * BINS for presence in Presence}


@dataclass(slots=True)
class Lane:
    """The shards that one job's readers need in the next minutes.

    Attributes:
        client: the job.
        counts: by state, the number of shards needed in each interval of the horizon.
        looked_s: seconds from now up to which the plans of all the job's readers were examined.
        soonest: the soonest few uses.
        gaps: the soonest few uses of shards that are not cached.
    """

    client: JobKey
    counts: dict[Presence, list[int]] = field(default_factory=_no_counts)
    looked_s: float = HORIZON_S
    soonest: list[Use] = field(default_factory=list)
    gaps: list[Use] = field(default_factory=list)

    def add(self, uses: Sequence[Use]) -> None:
        """Add the uses of one reader.

        Args:
            uses: the uses, the soonest first.
        """
        for use in uses:
            interval = min(int(use.in_s * BINS / HORIZON_S), BINS - 1)
            self.counts[use.presence][interval] += 1
        # A plan with this many uses was not examined up to the horizon.
        is_cut_short = len(uses) == MAX_USES
        if is_cut_short:
            self.looked_s = min(self.looked_s, uses[-1].in_s)

        self.soonest = sorted([*self.soonest, *uses[:_MAX_SOONEST]])[:_MAX_SOONEST]
        missing = (use for use in uses if use.presence is not Presence.CACHED)
        first_missing = itertools.islice(missing, _MAX_GAPS)
        self.gaps = sorted([*self.gaps, *first_missing])[:_MAX_GAPS]

    def to_json(self, visible: Visible) -> Json:
        """Return the lane as JSON; urls that are not `visible` are hidden."""
        name, uid = self.client
        return {
            "name": name,
            "uid": uid,
            "looked_s": self.looked_s,
            "counts": {presence.value: counts for presence, counts in self.counts.items()},
            "soonest": [use.to_json(visible) for use in self.soonest],
        }


def gaps(lanes: Iterable[Lane]) -> list[Use]:
    """Return the soonest use of each shard that is not cached, over all jobs.

    First come the soonest `_MAX_GAPS` uses. Of the later uses, those whose shards are being fetched
    follow: the page needs them to show the job that each transfer is for.
    """
    soonest: dict[str, Use] = {}
    for use in sorted(use for lane in lanes for use in lane.gaps):
        soonest.setdefault(use.url, use)
    uses = list(soonest.values())
    fetched_later = [use for use in uses[_MAX_GAPS:] if use.presence is Presence.FETCHING]
    return uses[:_MAX_GAPS] + fetched_later
