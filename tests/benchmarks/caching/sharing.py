"""Several jobs on one node: how often a dataset crosses the network."""

from __future__ import annotations

import json

from benchmarks.data import LARGE
from benchmarks.measure import python, run_together
from benchmarks.table import Row, Target
from benchmarks.workplace import Workplace

JOBS = 3
EPOCHS = 2


def measure(place: Workplace) -> list[Row]:
    """Return the bytes that the store sent, next to the dataset's."""
    url, dataset = place.url(LARGE), place.dataset(LARGE)
    with place.daemon() as daemon:
        jobs = [python("caching.job", url, str(daemon.socket), f"job-{number}", str(EPOCHS)) for number in range(JOBS)]
        for output in run_together(jobs):
            _check(json.loads(output.splitlines()[-1]), dataset.samples)
        origin_bytes = daemon.get("/v1/status")["counters"]["origin_bytes"]
    place.say(f"{JOBS} jobs × {EPOCHS} epochs: {origin_bytes / 1e6:,.0f} MB from the store")
    what = f"MB from the store, {JOBS} jobs × {EPOCHS} epochs"
    return [Row("sharing", what, origin_bytes / 1e6, "the dataset", dataset.tar_bytes / 1e6, Target("=", 1.0))]


def _check(seen: dict[str, int], samples: int) -> None:
    wanted = {"samples": EPOCHS * samples, "distinct": samples}
    if seen != wanted:
        raise RuntimeError(f"a job saw {seen} instead of {wanted}")
