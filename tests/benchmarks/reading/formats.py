"""Shards of other formats, read warm by one process: ours next to each format's own loader.

Both give every column as a value. Per second of CPU, as some loaders sleep. Another format is one
more `Contest`.
"""

import time
from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import peers
from benchmarks.measure import Row, Target, call, compared, rate
from benchmarks.reading import file_formats
from benchmarks.reading.format_contest import Contest, Item
from benchmarks.workplace import Workplace

SAMPLES = 100_000
_IMAGE_BYTES = 2_000
_SHARD_BYTES = 32 * 1024**2
_TIMED_S = 4.0
OURS = "shardcache"
_OPTIONAL = {"datasets", "tensorflow"}  # whose packages are larger than all others together


def _write_mds(folder: Path, items: Iterable[Item]) -> None:
    columns = {"image": "bytes", "label": "int", "text": "str"}
    peers.write_mosaicml(folder, columns, items, size_limit=_SHARD_BYTES)


def _read_mds(folder: str) -> Iterable[Any]:
    return peers.mosaicml().StreamingDataset(
        local=folder, shuffle=False, batch_size=8, predownload=100_000
    )


def _write_litdata(folder: Path, items: Iterable[Item]) -> None:
    peers.write_litdata(folder, items, chunk_bytes=_SHARD_BYTES)


CONTESTS = {
    "MDS": Contest("mosaicml", _write_mds, "", _read_mds),
    "LitData chunks": Contest("litdata", _write_litdata, "", peers.litdata),
    **file_formats.CONTESTS,
}


def items(count: int) -> Iterable[Item]:
    """Yield samples of an image's bytes, a number and a text: the same each time."""
    source = Random(0)
    for number in range(count):
        yield {
            "image": source.randbytes(_IMAGE_BYTES),
            "label": number,
            "text": f"caption number {number}",
        }


def measure(place: Workplace) -> list[Row]:
    """Return samples per second of CPU for each format, medians of interleaved rounds."""
    rows: list[Row] = []
    for name, contest in CONTESTS.items():
        if contest.library in _OPTIONAL and find_spec(contest.library) is None:
            place.say(f"no {contest.library} is installed: {name} are left out")
            continue
        rows += _contest(place, name, contest)
    return rows


def _contest(place: Workplace, name: str, contest: Contest) -> list[Row]:
    folder = place.root / f"formats-{name.replace(' ', '-')}"
    place.say(f"writing {name}")
    contest.write(folder, items(max(1000, round(SAMPLES * place.scale))))
    url = f"file://{folder}/{contest.url}"
    with place.warmed(url) as daemon:
        ours = partial(call, samples_per_cpu_s, name=name, source=url, socket=str(daemon.socket))
        theirs = partial(call, samples_per_cpu_s, name=name, source=str(folder), socket="")
        contenders = {OURS: ours, contest.library: theirs}
        what = f"{name}, every column, one process"
        target = {contest.library: Target("≥", 1.0)}
        return compared(contenders, place.say, place.rounds, "samples/CPU-s", what, target)


def samples_per_cpu_s(name: str, source: str, socket: str) -> float:
    """Return the rate of one contender; ours has a socket."""
    dataset = _ours(source, socket) if socket else CONTESTS[name].read(source)

    def read() -> int:
        return sum(1 for _ in dataset)

    return rate(read, read(), _TIMED_S, time.process_time)


def _ours(url: str, socket: str) -> Iterable[Any]:
    from shardcache_client.dataset import ShardDataset

    return ShardDataset(url, shuffle=False, socket=socket)
