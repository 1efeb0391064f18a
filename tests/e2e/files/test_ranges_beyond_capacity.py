"""Ranges of many times the cache: right bytes within bounds, for any number of readers."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest

from shardcache.errors import CapacityError
from shardcache_client.dataset import ShardDataset
from shardcache_client.files.filesystem import ShardcacheFileSystem
from support.cases import first_quick
from support.programs.cli import shardcache
from support.programs.daemon import Daemon
from support.shards.tars import make_tar, random_samples
from support.stores.canary import Canary

KIB = 1024
PART_BYTES = 64 * KIB
SHARDS = 8
PER_SHARD = 20  # more than the samples of a shard that are read in order before it is held
SIZES = {"jpg": 80 * KIB, "json": 700}
SAMPLES = [random_samples(PER_SHARD, SIZES, first=shard * PER_SHARD) for shard in range(SHARDS)]
ALL: list[Any] = list(chain.from_iterable(SAMPLES))
TARS = [make_tar(samples) for samples in SAMPLES]
TOTAL = len(ALL)
# Of 13 MiB: less than a shard, and as much as two.
CAPACITIES = (16 * PART_BYTES, 54 * PART_BYTES)
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def store(folder: Path) -> Iterator[Canary]:
    """Shards, their index and the table of their samples."""
    with Canary() as running:
        for number, tar in enumerate(TARS):
            running.files[f"/{number}.tar"] = tar
        urls = [running.url(f"/{number}.tar") for number in range(SHARDS)]
        (folder / "indexing").mkdir()
        with Daemon(folder / "indexing") as daemon:
            ran = shardcache(
                "index", *urls, "-o", folder / "index.json", "--samples", socket=daemon.socket
            )
        assert ran.code == 0, ran.err
        for name in ("index.json", "index.samples"):
            running.files[f"/{name}"] = (folder / name).read_bytes()
        yield running


@pytest.fixture(params=first_quick(CAPACITIES))
def node(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """A daemon with a small cache."""
    flags = ("--range-part-size", str(PART_BYTES), "--listing-ttl-s", "1000")
    with Daemon(tmp_path, *flags, capacity=str(request.param)) as running:
        yield running
        cache = running.status()["cache"]
        assert cache["used_bytes"] <= request.param


def dataset(store: Canary, node: Daemon, **options: Any) -> ShardDataset:
    """Return the dataset, for a reader that gives up long before the test's own limit."""
    chosen: Any = {"socket": node.socket, "timeout_s": PATIENCE_S}
    return ShardDataset(store.url("/index.json"), **chosen | options)


def content(sample: Any) -> dict[str, Any]:
    """Return a sample without its url."""
    return {name: value for name, value in sample.items() if name != "__url__"}


def shuffled(seed: int) -> list[int]:
    """Return the numbers of all samples."""
    return random.Random(seed).sample(range(TOTAL), TOTAL)


def test_list_of_samples_may_be_larger_than_the_cache(store: Canary, node: Daemon) -> None:
    """All samples in one list, in any order."""
    numbers = shuffled(1)
    with dataset(store, node).indexed() as samples:
        assert [content(sample) for sample in samples[numbers]] == [
            ALL[number] for number in numbers
        ]


@pytest.mark.slow
def test_list_in_order_is_read_from_shards_larger_than_the_cache(
    store: Canary, node: Daemon
) -> None:
    """By ranges, where a shard that is read in order cannot be held."""
    with dataset(store, node).indexed() as samples:
        assert [content(sample) for sample in samples[range(TOTAL)]] == ALL


@pytest.mark.slow
def test_lists_of_many_readers_are_read_at_the_same_time(store: Canary, node: Daemon) -> None:
    """None of them waits for another that waits for it."""

    def read(seed: int) -> bool:
        numbers = shuffled(seed)
        with dataset(store, node).indexed() as samples:
            return [content(sample) for sample in samples[numbers]] == [
                ALL[number] for number in numbers
            ]

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(read, range(6)))


