"""Epochs: length, readers, order, over ranks, workers and processes, against a real daemon."""

import tracemalloc
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from shardcache.shared.protocol import ShardRef
from shardcache_client.dataset import Mixture, ShardDataset
from shardcache_client.order.dealing.deal import SampleDeal
from shardcache_client.order.rank_epoch import RankEpoch
from shardcache_client.order.sequences.partition import Even
from shardcache_client.order.sequences.permutations import Shuffle
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.order.topology import Topology
from shardcache_client.reading.epochs.epoch_plans import MAX_VISITS
from support.cases import examples
from support.programs.daemon import Daemon, eventually
from support.shards.dealt import walk
from support.shards.reading import keys_of
from support.shards.tars import write_indexed, write_shards


def test_evicted_shards_are_not_fetched_after_the_last_epoch(
    daemon: Daemon, tmp_path: Path
) -> None:
    """An evicted shard is fetched again only for a next epoch that nobody has ruled out."""
    urls = {}
    datasets = {}
    for name, epochs in (("last", 2), ("another", None)):
        (tmp_path / name).mkdir()
        urls[name] = [f"file://{path}" for path in write_shards(tmp_path / name, 4, 5)]
        datasets[name] = ShardDataset(urls[name], epochs=epochs, job=name, socket=daemon.socket)
    for epoch in range(2):
        for dataset in datasets.values():
            dataset.set_epoch(epoch)
            assert len(keys_of(dataset)) == 20
    daemon.await_publication()
    daemon.evict(*urls["last"], *urls["another"])
    eventually(lambda: {shard["url"] for shard in daemon.shards()} >= set(urls["another"]))
    assert not {shard["url"] for shard in daemon.shards()} & set(urls["last"])


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [pytest.param(False, marks=pytest.mark.slow), True])
def test_workers_go_from_epoch_to_epoch_together(
    daemon: Daemon, index: str, keys: list[str], persistent: bool
) -> None:
    """Each iteration of a loader is another epoch, the same one for all its workers, unnamed.

    An epoch that is set reaches workers that run already.
    """
    options: dict[str, Any] = {"shuffle": True, "batch_size": 10, "socket": daemon.socket}
    alone, dataset = (ShardDataset(index, **options) for _ in range(2))
    loader = DataLoader(
        dataset, 10, num_workers=2, persistent_workers=persistent, collate_fn=keys_of
    )
    epochs = [list(loader) for _ in range(3)]
    for batches in epochs:
        assert sorted(key for batch in batches for key in batch) == keys
        assert batches[0] == keys_of(islice(iter(alone), 11))[:10], (
            "the first worker begins where one process would"
        )
    dataset.set_epoch(1)
    assert list(loader) == epochs[1]


COUNTS = (5, 0, 3, 8, 1, 6)


@pytest.fixture(scope="module")
def uneven(folder: Path) -> str:
    """The index file of shards with uneven counts."""
    return write_indexed(folder / "uneven", COUNTS)


@pytest.mark.slow
@examples(30)
@given(
    shuffle=st.none() | st.builds(Shuffle, st.integers(0, 9), st.integers(0, 4), st.integers(1, 3)),
    even=st.sampled_from(["pad", "drop", None]),
    length=st.none() | st.integers(4, 60),
    epoch=st.integers(0, 3),
    rank=st.integers(0, 3),
    step=st.integers(0, 10),
)
def test_readers_read_the_samples_assigned_to_them_in_order(
    daemon: Daemon,
    uneven: str,
    shuffle: Shuffle | None,
    even: Even,
    length: int | None,
    epoch: int,
    rank: int,
    step: int,
) -> None:
    """A reader gives the samples of its share in its order, at once or in two runs.

    Where ranks are equal, the state behind the last sample is the beginning of the next epoch.
    """
    deal = SampleDeal(COUNTS, shuffle, even, 1, length)
    shares = [deal.share(each, Topology(rank, 4)) for each in (epoch, epoch + 1)]
    dealt, dealt_next = (
        [f"{sum(COUNTS[:shard]) + number:06d}" for shard, number in walk(share, COUNTS)]
        for share in shares
    )
    options: dict[str, Any] = {
        "even": even,
        "samples_per_epoch": length,
        "rank": rank,
        "world_size": 4,
    }
    if shuffle:
        options |= {"shuffle": True, "shuffle_window": shuffle.window}
        options |= {"seed": shuffle.seed, "canonical_nodes": shuffle.groups}
    first, then = (ShardDataset(uneven, socket=daemon.socket, **options) for _ in range(2))
    first.set_epoch(epoch)
    samples = iter(first)
    taken = keys_of(islice(samples, step))
    then.load_state_dict(first.state_dict())
    is_over = then.epoch == epoch + 1
    assert taken + keys_of(samples) == dealt
    if is_over:
        assert taken == dealt
        assert keys_of(then) == dealt_next
    else:
        assert keys_of(then) == dealt[step:]


