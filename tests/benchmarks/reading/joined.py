"""Images and captions joined by key, next to the same members in one tar, per second of CPU."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.data import LARGE, SMALL, Kind, samples
from benchmarks.measure import Row, Target, call, compared, rate
from benchmarks.workplace import Workplace
from support.shards.tars import make_tar

JOINED = "joined"
ONE = "one tar"
_CAPTION = (("txt", 100),)
_KINDS = [replace(kind, dataset_bytes=kind.dataset_bytes // 4) for kind in (LARGE, SMALL)]


def measure(place: Workplace) -> Iterator[Row]:
    """Yield the samples per second of CPU of both, shuffled and not, for two sizes of images."""
    for kind in _KINDS:
        both = replace(kind, name=f"{kind.name}-both", members=kind.members + _CAPTION)
        urls = {
            JOINED: [_split(place, both, some) for some in (kind.members, _CAPTION)],
            ONE: [place.url(both)],
        }
        with place.warmed(urls[ONE][0]) as daemon:
            for window in (0, 8):
                task = partial(call, samples_per_cpu_s, socket=str(daemon.socket), window=window)
                contenders = {name: partial(task, urls=some) for name, some in urls.items()}
                what = f"{kind.label} and a caption, window {window}"
                yield from compared(
                    contenders,
                    place.say,
                    place.rounds,
                    "samples/CPU-s",
                    what,
                    {ONE: Target("≥", 0.9)},
                )


def _split(place: Workplace, both: Kind, members: tuple[tuple[str, int], ...]) -> str:
    """Write some members of each sample to shards of their own; return their url."""
    folder = place.root / f"{both.name}-{members[0][0]}"
    folder.mkdir()
    names = {name for name, _ in members} | {"__key__"}
    for number, path in enumerate(place.dataset(both).shards):
        some = (
            {name: each[name] for name in each.keys() & names} for each in samples(both, number)
        )
        (folder / path.name).write_bytes(make_tar(some))
    return f"file://{folder}/"


def samples_per_cpu_s(urls: list[str], socket: str, window: int) -> float:
    from shardcache_client.dataset import Joined, ShardDataset

    first, *others = (
        ShardDataset(url, shuffle=window > 0, shuffle_window=window, socket=socket) for url in urls
    )
    dataset: Any = Joined({"": first} | dict(zip(("cap",), others, strict=False)))

    def read() -> int:
        return sum(1 for sample in dataset if sample.get("cap.txt") or sample["txt"])

    return rate(read, read(), 3.0, time.process_time)
