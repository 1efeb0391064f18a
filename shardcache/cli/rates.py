"""Rates between two status pages. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Page = dict[str, Any]
JobKey = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Rates:
    """A daemon's rates over one interval.

    Attributes:
        interval_s: time between the two pages by the daemon's clock.
        hits_per_s: leases of shards that were cached; `misses_per_s`: of shards that were not.
        waiting_share: by job, the fraction of the interval in which its readers waited for data, 0 to 1.
    """

    interval_s: float
    origin_bytes_per_s: float
    origin_requests_per_s: float
    tier_bytes_per_s: float
    hits_per_s: float
    misses_per_s: float
    waiting_share: Mapping[JobKey, float]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON that `shardcache top --json` adds to the page."""
        jobs = [{"name": n, "uid": uid, "waiting_share": round(s, 4)} for (n, uid), s in self.waiting_share.items()]
        return {
            "interval_s": round(self.interval_s, 3),
            "origin_bytes_per_s": round(self.origin_bytes_per_s, 1),
            "origin_requests_per_s": round(self.origin_requests_per_s, 3),
            "tier_bytes_per_s": round(self.tier_bytes_per_s, 1),
            "hits_per_s": round(self.hits_per_s, 3),
            "misses_per_s": round(self.misses_per_s, 3),
            "jobs": jobs,
        }


def rates_between(former: Page | None, page: Page) -> Rates | None:
    """Return the rates between two pages; None if they come from different daemons or the same moment."""
    if former is None or former["pid"] != page["pid"] or former["uptime_s"] >= page["uptime_s"]:
        return None
    interval_s = float(page["uptime_s"] - former["uptime_s"])

    def per_s(counter: str) -> float:
        new, old = (int(each["counters"].get(counter, 0)) for each in (page, former))
        return (new - old) / interval_s

    return Rates(
        interval_s,
        origin_bytes_per_s=per_s("origin_bytes"),
        origin_requests_per_s=per_s("origin_requests"),
        tier_bytes_per_s=per_s("tier_bytes"),
        hits_per_s=per_s("hits"),
        misses_per_s=per_s("misses"),
        waiting_share=_waiting_shares(former, page, interval_s),
    )


def job_key(job: Mapping[str, Any]) -> JobKey:
    """Return a job's unique key."""
    return job["name"], job["uid"]


def _waiting_shares(former: Page, page: Page, interval_s: float) -> dict[JobKey, float]:
    before_s = {job_key(job): job["waited_s"] for job in former["jobs"]}
    shares = {}
    for job in page["jobs"]:
        if job["sessions"]:
            waited_s = job["waited_s"] - before_s.get(job_key(job), 0.0)
            # Readers that joined or left in between make the sum inexact: keep the share between 0 and 1.
            shares[job_key(job)] = min(1.0, max(0.0, waited_s / (interval_s * job["sessions"])))
    return shares
