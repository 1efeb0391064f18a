"""Hit rates of our schedule and of other policies, replayed without any bytes.

Each job reads all shards in every epoch, each epoch in an order of its own, and tells this epoch's order and the next
one's when it begins to read. The jobs begin evenly staggered over one epoch. A shard counts as found when it is there
at the moment a job comes to it: nothing is fetched before, so this is about what was kept, and not about how well
its fetch was hidden. The first job's first epoch is left out of all figures, for it finds an empty cache. The schedule
is told nothing of a job before it begins; offline MIN knows all from the start.
"""

import random
from collections.abc import Iterator, Mapping
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
JOBS = (1, 2, 4, 8)
CACHES_PERCENT = (10, 25, 50, 75)
OURS, MIN = "shardcache", "offline MIN"

_LEAST_SHARDS = 160  # with fewer shards the smallest cache would be little more than what the jobs have in hand
# Of the curves, from the first, ours, which stands out, to the last.
_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#c2410c", "linewidth": 2.6, "marker": "o", "markersize": 5, "zorder": 5},
    {"color": "#1f2937", "linewidth": 1.3, "linestyle": (0, (4, 2)), "zorder": 6},
    {"color": "#2563eb", "linewidth": 1.6, "marker": "s", "markersize": 4},
    {"color": "#0f766e", "linewidth": 1.6, "marker": "^", "markersize": 4},
    {"color": "#7c3aed", "linewidth": 1.6, "marker": "D", "markersize": 3.5},
)

Rates = dict[str, float]
"""Per policy, the percentage of reads that found their shard."""


def measure(place: Workplace) -> list[Row]:
    """Return our hit rates next to those of offline MIN; tell those of all policies, and draw them."""
    shards = max(_LEAST_SHARDS, round(SHARDS * place.scale))
    found: dict[str, dict[int, Rates]] = {}
    for count in JOBS:
        crowd = f"{count} job{'s' * (count > 1)}"
        found[crowd] = {percent: rates_of(count, shards, percent) for percent in CACHES_PERCENT}
        for percent, rates in found[crowd].items():
            told = ", ".join(f"{name} {rate:.1f} %" for name, rate in rates.items())
            place.say(f"hits of {crowd}, cache {percent} % of {shards} shards: {told}")
    title = f"Reads that find their shard in the cache: {shards} shards, {EPOCHS} shuffled epochs, staggered jobs"
    _draw(title, found, place.pictures / "hit-rates.png")
    return list(_rows(found))


def rates_of(count: int, shards: int, percent: int) -> Rates:
    """Replay so many jobs against a cache of so many per cent of the shards, once for each policy."""
    jobs, capacity = [_job(number, count, shards) for number in range(count)], shards * percent // 100
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


def _job(number: int, count: int, shards: int) -> Job:
    names, order = [f"shard-{shard}" for shard in range(shards)], random.Random(number)
    # One shard more than the epoch has, so that no two jobs take a shard in hand at the very same time.
    return Job([order.sample(names, shards) for _ in range(EPOCHS)], start_s=(shards + 1) * number / count)


def _rows(found: Mapping[str, Mapping[int, Rates]]) -> Iterator[Row]:
    for crowd, by_size in found.items():
        for percent, rates in by_size.items():
            yield Row("hit rates", f"hit %, {crowd}, cache {percent} %", rates[OURS], MIN, rates[MIN])
        behind = max(rates[MIN] - rates[OURS] for rates in by_size.values())
        yield Row("hit rates", f"most points behind MIN, {crowd}", behind, target=Target("≤", 2.0))


def _draw(title: str, panels: Mapping[str, Mapping[int, Rates]], path: Path) -> None:
    """Write a PNG of small panels, two in a row, of hit rate over size of the cache."""
    figure = Figure(figsize=(11, 8), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=12)
    axes = figure.subplots((len(panels) + 1) // 2, 2, sharex=True, sharey=True, squeeze=False)
    for axis, (label, by_size) in zip(axes.flat, panels.items(), strict=False):
        axis.set_title(label, loc="left", fontsize=11, fontweight="bold")
        axis.set(xlim=(5, 80), ylim=(0, 100), xticks=CACHES_PERCENT)
        axis.tick_params(labelbottom=True, labelleft=True)
        axis.grid(axis="y", color="#e5e7eb")
        axis.spines[["top", "right"]].set_visible(False)
        for name, style in zip(by_size[CACHES_PERCENT[0]], _STYLES, strict=True):
            axis.plot(CACHES_PERCENT, [rates[name] for rates in by_size.values()], label=name, **style)
    axes.flat[0].legend(loc="upper left", frameon=False)  # there, no curve comes near
    figure.supxlabel("cache, % of the dataset", fontsize=10)
    figure.supylabel("hits, % of the reads", fontsize=10)
    figure.savefig(path)
