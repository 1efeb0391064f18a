"""Cost of a decision at any number of shards and sessions: a few look-ups and heaps, no scan.

A decision is all that the schedule does when a reader is done with a shard: it notes so, names the shard to fetch and
the one to evict for it, and takes note of both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial

from benchmarks.measure import interleaved, python, run
from benchmarks.node.deciding import Costs, Task
from benchmarks.table import Row, Target
from benchmarks.workplace import Workplace

FEW, USUAL, MANY = Task(1_000), Task(10_000), Task(100_000)
FEW_SESSIONS, MANY_SESSIONS = Task(100_000, readers=1), Task(100_000, readers=32)
TASKS = (FEW, USUAL, MANY, FEW_SESSIONS, MANY_SESSIONS)

# Whatever else a machine does makes a process slower, never faster: so many tries, and the best of them.
REPEATS = 5
MEDIAN_US = 100.0


def measure(place: Workplace) -> list[Row]:
    """Return what decisions cost by shards and by sessions, the best of several processes each."""
    contenders = {task.label: partial(_decide, task) for task in TASKS}
    tries = interleaved(contenders, place.say, max(place.rounds, round(REPEATS * place.scale)))
    return _rows({task: _best(tries[task.label]) for task in TASKS})


def _decide(task: Task) -> Costs:
    return Costs(**json.loads(run(python("node.deciding", task.to_json())).output))


def _best(tries: list[Costs]) -> Costs:
    return min(tries, key=lambda costs: costs.median_us)


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