@pytest.mark.slow
def test_readers_that_do_other_things_keep_nobody_waiting(store: Canary, node: Daemon) -> None:
    """A rank that waits for others is one: what was fetched ahead for it leaves them space."""
    with ExitStack() as stack:
        idle = []
        for seed in range(6):
            busy = dataset(
                store, node, shuffle="global", seed=seed, batch_size=4, job=f"idle-{seed}"
            )
            samples = iter(busy)
            stack.callback(getattr(samples, "close", lambda: None))
            idle.append((samples, list(islice(samples, 2))))

        with dataset(store, node).indexed() as samples:
            numbers = shuffled(3)
            assert [content(sample) for sample in samples[numbers]] == [
                ALL[number] for number in numbers
            ]
        for samples, first in idle:
            found = sorted(map(content, [*first, *samples]), key=lambda sample: sample["__key__"])
            assert found == ALL


@pytest.mark.slow
def test_epoch_of_global_shuffle_is_larger_than_the_cache(store: Canary, node: Daemon) -> None:
    """By workers, each of which reads its own batches ahead."""
    loader = dataset(store, node, shuffle="global", seed=3).loader(
        batch_size=8, num_workers=2, workers="processes", collate_fn=list
    )
    found = sorted(map(content, chain.from_iterable(loader)), key=lambda sample: sample["__key__"])
    assert found == ALL


@pytest.mark.slow
def test_ranges_of_files_may_be_larger_than_the_cache_together(store: Canary, node: Daemon) -> None:
    """By fsspec's call for many at once."""
    files = ShardcacheFileSystem(
        "http", socket=str(node.socket), skip_instance_cache=True, timeout_s=PATIENCE_S
    )
    numbers = random.Random(5)
    shards = [numbers.randrange(SHARDS) for _ in range(60)]
    starts = [numbers.randrange(len(TARS[shard]) - 3 * PART_BYTES) for shard in shards]
    ends = [start + numbers.randrange(1, 3 * PART_BYTES) for start in starts]
    urls = [store.url(f"/{shard}.tar") for shard in shards]
    found = files.cat_ranges(urls, starts, ends)
    assert found == [
        TARS[shard][start:end] for shard, start, end in zip(shards, starts, ends, strict=True)
    ]


def test_range_larger_than_the_cache_is_an_error_that_says_both_sizes(
    store: Canary, tmp_path: Path
) -> None:
    """Small ranges of the same object are read."""
    flags = ("--range-part-size", str(PART_BYTES), "--listing-ttl-s", "1000")
    files = ShardcacheFileSystem(
        "http", socket=str(tmp_path / "s.sock"), skip_instance_cache=True, block_size=KIB
    )
    url = store.url("/0.tar")
    with Daemon(tmp_path, *flags, capacity=str(CAPACITIES[0])):
        with (
            files.open(url) as file,
            pytest.raises(CapacityError, match=r"the range takes 1.6 MB; .*capacity is 1.0 MB"),
        ):
            file.read(24 * PART_BYTES)
        with files.open(url) as file:
            assert file.read(100) == TARS[0][:100]


@pytest.mark.slow
def test_shards_that_are_held_make_room_for_the_next(store: Canary, tmp_path: Path) -> None:
    """A reader that may hold more than the cache gives back what it read longest ago."""
    # Without a table of samples beside it.
    store.files["/untabled.json"] = store.files["/index.json"]
    url = store.url("/untabled.json")
    with (
        Daemon(tmp_path, capacity=str(54 * PART_BYTES)) as node,
        ShardDataset(url, socket=node.socket, timeout_s=PATIENCE_S).indexed(window=4) as samples,
    ):
        assert [content(samples[shard * PER_SHARD]) for shard in range(4)] == [
            each[0] for each in SAMPLES[:4]
        ]
