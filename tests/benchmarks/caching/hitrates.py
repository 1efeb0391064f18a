"""Hit rates of our schedule and of other policies, replayed without any bytes.

Each job reads all shards in every epoch, each epoch in an order of its own, and tells this epoch's order and the next
one's when it begins to read. The jobs begin evenly staggered over one epoch. A shard counts as found when it is there
at the moment a job comes to it: nothing is fetched before, so this is about what was kept, and not about how well
its fetch was hidden. The first job's first epoch is left out of all figures, for it finds an empty cache. The schedule
is told each job's pace, and nothing of a job before it begins; offline MIN knows both from the start.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.caching.policies import LRU, OfflineMin, StaticSubset, hits
from benchmarks.picture import Panel, draw
from benchmarks.table import Row, Target
from benchmarks.workplace import Workplace
from shardcache.plan.sieve import Policy, Sieve
from support.shards.replay import Job, Replay, all_reads

SHARDS = 400
EPOCHS = 6
CACHES_PERCENT = (10, 25, 50, 75)
OURS, MIN = "shardcache", "offline MIN"

# With fewer shards the smallest cache would be little more than what the jobs have in hand.
_LEAST_SHARDS = 160
_SECONDS_PER_SHARD = 1.0


@dataclass(frozen=True, slots=True)
class Crowd:
    """Jobs that run at the same time."""

    label: str
    paces: tuple[float, ...]  # seconds that each job has each shard in hand; a slow job reads fewer epochs

    def jobs(self, shards: int) -> list[Job]:
        """Return what each of them reads, the same at every call."""
        return [self._job(number, shards) for number in range(len(self.paces))]

    def _job(self, number: int, shards: int) -> Job:
        names, order = [f"shard-{shard}" for shard in range(shards)], random.Random(number)
        pace = self.paces[number]
        epochs = [order.sample(names, shards) for _ in range(round(EPOCHS * _SECONDS_PER_SHARD / pace))]
        # One shard more than the epoch has, so that no two jobs take a shard in hand at the very same time.
        start_s = (shards + 1) * _SECONDS_PER_SHARD * number / len(self.paces)
        return Job(epochs, start_s, pace, known_epochs=2)


EVEN = tuple(Crowd(f"{count} job{'s' * (count > 1)}", (_SECONDS_PER_SHARD,) * count) for count in (1, 2, 4, 8))
UNEVEN = Crowd("4 uneven jobs", (1.0, 1.5, 2.0, 3.0))

Rates = dict[str, float]
"""Per policy, the percentage of reads that found their shard."""


def measure(place: Workplace) -> list[Row]:
    """Return our hit rates next to those of offline MIN; print those of all policies, and draw them."""
    shards = max(_LEAST_SHARDS, round(SHARDS * place.scale))
    found: dict[Crowd, dict[int, Rates]] = {}
    for crowd in (*EVEN, UNEVEN):
        found[crowd] = {percent: rates_of(crowd, shards, percent) for percent in CACHES_PERCENT}
        place.say(f"{crowd.label}, {shards} shards")
    Console().print(_table(found))
    panels = [Panel(crowd.label, _lines(found[crowd])) for crowd in EVEN]
    title = f"Reads that find their shard in the cache: {shards} shards, {EPOCHS} shuffled epochs, staggered jobs"
    draw(title, CACHES_PERCENT, panels, place.root / "hit-rates.png")
    return list(_rows(found))


def rates_of(crowd: Crowd, shards: int, percent: int) -> Rates:
    """Replay the jobs against a cache of so many per cent of the shards, once for each policy."""
    jobs, capacity = crowd.jobs(shards), shards * percent // 100
    reads = all_reads(jobs)
    policies: dict[str, Policy] = {
        MIN: OfflineMin(reads),
        "SIEVE": Sieve(),
        "LRU": LRU(),
        "static subset": StaticSubset(capacity - len(jobs)),
    }
    counts: dict[str, Mapping[tuple[int, int], int]] = {OURS: Replay(jobs, capacity).run().hits}
    counts |= {name: hits(policy, reads, capacity) for name, policy in policies.items()}
    warm_reads = len(reads) - shards
    return {name: 1e2 * (sum(hit.values()) - hit[0, 0]) / warm_reads for name, hit in counts.items()}


def _lines(by_size: Mapping[int, Rates]) -> dict[str, Sequence[float]]:
    policies = next(iter(by_size.values()))
    return {name: [rates[name] for rates in by_size.values()] for name in policies}


def _table(found: Mapping[Crowd, Mapping[int, Rates]]) -> Table:
    table = Table(title="Reads that find their shard in the cache, %", title_justify="left")
    table.add_column("jobs", no_wrap=True)
    table.add_column("cache", justify="right")
    for name in found[UNEVEN][CACHES_PERCENT[0]]:
        table.add_column(name, justify="right")
    for crowd, by_size in found.items():
        table.add_section()
        for percent, rates in by_size.items():
            table.add_row(crowd.label, f"{percent} %", *(f"{rate:.1f}" for rate in rates.values()))
    return table


def _rows(found: Mapping[Crowd, Mapping[int, Rates]]) -> Iterator[Row]:
    for crowd, by_size in found.items():
        for percent, rates in by_size.items():
            yield Row("hit rates", f"hit %, {crowd.label}, cache {percent} %", rates[OURS], MIN, rates[MIN])
        behind = max(rates[MIN] - rates[OURS] for rates in by_size.values())
        yield Row("hit rates", f"most points behind MIN, {crowd.label}", behind, target=Target("≤", 2.0))
