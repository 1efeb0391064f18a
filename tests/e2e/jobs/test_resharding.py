"""Wrappers of other projects that shard a dataset a second time: an error, unless it is right."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import pytest
import webdataset as wds
from accelerate.data_loader import IterableDatasetShard
from jobs import accelerated
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

from shardcache.errors import ConfigError
from shardcache_client.dataset import ShardDataset
from shardcache_client.webdataset import WebDataset
from support.programs.daemon import Daemon
from support.programs.ranks import torchrun
from support.shards.reading import keys_of

Wrap = Callable[[ShardDataset], Iterable[Any]]
Make = Callable[..., ShardDataset]


@pytest.fixture
def make(index: str, daemon: Daemon) -> Make:
    """Make the dataset, or another of the class that is given."""
    return lambda kind=ShardDataset, **options: kind(index, socket=daemon.socket, **options)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process be the second of two, by torchrun's variables."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")


def pipeline(*stages: Any) -> Wrap:
    """Put stages of webdataset behind the dataset."""
    return lambda dataset: wds.DataPipeline(dataset, *stages)


def shards(dataset: Any, rank: int = 1, processes: int = 2) -> IterableDatasetShard:
    """Share the samples out among processes, as Accelerate does with a loader that it prepares."""
    return IterableDatasetShard(dataset, batch_size=5, num_processes=processes, process_index=rank)


RANK_WRAPPERS: dict[str, tuple[Wrap, str]] = {
    "split_by_node": (pipeline(wds.split_by_node), "split_by_node"),
    "split_by_node behind another stage": (
        pipeline(wds.shuffle(10), wds.split_by_node),
        "split_by_node",
    ),
    "IterableDatasetShard": (shards, "IterableDatasetShard"),
    "IterableDatasetShard around a pipeline": (
        lambda dataset: shards(pipeline()(dataset)),
        "IterableDatasetShard",
    ),
}


@pytest.mark.slow
@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(("wrap", "name"), RANK_WRAPPERS.values(), ids=RANK_WRAPPERS)
def test_a_second_sharding_among_ranks_is_an_error(
    make: Make, keys: list[str], wrap: Wrap, name: str
) -> None:
    """The first sample that a wrapper asks for raises an error with its name and a remedy.

    With rank=0, world_size=1 the wrapper's sharding is the only one: half of the samples, and no
    error.
    """
    with pytest.raises(ConfigError, match=name) as failure:
        next(iter(wrap(make())))
    assert failure.value.remedy
    assert len(set(keys_of(wrap(make(rank=0, world_size=1))))) == len(keys) / 2


@pytest.mark.parametrize(("wrap", "name"), RANK_WRAPPERS.values(), ids=RANK_WRAPPERS)
def test_the_rank_of_a_single_process_is_never_sharded_again(
    make: Make, keys: list[str], wrap: Wrap, name: str
) -> None:
    """Of one process the same wrappers take everything, or what they were told to take of it."""
    expected = len(keys) if "split" in name else len(keys) / 2
    assert len(set(keys_of(wrap(make())))) == expected


def test_shares_of_shares_may_be_what_was_meant(
    make: Make, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four processes on two nodes: dealt to nodes by ranks, then to processes by a wrapper."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    read: list[str] = []
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        node = make(rank=rank // 2, world_size=2)
        read += keys_of(shards(node, rank % 2))
    assert sorted(read) == keys


WORKER_WRAPPERS: dict[str, tuple[Wrap, str]] = {
    "split_by_worker": (pipeline(wds.split_by_worker), "split_by_worker"),
    "sharding_filter": (
        lambda dataset: IterableWrapper(dataset).sharding_filter(),
        "sharding_filter",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("wrap", "name"), WORKER_WRAPPERS.values(), ids=WORKER_WRAPPERS)
def test_a_second_sharding_among_workers_is_an_error(
    make: Make, keys: list[str], wrap: Wrap, name: str
) -> None:
    """Two workers of one rank raise it. One worker or none takes everything."""
    for workers in (0, 1):
        assert sorted(keys_of(loader(wrap(make()), workers))) == keys
    with pytest.raises(ConfigError, match=name):
        next(iter(loader(wrap(make()), 2)))


def loader(dataset: Any, workers: int) -> DataLoader[Any]:
    """Load single samples."""
    return DataLoader(dataset, batch_size=None, num_workers=workers)


@pytest.mark.usefixtures("two_ranks")
def test_the_drop_in_refuses_a_leftover_splitter(make: Make, keys: list[str]) -> None:
    """A splitter among the stages raises the error, while its arguments of these names do not."""
    with pytest.raises(ConfigError, match="split_by_node"):
        next(iter(make(WebDataset).compose(wds.split_by_node)))
    named = make(WebDataset, nodesplitter=wds.split_by_node, workersplitter=wds.split_by_worker)
    assert len(set(keys_of(named))) == len(keys) / 2


@pytest.mark.slow
def test_accelerate_prepares_no_loader_of_ranks(index: str, daemon: Daemon) -> None:
    """Two processes under `accelerator.prepare` both get the typed error, with or without workers.

    Where each process reads all samples, `accelerator.prepare` shares them out, each once. So does
    a loader that is not prepared, and `gather_for_metrics` leaves none out.
    """
    ranks = torchrun(accelerated, daemon.socket, index)
    for name in ranks[0]:
        keys = [rank[name]["keys"] for rank in ranks]
        errors = [rank[name]["error"] for rank in ranks]
        if name.startswith("every rank reads all"):
            assert sorted(chain(*keys)) == list(range(200)), name
        elif name == "not prepared, gathered":
            assert [sorted(each) for each in keys] == [list(range(200))] * 2
        else:
            assert keys == [[], []], name
            assert all("accelerator.prepare()" in (error or "") for error in errors), errors
