"""Warm reading in one process, without decoding: next to litdata and webdataset, and shuffled next to unshuffled."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.daemon import Daemon
from benchmarks.data import KINDS, LARGE, SMALL, Kind
from benchmarks.measure import interleaved, python, run
from benchmarks.reading.reading import PLAIN_READS, Task
from benchmarks.table import Row, Target
from benchmarks.workplace import Workplace

OURS, LITDATA, WEBDATASET = "shardcache", "litdata", "webdataset"
LITDATA_UNREAD = "litdata, unread"
UNSHUFFLED = "unshuffled"
_SHUFFLED_ROUNDS = 5  # a ratio nearer to its target than tries are to each other

# The largest window needs more shards than it mixes, and the small samples' own are too few.
_MANY_BYTES = 16 * 1024 * 1024
MANY = replace(
    SMALL, name="many", label=f"{SMALL.label} in 16 MiB shards", dataset_bytes=40 * _MANY_BYTES, shard_bytes=_MANY_BYTES
)
WINDOW = 8
WINDOWS = (2, 8, 32)
MEMORY_MB = 4.0  # the indexes of 30 shards of `MANY` have 9


@dataclass(frozen=True, slots=True)
class Rate:
    """Samples a second, and what that is in payload."""

    samples_per_s: float
    sample_bytes: int

    def __str__(self) -> str:
        return f"{self.samples_per_s:,.0f} samples/s, {self.samples_per_s * self.sample_bytes / 1e6:,.0f} MB/s"


def measure(place: Workplace) -> list[Row]:
    """Return median samples a second for each kind of samples, and the memory of shuffling."""
    rows: list[Row] = []
    for kind in KINDS:
        with _warmed(place, kind) as daemon:
            rows += _beside_others(place, kind, daemon)
    for kind in (LARGE, MANY):
        with _warmed(place, kind) as daemon:
            rows += _shuffled(place, kind, daemon)
    return rows


@contextmanager
def _warmed(place: Workplace, kind: Kind) -> Iterator[Daemon]:
    url = place.url(kind)
    with place.daemon() as daemon:
        daemon.warm(url)
        yield daemon


def _beside_others(place: Workplace, kind: Kind, daemon: Daemon) -> list[Row]:
    chunks, tars = str(place.litdata(kind)), str(place.dataset(kind).folder)
    ours = _task(place, kind, daemon)
    rates = _rates(
        place,
        kind,
        {
            OURS: ours,
            LITDATA: replace(ours, contender=LITDATA, source=chunks),
            # It hands out views of its chunks: this is what it does before anyone looks at a byte of them.
            LITDATA_UNREAD: replace(ours, contender=LITDATA, source=chunks, as_bytes=False),
            WEBDATASET: replace(ours, contender=WEBDATASET, source=tars),
            PLAIN_READS: replace(ours, contender=PLAIN_READS, source=tars),
        },
    )

    def row(peer: str, target: Target | None = None) -> Row:
        return Row("warm reading", f"samples/s, {kind.label}", rates[OURS], peer, rates[peer], target)

    return [row(LITDATA, Target("≥", 1.0)), row(LITDATA_UNREAD), row(WEBDATASET), row(PLAIN_READS)]


def _shuffled(place: Workplace, kind: Kind, daemon: Daemon) -> list[Row]:
    ours = _task(place, kind, daemon)
    shuffled = f"{OURS}, window {WINDOW}"
    rates = _rates(
        place, kind, {UNSHUFFLED: ours, shuffled: replace(ours, window=WINDOW)}, max(place.rounds, _SHUFFLED_ROUNDS)
    )
    what = f"samples/s shuffled, {kind.label}"
    return [
        Row("warm reading", what, rates[shuffled], UNSHUFFLED, rates[UNSHUFFLED], Target("≥", 0.7)),
        _memory(place, kind, ours),
    ]


def _memory(place: Workplace, kind: Kind, ours: Task) -> Row:
    tasks = {window: replace(ours, window=window, measure="anonymous_bytes") for window in WINDOWS}
    used_bytes = {window: _measured(task) for window, task in tasks.items()}
    told = ", ".join(f"{used / 1e6:.1f} MB with window {window}" for window, used in used_bytes.items())
    place.say(f"{kind.label} · memory: {told}")
    least, most = WINDOWS[0], WINDOWS[-1]
    more_bytes = used_bytes[most] - used_bytes[least]
    what = f"MB of memory that window {most} takes more than {least}, {kind.label}"
    return Row("warm reading", what, more_bytes / 1e6, target=Target("≤", MEMORY_MB))


def _rates(place: Workplace, kind: Kind, tasks: Mapping[str, Task], rounds: int | None = None) -> dict[str, float]:
    def rate(task: Task) -> Rate:
        return Rate(_measured(task), kind.sample_bytes)

    contenders: dict[str, Callable[[], Rate]] = {name: partial(rate, task) for name, task in tasks.items()}
    tries = interleaved(contenders, lambda text: place.say(f"{kind.label} · {text}"), rounds or place.rounds)
    return {name: statistics.median(rate.samples_per_s for rate in rates) for name, rates in tries.items()}


def _task(place: Workplace, kind: Kind, daemon: Daemon) -> Task:
    dataset = place.dataset(kind)
    return Task(
        contender=OURS,
        source=place.url(kind),
        extensions=kind.extensions,
        samples=dataset.samples,
        payload_bytes=dataset.payload_bytes,
        as_bytes=True,
        socket=str(daemon.socket),
    )


def _measured(task: Task) -> float:
    output = run(python("reading.reading", task.to_json())).output
    return float(json.loads(output.splitlines()[-1])[task.measure])
