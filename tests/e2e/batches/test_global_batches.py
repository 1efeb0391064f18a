"""The same global batches on any number of ranks and workers, byte for byte, from a real daemon."""

import json
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from shardcache.errors import ConfigError
from shardcache_client import ignore_and_continue
from shardcache_client.dataset import Mixture, ShardDataset
from support.cases import first_quick
from support.programs.daemon import Daemon
from support.shards.tars import make_tar, random_samples, write_indexed

# torchdata 0.11 with torch 2.13.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

COUNTS = (17, 30, 9, 41, 1, 25, 22, 36)
GLOBAL = 16
BATCHES = 12  # 181 samples, and 11 more to fill the last batch

Sample = dict[str, Any]
Batch = list[Sample]
Make = Callable[..., ShardDataset]


@pytest.fixture(scope="module")
def train(folder: Path) -> list[str]:
    """The indexes of two sources."""
    return [write_indexed(folder / "a", COUNTS), write_indexed(folder / "b", COUNTS, first=500)]


@pytest.fixture
def make(daemon: Daemon, train: list[str], request: pytest.FixtureRequest) -> Make:
    """A function that makes the dataset for a rank, or a mixture of two if so parametrized."""
    kind = getattr(request, "param", "dataset")

    def make_dataset(rank: int = 0, world_size: int = 1, **options: Any) -> ShardDataset:
        chosen: dict[str, Any] = {
            "global_batch_size": GLOBAL,
            "canonical_nodes": 2,
            "socket": daemon.socket,
            "seed": 7,
        }
        chosen |= {
            "rank": rank,
            "world_size": world_size,
            "shuffle": True,
            "shuffle_window": 3,
        } | options
        if kind == "dataset":
            return ShardDataset(train[0], **chosen)
        sources = {name: ShardDataset(url, **chosen) for name, url in zip("ab", train, strict=True)}
        return Mixture(sources, {"a": 3, "b": 1}, samples_per_epoch=181)

    return make_dataset


def stateful(dataset: ShardDataset, workers: int) -> Any:
    """Return a StatefulDataLoader of the rank's batches."""
    return StatefulDataLoader(
        dataset, batch_size=dataset.batch_size, num_workers=workers, collate_fn=list
    )


def plain(dataset: ShardDataset, workers: int) -> Any:
    """Return a DataLoader of the rank's batches."""
    return DataLoader(dataset, batch_size=dataset.batch_size, num_workers=workers, collate_fn=list)


def own(dataset: ShardDataset, workers: int) -> Any:
    """Return the dataset's own loader."""
    return dataset.loader(num_workers=workers, collate_fn=list)


def together(ranks: list[Iterator[Batch]]) -> list[Batch]:
    """Return the global batches of ranks that take theirs in step."""
    return [list(chain.from_iterable(parts)) for parts in zip(*ranks, strict=True)]


def whole(make: Make, epoch: int = 0) -> list[Batch]:
    """Return the global batches of an epoch as a single process reads them."""
    dataset = make()
    dataset.set_epoch(epoch)
    return together([iter(plain(dataset, 0))])


@pytest.mark.parametrize(
    ("make", "world_size", "workers"),
    [("dataset", 2, 2), ("dataset", 8, 0), ("mixture", 2, 3)],
    indirect=["make"],
)
@pytest.mark.slow
def test_ranks_and_workers_do_not_change_global_batches(
    make: Make, world_size: int, workers: int
) -> None:
    """1, 2 and 8 ranks yield the same bytes in the same batches, with workers or not."""
    loaders = [plain(make(rank, world_size), workers) for rank in range(world_size)]
    assert [len(loader) for loader in loaders] == [BATCHES] * world_size
    for epoch in range(2):
        expected = whole(make, epoch)
        assert [len(batch) for batch in expected] == [GLOBAL] * BATCHES
        assert together([iter(loader) for loader in loaders]) == expected