@pytest.mark.slow
@pytest.mark.parametrize("window", [3, None])
def test_epoch_of_thousands_of_rounds_is_read_and_resumed_in_parts(
    daemon: Daemon, tmp_path: Path, window: int | None
) -> None:
    """A plan is a part of it; the samples are those of the deal, beyond the first part as well."""
    counts = [1] * 6
    epoch_samples = 50_000
    taken = MAX_VISITS + 50
    index = write_indexed(tmp_path / "single", counts)
    deal = SampleDeal(
        counts, None if window is None else Shuffle(0, window), "pad", 1, epoch_samples
    )
    epoch = RankEpoch(
        deal.share(0, Topology()),
        Manifest.of(ShardRef(f"{shard}", samples=1) for shard in range(6)),
    )
    dealt = [f"{shard:06d}" for shard, _ in epoch.between(0, taken + 100)]

    options: dict[str, Any] = {"samples_per_epoch": epoch_samples, "socket": daemon.socket}
    if window is not None:
        options |= {"shuffle": True, "shuffle_window": window}
    first, then = (ShardDataset(index, **options) for _ in range(2))
    samples = iter(first)
    assert keys_of(islice(samples, taken)) == dealt[:taken]
    then.load_state_dict(first.state_dict())
    assert keys_of(islice(then, 100)) == dealt[taken:]
    assert keys_of(islice(samples, 100)) == dealt[taken:]


ENDLESS = 10**7
Make = Callable[[str, str, int], ShardDataset]


def mixed(url: str, socket: str, samples: int) -> ShardDataset:
    """Return a mixture of two datasets."""
    sources = [ShardDataset(url, shuffle=True, seed=seed, socket=socket) for seed in range(2)]
    return Mixture(sources, weights=[0.9, 0.1], samples_per_epoch=samples)


def of_batches(url: str, socket: str, samples: int) -> ShardDataset:
    """Return a dataset with global batches."""
    options = {"samples_per_epoch": samples, "global_batch_size": 8, "canonical_nodes": 1}
    return ShardDataset(url, shuffle=True, socket=socket, **options)


def of_one_batch(url: str, socket: str, samples: int) -> ShardDataset:
    """Return a dataset with a global batch of many times its samples."""
    return ShardDataset(url, shuffle=True, global_batch_size=samples, socket=socket)


def plain(url: str, socket: str, samples: int) -> ShardDataset:
    """Return the second rank's part of a dataset."""
    return ShardDataset(
        url, shuffle=True, samples_per_epoch=samples, rank=1, world_size=3, socket=socket
    )


@pytest.mark.slow
@pytest.mark.parametrize("make", [plain, mixed, of_batches, of_one_batch])
def test_endless_epoch_takes_little_memory(daemon: Daemon, uneven: str, make: Make) -> None:
    """Its order is not written out: neither for the first sample, nor to resume."""
    keys_of(islice(iter(make(uneven, daemon.socket, 100)), 1))  # imports what is imported once
    tracemalloc.start()
    try:
        dataset = make(uneven, daemon.socket, ENDLESS)
        resumed = make(uneven, daemon.socket, ENDLESS)
        samples = iter(dataset)
        next(samples)
        resumed.load_state_dict(dataset.state_dict())
        assert next(iter(resumed))["__key__"] == next(samples)["__key__"]
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 10 * 2**20
