"""Worth of each mechanism behind a request: cold epochs with one of them made trivial.

`PYTHONPATH=tests python -m benchmarks.downloads.ablation` prints the time that readers waited, the
median of interleaved rounds, and how it changes without a mechanism. The product has no switches
for this: each daemon is this very program, told by a variable to replace a collaborator in its own
memory.
"""

import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import click

from benchmarks.data import Dataset, Kind, make_tars
from benchmarks.measure import interleaved, median_of
from benchmarks.workplace import Daemon
from shardcache.cache.waiting.claims import KeyClaim
from shardcache.cli.main import app
from shardcache.fetch import download, stopwatch
from shardcache.fetch.limits import hedging, origin_states, scheduler
from shardcache.fetch.limits.slot_claims import Claim, Rank, Ranking
from shardcache_client.dataset import ShardDataset
from support.programs.cli import chosen
from support.programs.daemon import spawn
from support.stores.throttled_s3 import ThrottledS3

# An eighth of everything: a part takes as long as one of 8 MiB at 60 MB/s, and hardly any processor
# time.
KIND = Kind("ablation", "25 KB", (("jpg", 25_000),), 9 * 8 * 2**20, 8 * 2**20)
PART_BYTES = 2**20
STORE = {"first_byte_s": 0.03, "connection_bytes_per_s": 7.5e6, "total_bytes_per_s": 21e6}
BATCH_SAMPLES = 16


def _without_rank(*reasons: str) -> Callable[[], None]:
    """Return what makes the scheduler ignore some of the reasons for which a claim goes first."""

    def replace_rank() -> None:
        rank = Ranking.rank

        def blind(self: Ranking, claim: Claim) -> Rank:
            return rank(self, claim)._replace(**dict.fromkeys(reasons, 0))

        Ranking.rank = blind  # type: ignore[method-assign]

    return replace_rank


def _method(owner: Any, name: str, trivial: Any) -> Callable[[], None]:
    """Return what replaces a method or property by a trivial one."""
    return lambda: setattr(owner, name, trivial)


def _begin_rich(hedges: hedging.Hedging, begin: Callable[..., None], *given: float) -> None:
    begin(hedges, *given)
    hedges._credit = hedging._MAX_CREDIT


def _none_streamed() -> None:
    before = KeyClaim.priority
    KeyClaim.priority = lambda *given: replace(before(*given), streamed=False)  # type: ignore[method-assign]


MECHANISMS: Mapping[str, Callable[[], None]] = {
    "all": lambda: None,
    "class": _without_rank("priority_class"),
    "client": _without_rank("held_by_client", "last_turn"),
    "deadline": _without_rank("deadline_s"),
    "streamed": _none_streamed,
    "clearing": _method(scheduler.Scheduler, "_has_precedence", lambda *_: False),
    "preemption": _method(scheduler.Scheduler, "_preemptor", lambda *_: None),
    "AIMD": _method(origin_states.Aimd, "refused", lambda *_: None),
    "link": _method(origin_states.Link, "connections", property(lambda _: 8)),
    "hedging": _method(hedging.Hedging, "patience_s", lambda *_: None),
    "request size": _method(download.Downloader, "_parts_per_request", lambda *_: 1),
    "stopwatch": _method(stopwatch.Stopwatch, "stop", lambda _: None),
}


@dataclass(frozen=True, slots=True)
class Job:
    name: str
    shards: Sequence[range]  # those of each reader
    mb_per_s: float  # rate at which a reader's samples are used; 0 for as fast as they come
    after_s: float = 0.0  # when it starts
    counts: bool = True  # True if its waiting is what is measured


