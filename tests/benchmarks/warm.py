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

OURS, LITDATA, WEBDATASET = "shardcache", "litdata", "webdataset"
LITDATA_UNREAD = "litdata, unread"


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

    def row(peer: str, target: Target | None = None) -> Row:
        return Row("warm reading", f"samples/s, {kind.label}", best[OURS], peer, best[peer], target)

    return [row(LITDATA, Target("≥", 1.0)), row(LITDATA_UNREAD), row(WEBDATASET), row(PLAIN_READS)]


def _contenders(place: Workplace, kind: Kind, daemon: Daemon) -> dict[str, Callable[[], Rate]]:
    dataset = place.dataset(kind)
    tars = str(dataset.folder)

    def read(contender: str, source: str, as_bytes: bool = True) -> Rate:
        task = Task(
            contender=contender,
            source=source,
            extensions=kind.extensions,
            samples=dataset.samples,
            payload_bytes=dataset.payload_bytes,
            as_bytes=as_bytes,
            socket=str(daemon.socket),
        )
        output = run(python("reading", task.to_json())).output
        return Rate(json.loads(output.splitlines()[-1])["samples_per_s"], kind.sample_bytes)

    chunks = str(place.litdata(kind))
    return {
        OURS: partial(read, OURS, place.url(kind)),
        LITDATA: partial(read, LITDATA, chunks),
        # It hands out views of its chunks: this is what it does before anyone looks at a byte of them.
        LITDATA_UNREAD: partial(read, LITDATA, chunks, as_bytes=False),
        WEBDATASET: partial(read, WEBDATASET, tars),
        PLAIN_READS: partial(read, PLAIN_READS, tars),
    }
