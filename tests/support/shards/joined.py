"""Shards of images and of captions that are joined by key, and what joining them gives."""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from shardcache_client.dataset import Joined
from support.shards.reading import write_index
from support.shards.tars import Sample, make_tar, random_samples

COUNTS = (9, 4, 17, 1, 12, 7)
TOTAL = sum(COUNTS)
KEYS = [f"{number:06d}" for number in range(TOTAL)]
SHUFFLE = {"shuffle": True, "shuffle_window": 3, "seed": 7}

Make = Callable[..., Joined]


def samples_of(shard: int, extension: str) -> list[Sample]:
    """Return the samples of a shard with one member."""
    return random_samples(
        COUNTS[shard], {extension: 40}, seed=ord(extension[0]), first=sum(COUNTS[:shard])
    )


def write(
    folder: Path, extension: str, change: Callable[[int, list[Sample]], object] = lambda *_: None
) -> str:
    """Write the shards of one member, perhaps changed; return the url of their index."""
    folder.mkdir()
    shards = [samples_of(number, extension) for number in range(len(COUNTS))]
    for number, samples in enumerate(shards):
        change(number, samples)
        (folder / f"{number}.tar").write_bytes(make_tar(samples))
    return write_index(folder, list(map(len, shards)))


IMAGES, CAPTIONS = (
    list(chain(*(samples_of(n, name) for n in range(len(COUNTS))))) for name in ("jpg", "txt")
)
EXPECTED = [
    (str(image["__key__"]), {"jpg": image["jpg"], "cap.txt": caption["txt"]})
    for image, caption in zip(IMAGES, CAPTIONS, strict=True)
]


def members(samples: Iterable[Mapping[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return key and members of each sample, sorted by key."""
    found = [
        (s["__key__"], {name: s[name] for name in s if not name.startswith("__")}) for s in samples
    ]
    return sorted(found, key=lambda each: each[0])
