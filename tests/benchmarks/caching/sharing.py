"""Several jobs on one node: how often a dataset crosses the network."""

from __future__ import annotations

import json
import sys

from torch.utils.data import DataLoader

from benchmarks.data import LARGE
from benchmarks.measure import python, run_together
from benchmarks.table import Row, Target
from benchmarks.workplace import Workplace
from shardcache_client import ShardDataset

JOBS = 3
EPOCHS = 2


def main() -> None:
    """A job without a model: read every epoch through a loader with two workers, and print the samples' counts."""
    url, socket, name, epochs = sys.argv[1:]
    dataset = ShardDataset(url, shuffle=True, seed=7, job=name, socket=socket)
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    keys: list[str] = []
    for epoch in range(int(epochs)):
        dataset.set_epoch(epoch)
        keys += [sample["__key__"] for sample in loader]
    print(json.dumps({"samples": len(keys), "distinct": len(set(keys))}))


def measure(place: Workplace) -> list[Row]:
    """Return the bytes that the store sent, next to the dataset's."""
    url, dataset = place.url(LARGE), place.dataset(LARGE)
    with place.daemon() as daemon:
        jobs = [
            python("caching.sharing", url, str(daemon.socket), f"job-{number}", str(EPOCHS)) for number in range(JOBS)
        ]
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


if __name__ == "__main__":
    main()
