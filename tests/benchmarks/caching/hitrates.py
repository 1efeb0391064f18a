"""Hit rates of our schedule and of other policies, replayed without any bytes.

Each job reads all shards in every epoch, each epoch in an order of its own, and tells this epoch's order and the next
one's when it begins to read. The jobs begin evenly staggered over one epoch. A shard counts as found when it is there
at the moment a job comes to it: nothing is fetched before, so this is about what was kept, and not about how well
its fetch was hidden. The first job's first epoch is left out of all figures, for it finds an empty cache. The schedule
is told each job's pace, and nothing of a job before it begins; offline MIN knows both from the start.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.caching.policies import LRU, OfflineMin, Policy, StaticSubset, hits
from benchmarks.measure import Row, Target
from benchmarks.workplace import Workplace
from shardcache.plan.sieve import Sieve
from support.shards.replay import Job, Replay, all_reads

SHARDS = 400
EPOCHS = 6
CACHES_PERCENT = (10, 25, 50, 75)
OURS, MIN = "shardcache", "offline MIN"

# With fewer shards the smallest cache would be little more than what the jobs have in hand.
_LEAST_SHARDS = 160
_SECONDS_PER_SHARD = 1.0

# Of the curves, from the first, ours, which stands out, to the last.
_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#c2410c", "linewidth": 2.6, "marker": "o", "markersize": 5, "zorder": 5},
    {"color": "#1f2937", "linewidth": 1.3, "linestyle": (0, (4, 2)), "zorder": 6},
    {"color": "#2563eb", "linewidth": 1.6, "marker": "s", "markersize": 4},
    {"color": "#0f766e", "linewidth": 1.6, "marker": "^", "markersize": 4},
    {"color": "#7c3aed", "linewidth": 1.6, "marker": "D", "markersize": 3.5},
)
_LABEL_HEIGHT = 5.5  # in per cent of the vertical axis


@dataclass(frozen=True, slots=True)
class Crowd:
    label: str
    paces: tuple[float, ...]  # seconds that each job has each shard in hand; a slow job reads fewer epochs

    def jobs(self, shards: int) -> list[Job]:
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
    """Return our hit rates next to those of offline MIN; tell those of all policies, and draw them."""
    shards = max(_LEAST_SHARDS, round(SHARDS * place.scale))
    found: dict[Crowd, dict[int, Rates]] = {crowd: {} for crowd in (*EVEN, UNEVEN)}
    for crowd, by_size in found.items():
        for percent in CACHES_PERCENT:
            by_size[percent] = rates_of(crowd, shards, percent)
            told = ", ".join(f"{name} {rate:.1f} %" for name, rate in by_size[percent].items())
            place.say(f"hits of {crowd.label}, cache {percent} % of {shards} shards: {told}")
    title = f"Reads that find their shard in the cache: {shards} shards, {EPOCHS} shuffled epochs, staggered jobs"
    _draw(title, {crowd.label: found[crowd] for crowd in EVEN}, place.root / "hit-rates.png")
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


def _rows(found: Mapping[Crowd, Mapping[int, Rates]]) -> Iterator[Row]:
    for crowd, by_size in found.items():
        for percent, rates in by_size.items():
            yield Row("hit rates", f"hit %, {crowd.label}, cache {percent} %", rates[OURS], MIN, rates[MIN])
        behind = max(rates[MIN] - rates[OURS] for rates in by_size.values())
        yield Row("hit rates", f"most points behind MIN, {crowd.label}", behind, target=Target("≤", 2.0))


def _draw(title: str, panels: Mapping[str, Mapping[int, Rates]], path: Path) -> None:
    """Write a PNG of small panels, two in a row, of hit rate over size of the cache; each curve is named at its end."""
    figure = Figure(figsize=(11, 8), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=12)
    axes = figure.subplots((len(panels) + 1) // 2, 2, sharex=True, sharey=True, squeeze=False)
    for axis, (label, by_size) in zip(axes.flat, panels.items(), strict=False):
        axis.set_title(label, loc="left", fontsize=11, fontweight="bold")
        axis.set(xlim=(0, 105), ylim=(0, 100), xticks=CACHES_PERCENT)
        axis.tick_params(labelbottom=True, labelleft=True)
        axis.grid(axis="y", color="#e5e7eb")
        axis.spines[["top", "right"]].set_visible(False)
        ends = by_size[CACHES_PERCENT[-1]]
        for (name, end), label_height, style in zip(ends.items(), _apart([*ends.values()]), _STYLES, strict=True):
            axis.plot(CACHES_PERCENT, [rates[name] for rates in by_size.values()], **style)
            where = (CACHES_PERCENT[-1] + 2, label_height)
            axis.text(*where, f"{name} {end:.0f}", color=style["color"], fontsize=9, va="center")
    figure.supxlabel("cache, % of the dataset", fontsize=10)
    figure.supylabel("hits, % of the reads", fontsize=10)
    figure.savefig(path)


def _apart(heights: Sequence[float]) -> list[float]:
    """Return a height for each label: those of its curve's end, moved so far that none covers another."""
    order = sorted(range(len(heights)), key=lambda number: (heights[number], -number))
    placed = list(heights)
    for below, above in pairwise(order):
        placed[above] = max(placed[above], placed[below] + _LABEL_HEIGHT)
    return placed
