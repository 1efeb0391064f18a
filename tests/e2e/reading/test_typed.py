"""Types that editors and type checkers see of samples and batches, checked by `make lint`.

An unused `type: ignore` is an error to mypy, too, so each of them is a mistake that it has seen.
"""

import pickle
from pathlib import Path
from typing import Any, TypedDict, assert_type

import pytest

from shardcache.errors import ConfigError
from shardcache_client.dataset import Mixture, ShardDataset
from shardcache_client.indexed import IndexedShards
from shardcache_client.lengths import LengthBatches, batch_by_length
from shardcache_client.loading.loader import ShardLoader
from shardcache_client.reader import ShardReader
from shardcache_client.stages.pack import Block
from support.programs.daemon import Daemon
from support.shards.tars import write_indexed


class Picture(TypedDict):
    """The samples of the tests."""

    __key__: str
    jpg: bytes


def test_samples_have_the_type_that_decode_returns(folder: Path, daemon: Daemon) -> None:
    """Samples are dicts without `decode`; `decode` and `map` tell by their functions' types."""
    url = write_indexed(folder / "functions", (3, 2))
    plain = ShardDataset(url, socket=daemon.socket)
    assert_type(next(iter(plain)), dict[str, Any])

    def sizes(sample: dict[str, Any]) -> tuple[str, int]:
        return sample["__key__"], len(sample["jpg"])

    dataset = ShardDataset(url, decode=sizes, socket=daemon.socket)
    assert_type(dataset, ShardDataset[tuple[str, int]])
    keys = dataset.map(lambda sample: sample[0].encode())
    assert_type(keys, ShardDataset[bytes])
    assert type(keys) is ShardDataset
    assert all(type(key) is bytes for key in keys)
    dataset.map(lambda sample: sample[2])  # type: ignore[misc]
    assert_type(keys.filter(None.__ne__), ShardDataset[bytes])
    assert_type(keys.indexed(), IndexedShards[bytes])
    assert_type(keys.indexed()[0], bytes)
    assert_type(ShardReader(url, socket=daemon.socket).map(len), ShardReader[int])
    mixture = Mixture({"a": keys, "b": keys})
    assert_type(mixture.map(len), Mixture[int])
    assert sum(mixture.map(len)) == sum(map(len, keys.indexed())) * 2


def test_packed_blocks_have_the_arguments_and_types_of_their_reader(
    folder: Path, daemon: Daemon
) -> None:
    """`pack` of a dataset takes what a reader's does, and returns a dataset of blocks."""
    url = write_indexed(folder / "packed", (3, 2))
    dataset = ShardDataset[Picture](url, socket=daemon.socket)
    assert_type(dataset.pack(100, len, window=2), ShardDataset[Block[Picture]])
    assert_type(
        ShardReader[Picture](url, socket=daemon.socket).pack(100, len), ShardReader[Block[Picture]]
    )
    with pytest.raises(ConfigError, match="max_tokens"):
        dataset.pack("a hundred", len)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="there is no argument"):
        dataset.pack(100, len, windows=2)  # type: ignore[call-arg]


def test_samples_have_the_type_that_the_user_declares(folder: Path, daemon: Daemon) -> None:
    """A TypedDict for the members that `decode` and `members` name; it takes no part in reading."""
    url = write_indexed(folder / "declared", (3, 2))
    dataset = ShardDataset[Picture](url, members=("jpg",), socket=daemon.socket)
    for sample in dataset:
        assert_type(sample, Picture)
        assert type(sample["jpg"]) is bytes
    dataset.map(lambda sample: sample["png"])  # type: ignore[typeddict-item]
    pickle.loads(pickle.dumps(dataset))

    class Local(TypedDict):
        jpg: bytes

    # For workers that are spawned.
    pickle.loads(pickle.dumps(ShardDataset[Local](url, socket=daemon.socket)))


def test_batches_have_the_type_that_collate_returns(folder: Path, daemon: Daemon) -> None:
    """Any without one: torch's own makes what it finds."""
    url = write_indexed(folder / "batches", (3, 2))
    dataset = ShardDataset[Picture](url, batch_size=2, socket=daemon.socket)
    assert_type(dataset.loader(), ShardLoader[Any])

    def collated(samples: list[Picture]) -> list[bytes]:
        return [sample["jpg"] for sample in samples]

    loader = dataset.loader(collate_fn=collated, num_workers=0)
    assert_type(loader, ShardLoader[list[bytes]])
    assert [len(batch) for batch in loader] == [2, 2, 1]
    by_length = batch_by_length(dataset, 10**6, len, collate=collated)
    assert sum(map(len, assert_type(by_length, LengthBatches[list[bytes]]))) == 5
