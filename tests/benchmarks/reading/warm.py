"""Warm reading in one process without decoding, next to litdata and webdataset, and shuffled."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks import peers
from benchmarks.data import KINDS, LARGE, SMALL, Kind
from benchmarks.measure import Row, Target, call, compared, rate
from benchmarks.workplace import Daemon, Workplace

OURS = "shardcache"
LITDATA = "litdata"
WEBDATASET = "webdataset"
UNSHUFFLED = "unshuffled"
_SHUFFLED_ROUNDS = 5  # a ratio nearer to its target than tries are to each other
# The largest window needs more shards than it mixes, and the small samples' own are too few.
_MANY_BYTES = 16 * 1024 * 1024
MANY = replace(
    SMALL,
    name="many",
    label=f"{SMALL.label} in 16 MiB shards",
    dataset_bytes=40 * _MANY_BYTES,
    shard_bytes=_MANY_BYTES,
)
WINDOW = 8
_TIMED_S = 1.5  # short epochs are repeated until this much was timed

Task = dict[str, Any]
"""Arguments of `samples_per_s`."""


def measure(place: Workplace) -> Iterator[Row]:
    """Yield median samples a second for each kind of samples."""
    for kind in KINDS:
        with place.warmed(place.url(kind)) as daemon:
            yield from _beside_others(place, kind, daemon)
    for kind in (LARGE, MANY):
        with place.warmed(place.url(kind)) as daemon:
            yield from _shuffled(place, kind, daemon)


def _beside_others(place: Workplace, kind: Kind, daemon: Daemon) -> list[Row]:
    ours = _task(place, kind, daemon)
    tasks = {
        OURS: ours,
        LITDATA: ours | {"contender": LITDATA, "source": str(place.litdata(kind))},
        WEBDATASET: ours | {"contender": WEBDATASET, "source": str(place.dataset(kind).folder)},
    }
    return _compared(place, tasks, place.rounds, kind.label, {LITDATA: Target("≥", 1.0)})


def _shuffled(place: Workplace, kind: Kind, daemon: Daemon) -> list[Row]:
    ours = _task(place, kind, daemon)
    tasks = {OURS: ours | {"window": WINDOW}, UNSHUFFLED: ours}
    rounds = max(place.rounds, _SHUFFLED_ROUNDS)
    what = f"shuffled with window {WINDOW}, {kind.label}"
    return _compared(place, tasks, rounds, what, {UNSHUFFLED: Target("≥", 0.7)})


def _compared(
    place: Workplace,
    tasks: Mapping[str, Task],
    rounds: int,
    what: str,
    targets: Mapping[str, Target],
) -> list[Row]:
    contenders = {name: partial(call, samples_per_s, **task) for name, task in tasks.items()}
    return compared(contenders, place.say, rounds, "samples/s", what, targets)


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
    window: int = 0,
) -> float:
    """Read an epoch unmeasured and checked, then whole epochs for a while.

    Args:
        source: url, or folder of tars or chunks.
        extensions: fields that hold bytes.
        samples, payload_bytes: what one epoch must give.
        window: number of shards that ours mixes; 0 does not shuffle.
    """
    dataset = _dataset(contender, source, socket, window)
    keys = set()
    seen_bytes = 0
    for sample in dataset:
        keys.add(sample["__key__"])
        seen_bytes += sum(len(sample[extension]) for extension in extensions)
    if (len(keys), seen_bytes) != (samples, payload_bytes):
        given = f"{len(keys)} samples of {seen_bytes} bytes"
        raise RuntimeError(
            f"{contender} gave {given}, the dataset has {samples} of {payload_bytes}"
        )
    return rate(lambda: _read(dataset, extensions), samples, _TIMED_S)


def _dataset(contender: str, source: str, socket: str, window: int) -> Iterable[Mapping[str, Any]]:
    from shardcache_client.dataset import ShardDataset

    if contender == OURS:
        return ShardDataset(source, socket=socket, shuffle=window > 0, shuffle_window=window)
    theirs = {LITDATA: peers.litdata, WEBDATASET: peers.webdataset}
    found: Iterable[Mapping[str, Any]] = theirs[contender](source)
    return found


def _read(samples: Iterable[Mapping[str, Any]], extensions: Sequence[str]) -> int:
    number = 0
    for number, sample in enumerate(samples, 1):  # noqa: B007
        for extension in extensions:
            # Decoders need `bytes`; this costs nothing where they are `bytes` already.
            bytes(sample[extension])
    return number
