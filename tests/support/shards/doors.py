"""Every way in which a program reads samples."""

from collections.abc import Callable
from pathlib import Path

from shardcache_client.dataset import Joined, Mixture, ShardDataset
from shardcache_client.reader import ShardReader
from shardcache_client.webdataset import WebDataset

Door = Callable[[str, Path], list[bytes]]
"""Returns the `jpg` of each sample of an index file, given its url and the daemon's socket."""


def _of_dataset(url: str, socket: Path) -> list[bytes]:
    return [sample["jpg"] for sample in ShardDataset(url, socket=socket, shuffle=True, seed=1)]


def _of_reader(url: str, socket: Path) -> list[bytes]:
    return [sample["jpg"] for sample in ShardReader(url, socket=socket)]


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


def _of_zero_copy(url: str, socket: Path) -> list[bytes]:
    return [bytes(sample["jpg"]) for sample in ShardDataset(url, socket=socket, zero_copy=True)]


def _of_webdataset(url: str, socket: Path) -> list[bytes]:
    return [sample["jpg"] for sample in WebDataset(url, shardshuffle=False, socket=socket)]


DOORS = [
    _of_dataset,
    _of_reader,
    _of_workers,
    _of_numbers,
    _of_mixture,
    _of_joined,
    _of_zero_copy,
    _of_webdataset,
]
