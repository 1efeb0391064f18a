"""Warm reading in one process, without decoding, beside litdata and webdataset."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.daemon import Daemon
from benchmarks.data import KINDS, Kind
from benchmarks.measure import interleaved, python, run
from benchmarks.reading import PLAIN_READS, Task
from benchmarks.table import Row, Target
from benchmarks.workplace import Workplace


@dataclass(frozen=True, slots=True)
class Contender:
    """A reader, and whether what it hands out is turned into `bytes`."""

    name: str
    as_bytes: bool

    def __str__(self) -> str:
        return f"{self.name}, {'bytes' if self.as_bytes else 'views'}"


@dataclass(frozen=True, slots=True)
class Rate:
    """Samples a second, and what that is in payload."""

    samples_per_s: float
    sample_bytes: int

    def __str__(self) -> str:
        return f"{self.samples_per_s:,.0f} samples/s, {self.samples_per_s * self.sample_bytes / 1e6:,.0f} MB/s"


def measure(place: Workplace) -> list[Row]:
    """Return samples a second for each kind of samples, best of three each."""
    rows: list[Row] = []
    for kind in KINDS:
        url = place.url(kind)
        with place.daemon() as daemon:
            run(daemon.warm(url))
            rows += _measure_kind(place, kind, daemon)
    return rows


def _measure_kind(place: Workplace, kind: Kind, daemon: Daemon) -> list[Row]:
    contenders = _contenders(place, kind, daemon)
    tries = interleaved(contenders, lambda text: place.say(f"{kind.label} · {text}"))
    best = {name: max(rate.samples_per_s for rate in rates) for name, rates in tries.items()}

    def row(as_bytes: bool, peer: str, target: Target | None = None) -> Row:
        what = f"samples/s, {kind.label}, {'bytes' if as_bytes else 'views'}"
        ours, theirs = best[Contender("shardcache", as_bytes)], best[Contender(peer, as_bytes)]
        return Row("warm reading", what, ours, peer, theirs, target)

    return [
        row(True, "litdata", Target("≥", 1.0)),
        row(False, "litdata", Target("≥", 1.0)),
        row(True, "webdataset"),
        row(True, PLAIN_READS),
    ]


def _contenders(place: Workplace, kind: Kind, daemon: Daemon) -> dict[Contender, Callable[[], Rate]]:
    """litdata hands out views of its chunks: they are compared as they are, and once read whole."""
    dataset = place.dataset(kind)
    tars = str(dataset.shards[0].parent)
    sources = {
        Contender("shardcache", as_bytes=True): place.url(kind),
        Contender("litdata", as_bytes=True): str(place.litdata(kind)),
        Contender("shardcache", as_bytes=False): place.url(kind),
        Contender("litdata", as_bytes=False): str(place.litdata(kind)),
        Contender("webdataset", as_bytes=True): tars,
        Contender(PLAIN_READS, as_bytes=True): tars,
    }

    def read(contender: Contender, source: str) -> Rate:
        task = Task(
            contender=contender.name,
            source=source,
            extensions=kind.extensions,
            samples=dataset.samples,
            payload_bytes=dataset.payload_bytes,
            as_bytes=contender.as_bytes,
            socket=str(daemon.socket),
        )
        output = run(python("reading", task.to_json())).output
        return Rate(json.loads(output.splitlines()[-1])["samples_per_s"], kind.sample_bytes)

    return {contender: partial(read, contender, source) for contender, source in sources.items()}