TRAINING = Job("training", [range(8)], 17.0)
SCENARIOS: Mapping[str, tuple[Mapping[str, int], Sequence[Job]]] = {
    "cold": ({}, [TRAINING]),
    "slow tail": ({"slow_every": 20}, [TRAINING]),
    "two jobs": (
        {},
        [
            Job("bulk", [range(2), range(2, 4)], 0.0, counts=False),
            Job("bulk", [range(4, 6)], 4.0, counts=False),
            Job("urgent", [range(6, 8)], 8.0, after_s=0.7),
        ],
    ),
    "throttled": ({"max_requests": 4}, [TRAINING]),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    waited_s: float  # by all readers that count
    requests: int
    refused: int  # of these requests


def serve(mechanism: str) -> None:
    """Run `shardcache` with this process's arguments and without a mechanism."""
    # As after the first minutes of reading.
    hedging._MIN_OBSERVED = 8
    hedging.Hedging.__init__ = partialmethod(_begin_rich, hedging.Hedging.__init__)  # type: ignore[method-assign, assignment]
    MECHANISMS[mechanism]()
    app(sys.argv[1:], prog_name="shardcache")


def _read(job: Job, urls: list[str], socket: Path, start_s: float) -> float:
    logging.getLogger("shardcache_client").setLevel(logging.ERROR)
    time.sleep(max(0.0, start_s + job.after_s - time.monotonic()))
    asked_s = time.monotonic()
    waited_s = 0.0
    count = 0
    dataset = ShardDataset(
        urls, socket=str(socket), job=job.name, epochs=1, shuffle=False, rank=0, world_size=1
    )
    for count, _sample in enumerate(dataset, 1):
        if count % BATCH_SAMPLES == 0:
            waited_s += time.monotonic() - asked_s
            if job.mb_per_s:
                time.sleep(BATCH_SAMPLES * 0.025 / job.mb_per_s)
            asked_s = time.monotonic()
    assert count == len(urls) * KIND.shard_samples, count
    return waited_s + time.monotonic() - asked_s


def _run(mechanism: str, jobs: Sequence[Job], data: Dataset, store: ThrottledS3) -> Outcome:
    readers = [(job, shards) for job in jobs for shards in job.shards]
    urls = [f"s3://{data.folder.name}/{path.name}" for path in data.shards]
    env = {**store.env(), "MECHANISM": mechanism, "SHARDCACHE_PART_SIZE": str(PART_BYTES)}
    with (
        tempfile.TemporaryDirectory(prefix="ablation-", dir="/dev/shm") as name,
        Daemon(Path(name), "10GB", env, partial(spawn, module=__spec__.name)) as daemon,
        ProcessPoolExecutor(len(readers), multiprocessing.get_context("fork")) as pool,
    ):
        daemon.warm(urls[8])
        before = store.stats()
        start_s = time.monotonic() + 0.05
        reads = [
            pool.submit(_read, job, [urls[shard] for shard in shards], daemon.socket, start_s)
            for job, shards in readers
        ]
        waited = [
            (job.counts, read.result()) for (job, _), read in zip(readers, reads, strict=True)
        ]
        after = store.stats()
    waited_s = sum(seconds for counts, seconds in waited if counts)
    return Outcome(waited_s, after.requests - before.requests, after.refused - before.refused)


@click.command()
@click.option("--rounds", default=3)
@click.option("--only", default=",".join(SCENARIOS), help="scenarios, with commas between")
@click.option("--mechanisms", default=",".join(MECHANISMS), help="mechanisms, with commas between")
def main(rounds: int, only: str, mechanisms: str) -> None:
    with ExitStack() as stack:
        root = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="ablation-", dir="/dev/shm"))
        )
        data = make_tars(KIND, 1.0, root, print)
        for scenario in chosen(only, SCENARIOS):
            moods, jobs = SCENARIOS[scenario]
            store = stack.enter_context(ThrottledS3(root, **STORE, **moods))
            contenders = {
                name: partial(_run, name, jobs, data, store)
                for name in chosen(mechanisms, MECHANISMS)
            }
            tries = interleaved(contenders, print, rounds)
            waited_s, requests, refused = (
                median_of(tries, name) for name in ("waited_s", "requests", "refused")
            )
            for name, waits_s in waited_s.items():
                change = 1e2 * (waits_s / waited_s["all"] - 1)
                counts = f"{requests[name]:.0f} requests, {refused[name]:.0f} refused"
                print(f"{scenario}: {name:14}{waits_s:8.3f} s waited {change:+7.1f} %, {counts}")


if __name__ == "__main__":
    if without := os.environ.get("MECHANISM"):
        serve(without)
    else:
        main()