@pytest.mark.parametrize(
    ("load", "make", "before", "after"),
    [
        pytest.param(stateful, "dataset", (2, 3), (2, 3), marks=pytest.mark.slow),
        (own, "dataset", (4, 0), (1, 3)),
        pytest.param(own, "mixture", (2, 2), (8, 0), marks=pytest.mark.slow),
    ],
    indirect=["make"],
)
def test_run_resumes_with_the_next_global_batch_on_any_job(
    make: Make, load: Any, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """Two resumptions from one rank's state give the batches of an uninterrupted run."""
    expected = whole(make)
    taken = 0
    state = ""
    for (world_size, workers), count in ((before, 4), (after, 5), (before, 3)):
        datasets = [make(rank, world_size) for rank in range(world_size)]
        loaders = [load(dataset, workers) for dataset in datasets]
        for dataset, loader in zip(datasets, loaders, strict=True):
            if state:  # torchdata's loader takes only the state of as many workers
                (loader if load is stateful and before == after else dataset).load_state_dict(
                    json.loads(state)
                )
        found = together([islice(loader, count) for loader in loaders])
        assert found == expected[taken : taken + count]
        taken += count
        state = json.dumps(loaders[0].state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("load", first_quick([stateful, own]))
def test_state_of_one_loader_resumes_with_another(make: Make, load: Any) -> None:
    """Though a plain loader begins with its first worker, whichever worker's turn it was."""
    expected = whole(make)
    saving = load(make(), 2)
    assert list(islice(saving, 3)) == expected[:3]
    second = make()
    second.load_state_dict(saving.state_dict())
    assert list(plain(second, 2)) == expected[3:]


@pytest.mark.slow
def test_a_sample_that_is_skipped_moves_no_batch_of_others(daemon: Daemon, tmp_path: Path) -> None:
    """The reader that skips it goes on, and the global batches before it are the same."""
    url = write_indexed(tmp_path, COUNTS)
    samples = random_samples(41, {"bin": 200}, first=56)
    (tmp_path / "3.tar").write_bytes(make_tar([*samples[:20], samples[20], *samples[20:]]))
    options: dict[str, Any] = {
        "global_batch_size": GLOBAL,
        "on_error": ignore_and_continue,
        "socket": daemon.socket,
    }
    ranks = [ShardDataset(url, rank=rank, world_size=2, **options) for rank in range(2)]
    read = together([iter(plain(rank, 2)) for rank in ranks])
    keys = [[sample["__key__"] for sample in batch] for batch in read]
    assert keys[:4] == [
        [f"{number:06d}" for number in range(start, start + GLOBAL)]
        for start in range(0, 64, GLOBAL)
    ]
    assert [len(batch) for batch in keys] == [GLOBAL] * BATCHES
    assert "000076" not in chain.from_iterable(keys)


@pytest.mark.slow
@pytest.mark.parametrize("make", first_quick(["dataset", "mixture"]), indirect=True)
def test_substitutes_are_the_same_on_any_number_of_ranks(make: Make) -> None:
    """The substitute for a skipped sample depends on its place in the global batch alone."""

    def decode(sample: Sample) -> Sample:
        if int(sample["__key__"]) % 10 == 3:
            raise ValueError("bad")
        return sample

    def job(ranks: int) -> list[list[str]]:
        datasets = [
            make(rank, ranks, decode=decode, on_error=ignore_and_continue) for rank in range(ranks)
        ]
        batches = together([iter(own(dataset, 0)) for dataset in datasets])
        return [[sample["__key__"] for sample in batch] for batch in batches]

    alone = job(1)
    assert len(alone) == BATCHES
    assert job(2) == alone
    assert job(8) == alone


@pytest.mark.slow
def test_substitutes_go_by_the_seed_of_a_loaded_state(make: Make) -> None:
    """A run that has drawn another seed resumes in the order of the state, substitutes included."""

    def decode(sample: Sample) -> Sample:
        if int(sample["__key__"]) % 10 == 3:
            raise ValueError("bad")
        return sample

    def dataset(rank: int, ranks: int, seed: int | None) -> ShardDataset:
        return make(rank, ranks, seed=seed, decode=decode, on_error=ignore_and_continue)

    def keys(ranks: list[Iterator[Batch]]) -> list[list[str]]:
        return [[sample["__key__"] for sample in batch] for batch in together(ranks)]

    drawn = dataset(0, 1, None)
    loader = own(drawn, 0)
    begun = keys([islice(loader, 2)])
    resumed = own(dataset(0, 1, None), 0)
    resumed.load_state_dict(loader.state_dict())
    rest = keys([iter(resumed)])
    for ranks in (2, 8):
        whole = keys([iter(own(dataset(rank, ranks, drawn.seed), 0)) for rank in range(ranks)])
        assert begun + rest == whole


def test_loaders_that_would_change_global_batches_are_refused(make: Make) -> None:
    """Ranks that do not divide them; a loader with batches of another size, or in another order."""
    with pytest.raises(ConfigError, match="cannot be divided among 3 ranks"):
        next(iter(make(0, 3)))
    with pytest.raises(
        ConfigError, match="the loader's batch_size is 4, each rank's part of a global batch 8"
    ):
        make(0, 2).loader(batch_size=4)
    with pytest.raises(ConfigError, match="in_order=False"):
        make(0, 2).loader(num_workers=2, in_order=False)
    assert make(0, 2).loader().batch_size == 8
    with pytest.raises(ConfigError, match="global batches would depend on the number of workers"):
        iter(make().filter(bool))
