"""The data of a frame of `status` and `top`: a status page, and the rates since the previous page.

The status page is a JSON object that the daemon returns. Its counters only grow. A rate is the
growth of a counter between two pages, per second.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardcache.shared.exceptions import ShardcacheError
from shardcache.shared.protocol import Json

Fields = Mapping[str, Any]
"""The fields of an object on the status page: of a job, a transfer, the counters and so on."""

# Counters of which there are rates.
_COUNTERS = ("origin_bytes", "origin_requests", "tier_bytes", "hits", "misses")


@dataclass(frozen=True, slots=True)
class StatusFrame:
    """The data of one frame.

    Attributes:
        page: the latest status page.
        rates: the rates since the previous page; None if there is no previous page.
        error: the reason why there is no newer page; None while the daemon answers.
    """

    page: Json
    rates: Json | None = None
    error: ShardcacheError | None = None

    def to_json(self) -> Json:
        """Return the JSON that `shardcache top --json` prints."""
        if self.error is not None:
            return {"error": self.error.to_json()}
        return self.page | {"rates": self.rates}


def rates_between(previous: Json, page: Json) -> Json | None:
    """Return the rates between two pages; None for pages of different daemons or the same time.

    There is a rate `NAME_per_s` for each counter. For each job with readers, `waiting_share` is the
    fraction of the interval in which its readers waited for data, 0 to 1.
    """
    if previous["pid"] != page["pid"] or previous["uptime_s"] >= page["uptime_s"]:
        return None
    interval_s = page["uptime_s"] - previous["uptime_s"]
    counters_before = previous["counters"]
    counters = page["counters"]
    rates = {}
    for name in _COUNTERS:
        growth = counters.get(name, 0) - counters_before.get(name, 0)
        rates[f"{name}_per_s"] = round(growth / interval_s, 3)
    waited_before_s = {job_key(job): job["waited_s"] for job in previous["jobs"]}
    jobs = []
    for job in page["jobs"]:
        if not job["sessions"]:
            continue
        waited_s = job["waited_s"] - waited_before_s.get(job_key(job), 0.0)
        reading_s = interval_s * job["sessions"]  # inexact if readers joined or left
        share = min(1.0, max(0.0, waited_s / reading_s))
        jobs.append({"name": job["name"], "uid": job["uid"], "waiting_share": round(share, 4)})
    return {"interval_s": round(interval_s, 3), **rates, "jobs": jobs}


def job_key(job: Fields) -> tuple[str, int]:
    """Return the name and the user of a job, by which the job is found on another page."""
    return job["name"], job["uid"]
