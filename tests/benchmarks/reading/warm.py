"""Warm reading in one process, without decoding: next to litdata and webdataset, and shuffled next to unshuffled."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.data import KINDS, LARGE, SMALL, Kind
from benchmarks.measure import Row, Target, call, interleaved, memory_bytes, rate
from benchmarks.workplace import Daemon, Workplace

OURS, LITDATA, WEBDATASET = "shardcache", "litdata", "webdataset"
LITDATA_UNREAD = "litdata, unread"
PLAIN_READS = "plain 1 MiB reads"
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

_TIMED_S = 1.5  # short epochs are repeated until this much was timed
_READ_BYTES = 1024 * 1024
_LOOK_EVERY = 50  # samples

Task = dict[str, Any]
"""Arguments of `samples_per_s`."""


@dataclass(frozen=True, slots=True)
class Rate:
    samples_per_s: float
    sample_bytes: int

    def __str__(self) -> str:
        return f"{self.samples_per_s:,.0f} samples/s, {self.samples_per_s * self.sample_bytes / 1e6:,.0f} MB/s"


def measure(place: Workplace) -> list[Row]:
    """Return median samples a second for each kind of samples, and the memory of shuffling."""
    rows: list[Row] = []
    for kind in KINDS:
        with place.warmed(place.url(kind)) as daemon:
            rows += _beside_others(place, kind, daemon)
    for kind in (LARGE, MANY):
        with place.warmed(place.url(kind)) as daemon:
            rows += _shuffled(place, kind, daemon)
    return rows


def _beside_others(place: Workplace, kind: Kind, daemon: Daemon) -> list[Row]:
    chunks, tars = str(place.litdata(kind)), str(place.dataset(kind).folder)
    ours = _task(place, kind, daemon)
    tasks = {
        OURS: ours,
        LITDATA: ours | {"contender": LITDATA, "source": chunks},
        # It hands out views of its chunks: this is what it does before anyone looks at a byte of them.
        LITDATA_UNREAD: ours | {"contender": LITDATA, "source": chunks, "as_bytes": False},
        WEBDATASET: ours | {"contender": WEBDATASET, "source": tars},
        PLAIN_READS: ours | {"contender": PLAIN_READS, "source": tars},
    }
    rates = _rates(place, kind, tasks, place.rounds)

    def row(peer: str, target: Target | None = None) -> Row:
        return Row("warm reading", f"samples/s, {kind.label}", rates[OURS], peer, rates[peer], target)

    return [row(LITDATA, Target("≥", 1.0)), row(LITDATA_UNREAD), row(WEBDATASET), row(PLAIN_READS)]


def _shuffled(place: Workplace, kind: Kind, daemon: Daemon) -> list[Row]:
    ours = _task(place, kind, daemon)
    shuffled = f"{OURS}, window {WINDOW}"
    tasks = {UNSHUFFLED: ours, shuffled: ours | {"window": WINDOW}}
    rates = _rates(place, kind, tasks, max(place.rounds, _SHUFFLED_ROUNDS))
    used_bytes = {window: call(anonymous_bytes, **ours, window=window) for window in WINDOWS}
    told = ", ".join(f"{used / 1e6:.1f} MB with window {window}" for window, used in used_bytes.items())
    place.say(f"{kind.label} · memory: {told}")
    least, most = WINDOWS[0], WINDOWS[-1]
    more_mb = (used_bytes[most] - used_bytes[least]) / 1e6
    what = f"samples/s shuffled, {kind.label}"
    memory = f"MB of memory that window {most} takes more than {least}, {kind.label}"
    return [
        Row("warm reading", what, rates[shuffled], UNSHUFFLED, rates[UNSHUFFLED], Target("≥", 0.7)),
        Row("warm reading", memory, more_mb, target=Target("≤", MEMORY_MB)),
    ]


def _rates(place: Workplace, kind: Kind, tasks: Mapping[str, Task], rounds: int) -> dict[str, float]:
    def measured(task: Task) -> Rate:
        return Rate(call(samples_per_s, **task), kind.sample_bytes)

    contenders: dict[str, Callable[[], Rate]] = {name: partial(measured, task) for name, task in tasks.items()}
    tries = interleaved(contenders, lambda text: place.say(f"{kind.label} · {text}"), rounds)
    return {name: statistics.median(rate.samples_per_s for rate in rates) for name, rates in tries.items()}


def _task(place: Workplace, kind: Kind, daemon: Daemon) -> Task:
    dataset = place.dataset(kind)
    return {
        "contender": OURS,
        "source": place.url(kind),
        "socket": str(daemon.socket),
        "extensions": kind.extensions,
        "samples": dataset.samples,
        "payload_bytes": dataset.payload_bytes,
    }


def samples_per_s(
    contender: str,
    source: str,
    socket: str,
    extensions: Sequence[str],
    samples: int,
    payload_bytes: int,
    as_bytes: bool = True,
    window: int = 0,
) -> float:
    """Read an epoch unmeasured and checked, then whole epochs for a while.

    Args:
        source: url, or folder of tars or chunks.
        extensions: fields that hold bytes.
        samples, payload_bytes: what one epoch must give.
        as_bytes: read each field whole, into `bytes`, as whoever decodes it must; else leave alone what is handed out.
        window: number of shards that ours mixes; 0 does not shuffle.
    """
    if contender == PLAIN_READS:
        _plain_reads(source, samples)
        return rate(partial(_plain_reads, source, samples), _TIMED_S)
    dataset = _dataset(contender, source, socket, window)
    keys, seen_bytes = set(), 0
    for sample in dataset:
        keys.add(sample["__key__"])
        seen_bytes += sum(len(sample[extension]) for extension in extensions)
    if (len(keys), seen_bytes) != (samples, payload_bytes):
        given = f"{len(keys)} samples of {seen_bytes} bytes"
        raise RuntimeError(f"{contender} gave {given}, the dataset has {samples} of {payload_bytes}")
    return rate(lambda: _read(dataset, extensions if as_bytes else ()), _TIMED_S)


def anonymous_bytes(contender: str, source: str, socket: str, window: int, **_: Any) -> float:
    """Return the most memory, pages of files left out, that the process has in one epoch, after another."""
    dataset = _dataset(contender, source, socket, window)
    _read(dataset, ())
    return max(memory_bytes("RssAnon") for number, _ in enumerate(dataset) if number % _LOOK_EVERY == 0)


def _dataset(contender: str, source: str, socket: str, window: int) -> Iterable[Mapping[str, Any]]:
    from shardcache_client import ShardDataset

    found: Iterable[Mapping[str, Any]] = (
        ShardDataset(source, socket=socket, shuffle=window > 0, shuffle_window=window)
        if contender == OURS
        else {LITDATA: peers.litdata, WEBDATASET: peers.webdataset}[contender](source)
    )
    return found


def _read(samples: Iterable[Mapping[str, Any]], extensions: Sequence[str]) -> int:
    number = 0
    for number, sample in enumerate(samples, 1):  # noqa: B007
        for extension in extensions:
            bytes(sample[extension])  # costs nothing where it is `bytes` already
    return number


def _plain_reads(source: str, samples: int) -> int:
    """Read the tars with plain system calls, into one buffer, without looking at them."""
    buffer = bytearray(_READ_BYTES)
    for path in sorted(Path(source).glob("*.tar")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return samples
