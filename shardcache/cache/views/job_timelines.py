"""Timelines of jobs: the shards that each job needs in the next minutes, and their states.

The dashboard draws a job's timeline as a lane, which is a horizontal bar. `LiveView` makes the
lanes. A use is one reader's predicted need of one shard. A gap is a use of a shard that is not
cached. The horizon is the end of the time for which uses are predicted.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardcache.cache.views.visibility import Visible, shown
from shardcache.cache.waiting.waits import JobKey
from shardcache.shared.protocol import Json

HORIZON_S = 300.0  # from now
# Number of equal intervals up to the horizon, in each of which uses are counted.
INTERVALS = 60
# Maximum number of uses that are predicted for one reader, which is enough for a shard per second.
MAX_USES = 300
_MAX_SOONEST = 5  # number of a job's soonest uses that are shown one by one
_MAX_GAPS = 12  # number of gaps that are shown one by one


class Presence(enum.StrEnum):
    """State of a shard that a reader will need."""

    CACHED = "cached"
    FETCHING = "fetching"
    MISSING = "missing"
    FAILED = "failed"  # missing, and not prefetched, because its last transfer failed


class Use(NamedTuple):
    """A reader's need for a shard, as predicted by the reader's pace. Uses sort by `in_s`.

    Attributes:
        in_s: seconds until the need; 0 if the reader already waits for the shard or reads it.
        url: url of the shard.
        client: the reader's job.
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
    """Return a count of 0 for each interval, by state."""
    return {presence: [0] * INTERVALS for presence in Presence}


@dataclass(slots=True)
class Lane:
    """The shards that one job's readers need in the next minutes.

    Attributes:
        client: the job.
        counts: by state, the number of uses in each interval.
        known_to_s: seconds from now up to which the uses of all the job's readers are known.
        soonest: the soonest few uses.
        gaps: the soonest few gaps.
    """

    client: JobKey
    counts: dict[Presence, list[int]] = field(default_factory=_no_counts)
    known_to_s: float = HORIZON_S
    soonest: list[Use] = field(default_factory=list)
    gaps: list[Use] = field(default_factory=list)

    def add(self, uses: Sequence[Use]) -> None:
        """Add the uses of one reader.

        Args:
            uses: the uses, the soonest first.
        """
        for use in uses:
            interval = min(int(use.in_s * INTERVALS / HORIZON_S), INTERVALS - 1)
            self.counts[use.presence][interval] += 1
        is_cut_short = len(uses) == MAX_USES  # there may be further uses before the horizon
        if is_cut_short:
            self.known_to_s = min(self.known_to_s, uses[-1].in_s)

        self.soonest = sorted([*self.soonest, *uses[:_MAX_SOONEST]])[:_MAX_SOONEST]
        gaps = [use for use in uses if use.presence is not Presence.CACHED]
        self.gaps = sorted([*self.gaps, *gaps[:_MAX_GAPS]])[:_MAX_GAPS]

    def to_json(self, visible: Visible) -> Json:
        """Return the lane as JSON; urls that are not `visible` are hidden."""
        name, uid = self.client
        return {
            "name": name,
            "uid": uid,
            "known_to_s": self.known_to_s,
            "counts": {presence.value: counts for presence, counts in self.counts.items()},
            "soonest": [use.to_json(visible) for use in self.soonest],
        }


def soonest_gaps(lanes: Iterable[Lane]) -> list[Use]:
    """Return the soonest `_MAX_GAPS` gaps of all jobs, at most one for each shard.

    Later gaps follow if their shards are being fetched: the page needs them to show which job each
    transfer is for.
    """
    gaps = [use for lane in lanes for use in lane.gaps]
    first_by_url: dict[str, Use] = {}
    for use in sorted(gaps):
        first_by_url.setdefault(use.url, use)
    uses = list(first_by_url.values())
    fetched_later = [use for use in uses[_MAX_GAPS:] if use.presence is Presence.FETCHING]
    return uses[:_MAX_GAPS] + fetched_later
