"""Cost of a decision at any number of shards and sessions: a few look-ups and heaps, no scan. No bytes, no sockets.

A decision is all that the schedule does when a reader is done with a shard: it notes so, names the shard to fetch and
the one to evict for it, and takes note of both. Each process has many sessions over one schedule.
"""

import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from statistics import median, quantiles

from benchmarks.measure import Row, Target, call, interleaved, memory_bytes
from benchmarks.workplace import Workplace
from shardcache.plan.schedule import Schedule
from support.shards.replay import SameName

# Whatever else a machine does makes a process slower, never faster: so many tries, and the best of them.
REPEATS = 5
MEDIAN_US = 100.0

_EPOCHS = 2
# Two epochs of 1,000 shards are 16,000 reads of 8 jobs: there, too, all that is measured lies in the first epoch.
_WARM_UP = 3_000
_DECISIONS = 4_000
# What was in the cache before the plans came is sorted in while victims are chosen; only then it costs what it costs.
_WARM_UP_PER_SHARD = 0.2
# How many positions the daemon takes from one message.
_PIECE = 4_096


@dataclass(frozen=True, slots=True)
class Task:
    """So many jobs with so many readers each, over the same shards, of which the cache holds half."""

    shards: int
    jobs: int = 8
    readers: int = 8

    @property
    def label(self) -> str:
        return f"{self.shards:,} shards × {self.jobs * self.readers} sessions"


FEW, USUAL, MANY = Task(1_000), Task(10_000), Task(100_000)
FEW_SESSIONS, MANY_SESSIONS = Task(100_000, readers=1), Task(100_000, readers=32)
TASKS = (FEW, USUAL, MANY, FEW_SESSIONS, MANY_SESSIONS)


@dataclass(frozen=True, slots=True)
class Costs:
    """Cost of a decision and of declaring one position of a plan, and the process's peak memory."""

    median_us: float
    p99_us: float
    declaring_us: float
    rss_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.median_us:.1f} µs a decision, 99 % below {self.p99_us:.0f} µs, "
            f"{self.declaring_us:.2f} µs a declared position, {self.rss_bytes / 1e6:.0f} MB"
        )


def measure(place: Workplace) -> list[Row]:
    """Return what decisions cost by shards and by sessions, the best of several processes each."""
    contenders = {task.label: partial(_measured, task) for task in TASKS}
    tries = interleaved(contenders, place.say, max(place.rounds, round(REPEATS * place.scale)))
    return _rows({task: min(tries[task.label], key=lambda costs: costs.median_us) for task in TASKS})


def _measured(task: Task) -> Costs:
    return Costs(**call(decide, **asdict(task)))


def _rows(costs: Mapping[Task, Costs]) -> list[Row]:
    many = costs[MANY]
    limits = {MANY: Target("≤", MEDIAN_US)}
    slower = many.median_us / costs[FEW].median_us
    logarithmic = round(math.log(MANY.shards) / math.log(FEW.shards), 2)
    return [
        *(
            Row("decisions", f"µs, median, {task.label}", costs[task].median_us, target=limits.get(task))
            for task in TASKS
        ),
        Row("decisions", f"µs, 99th percentile, {MANY.label}", many.p99_us),
        Row("decisions", f"{MANY.shards:,} shards / {FEW.shards:,} shards", slower, target=Target("≤", logarithmic)),
        Row("decisions", f"µs to declare a position, {MANY.label}", many.declaring_us),
        Row("decisions", f"MB of memory, {MANY.label}", many.rss_bytes / 1e6),
    ]


@dataclass(slots=True)
class Reader:
    """One session: the shards that it reads, and how many of them are behind it."""

    session: int
    plan: Sequence[str]
    position: int = 0


class Crowd:
    """All readers of a task, and the cache that they share, half full of any shards."""

    def __init__(self, task: Task) -> None:
        names = [f"{number:032x}" for number in range(task.shards)]
        self._schedule: Schedule[int] = Schedule(SameName())
        self._schedule.tick(0.0)
        self._here = set(random.Random(0).sample(names, task.shards // 2))
        for key in self._here:
            self._schedule.arrived(key, 1)
        self._readers = [Reader(number, plan) for number, plan in enumerate(_plans(task, names))]
        self._turns = cycle(self._readers)
        self._now_s = 0.0

    def declare(self) -> float:
        """Let all readers tell their plans; return the microseconds that each position took."""
        started_s = time.perf_counter()
        for reader in self._readers:
            self._schedule.declare(reader.session, seconds_per_shard=1.0)
            for first in range(0, len(reader.plan), _PIECE):
                self._schedule.extend(reader.session, reader.plan[first : first + _PIECE])
        return 1e6 * (time.perf_counter() - started_s) / sum(len(reader.plan) for reader in self._readers)

    def decide(self) -> float | None:
        """Let the next reader finish a shard, and do what follows; return the microseconds it took.

        What follows: it goes on to its next shard, the soonest missing shard is found, what makes room for it is
        chosen and evicted, and it arrives. None where nothing in the cache is needed later than what is missing.
        """
        reader, schedule = next(self._turns), self._schedule
        # All readers together finish one shard after another, evenly, and each takes about a second for one.
        self._now_s += 1 / len(self._readers)
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


def _plans(task: Task, names: Sequence[str]) -> Iterator[list[str]]:
    """Yield each reader's plan: its share of each epoch of its job, all shuffled differently."""
    for job in range(task.jobs):
        order = random.Random(job)
        epochs = [order.sample(names, len(names)) for _ in range(_EPOCHS)]
        for reader in range(task.readers):
            yield [name for epoch in epochs for name in epoch[reader :: task.readers]]


def decide(**figures: int) -> Costs:
    task = Task(**figures)
    crowd = Crowd(task)
    declaring_us = crowd.declare()
    for _ in range(max(_WARM_UP, round(_WARM_UP_PER_SHARD * task.shards))):
        crowd.decide()
    costs_us = [cost_us for _ in range(_DECISIONS) if (cost_us := crowd.decide()) is not None]
    return Costs(median(costs_us), quantiles(costs_us, n=100)[-1], declaring_us, memory_bytes("VmHWM"))
