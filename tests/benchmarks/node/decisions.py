"""Cost of a decision at any number of shards: a few look-ups and heaps, no scan and no bytes.

A decision is all that the schedule does when a reader is done with a shard: it notes so, names the
shard to fetch and the one to evict for it, and takes note of both. Each process has many sessions
over one schedule.
"""

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from statistics import median

from benchmarks.measure import Figure, Row, Target, call, interleaved
from benchmarks.workplace import Workplace
from shardcache.plan.schedule import SameName, Schedule

# Whatever else a machine does makes a process slower, never faster: so many tries, and the best of
# them.
REPEATS = 5
MEDIAN_US = 100.0

# shards, of which the cache holds half
FEW = 1_000
USUAL = 10_000
MANY = 100_000
# readers of each job, all of them over the same shards
JOBS = 8
READERS = 8
_EPOCHS = 2
# Two epochs of 1,000 shards are 16,000 reads of 8 jobs: there, too, all that is measured lies in
# the first epoch.
_WARM_UP = 3_000
_DECISIONS = 4_000
# What was in the cache before the plans came is sorted in while victims are chosen; only then it
# costs what it costs.
_WARM_UP_PER_SHARD = 0.2


def measure(place: Workplace) -> list[Row]:
    """Return what decisions cost by the number of shards, the best of several processes each."""
    contenders = {
        shards: partial(call, decision_us, shards=shards) for shards in (FEW, USUAL, MANY)
    }
    tries = interleaved(contenders, place.say, max(place.rounds, round(REPEATS * place.scale)))
    best_us = {shards: Figure(costs_us, min) for shards, costs_us in tries.items()}
    logarithmic = Target("≤", round(math.log(MANY) / math.log(FEW), 2))
    return [
        *(
            Row(
                "µs",
                f"median, {shards:,} shards × {JOBS * READERS} sessions",
                cost_us,
                target=Target("≤", MEDIAN_US) if shards == MANY else None,
            )
            for shards, cost_us in best_us.items()
        ),
        Row(
            "times",
            f"{MANY:,} shards / {FEW:,} shards",
            best_us[MANY] / best_us[FEW],
            target=logarithmic,
        ),
    ]


def decision_us(shards: int) -> float:
    """Return the median cost of a decision in microseconds."""
    crowd = Crowd(shards)
    for _ in range(max(_WARM_UP, round(_WARM_UP_PER_SHARD * shards))):
        crowd.decide()
    costs_us = [crowd.decide() for _ in range(_DECISIONS)]
    return median(cost_us for cost_us in costs_us if cost_us is not None)


@dataclass(slots=True)
class Reader:
    """One session, and how many shards of its plan are behind it."""

    session: int
    position: int = 0


class Crowd:
    """All readers of so many shards, and the cache that they share, half full of any shards."""

    def __init__(self, shards: int) -> None:
        names = [f"{number:032x}" for number in range(shards)]
        self._schedule: Schedule[int] = Schedule(SameName())
        self._schedule.tick(0.0)
        self._here = set(random.Random(0).sample(names, shards // 2))
        for key in self._here:
            self._schedule.arrived(key, 1)
        for session, plan in enumerate(_plans(names)):
            self._schedule.declare(session, seconds_per_shard=1.0)
            self._schedule.extend(session, plan)
        self._turns = cycle([Reader(session) for session in range(JOBS * READERS)])
        self._now_s = 0.0

    def decide(self) -> float | None:
        """Let the next reader finish a shard, and do what follows; return the microseconds it took.

        What follows: it goes on to its next shard, the soonest missing shard is found, what makes
        room for it is chosen and evicted, and it arrives. None where nothing in the cache is needed
        later than what is missing.
        """
        reader = next(self._turns)
        schedule = self._schedule
        # All readers together finish one shard after another, evenly, and each takes about a second
        # for one.
        self._now_s += 1 / (JOBS * READERS)
        started_s = time.perf_counter()
        schedule.tick(self._now_s)
        schedule.done(reader.session, reader.position)
        reader.position += 1
        schedule.waits(reader.session, reader.position)
        schedule.reads(reader.session, reader.position)
        missing = schedule.next_missing(self._here.__contains__)
        if missing is None or not self._exchange(missing.name, missing.needed_at_s):
            return None
        return 1e6 * (time.perf_counter() - started_s)

    def _exchange(self, name: str, needed_at_s: float) -> bool:
        victims = self._schedule.victims(1, needed_at_s, lead_s=math.inf)
        for victim in victims or ():
            self._here.remove(victim)
            self._schedule.gone(victim)
        if victims:
            self._here.add(name)
            self._schedule.arrived(name, 1)
        return bool(victims)


def _plans(names: Sequence[str]) -> Iterator[list[str]]:
    """Yield each reader's plan: its share of each epoch of its job, all shuffled differently."""
    for job in range(JOBS):
        order = random.Random(job)
        epochs = [order.sample(names, len(names)) for _ in range(_EPOCHS)]
        for reader in range(READERS):
            yield [name for epoch in epochs for name in epoch[reader::READERS]]
