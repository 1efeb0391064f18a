"""Every way in which a program reads samples."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from shardcache_client.dataset import Joined, Mixture, ShardDataset
from shardcache_client.reader import ShardReader
from shardcache_client.webdataset import WebDataset


def _of_workers(url: str, socket: Path) -> list[bytes]:
    loader = ShardDataset(url, socket=socket).loader(batch_size=2, num_workers=2)
    return [value for batch in loader for value in batch["jpg"]]


def _of_numbers(url: str, socket: Path) -> list[bytes]:
    with ShardDataset(url, socket=socket).indexed() as samples:
        return [sample["jpg"] for sample in samples]


def _of_mixture(url: str, socket: Path) -> list[bytes]:
    return [sample["jpg"] for sample in Mixture([ShardDataset(url, socket=socket)])]


def _of_joined(url: str, socket: Path) -> list[bytes]:
    sources = {"": ShardDataset(url, socket=socket), "other": ShardDataset(url, socket=socket)}
    return [sample["other.jpg"] for sample in Joined(sources)]


def _of(
    make: Callable[..., Iterable[dict[str, Any]]], **options: Any
) -> Callable[[str, Path], list[bytes]]:
    return lambda url, socket: [
        bytes(sample["jpg"]) for sample in make(url, socket=socket, **options)
    ]


DOORS = {
    "dataset": _of(ShardDataset, shuffle=True, seed=1),
    "reader": _of(ShardReader),
    "workers": _of_workers,
    "numbers": _of_numbers,
    "mixture": _of_mixture,
    "joined": _of_joined,
    "zero copy": _of(ShardDataset, zero_copy=True),
    "webdataset": _of(WebDataset, shardshuffle=False),
}
"""Each returns the `jpg` of each sample of an index file, given its url and the daemon's socket."""
