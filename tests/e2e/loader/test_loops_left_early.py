"""Epochs and positions of loops that break, keep iterators, nest others or are resumed."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader

from shardcache.errors import ConfigError
from shardcache_client.dataset import ShardDataset
from support.shards.reading import keys_of
from support.shards.tars import BATCH, Make

# The machine may have fewer CPUs than a test has workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

EPOCHS = 3
# A worker of a plain DataLoader learns that its batches are taken when it is asked for its fourth.
BATCHES = 6

Batch = list[str]


def loader_of(ds: ShardDataset, workers: int) -> Any:
    """Return the recommended loader."""
    return ds.loader(num_workers=workers, collate_fn=keys_of)


def plain_loader_of(ds: ShardDataset, workers: int) -> Any:
    """Return torch's own loader."""
    return DataLoader(ds, batch_size=BATCH, num_workers=workers, collate_fn=keys_of)


LoaderOf = Callable[[ShardDataset, int], Any]
loaders = pytest.mark.parametrize(
    "loader_of", [loader_of, plain_loader_of], ids=["loader", "plain"]
)
workers = pytest.mark.parametrize(
    "workers", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)


def beginnings(make: Make, loader_of: LoaderOf, workers: int, batches: int) -> list[list[Batch]]:
    """Return the first batches of each epoch, as `set_epoch` reads them."""
    ds = make()
    found = []
    for epoch in range(EPOCHS):
        ds.set_epoch(epoch)
        found.append(list(islice(loader_of(ds, workers), batches)))
    return found


@loaders
@workers
def test_loop_that_breaks_reads_one_epoch_after_another(
    make: Make, loader_of: LoaderOf, workers: int
) -> None:
    """A for loop does, and so does an iterator that is replaced by the next."""
    expected = beginnings(make, loader_of, workers, BATCHES)
    loader = loader_of(make(), workers)
    assert [list(islice(loader, BATCHES)) for _ in range(EPOCHS)] == expected
    replaced = loader_of(make(), workers)
    read = []
    for _ in range(EPOCHS):
        batches = iter(replaced)
        read.append([next(batches) for _ in range(BATCHES)])
    assert read == expected


@loaders
@workers
def test_iterators_that_are_kept_read_one_epoch_after_another(
    make: Make, loader_of: LoaderOf, workers: int
) -> None:
    """An old iterator may live on in a variable, a list or a traceback."""
    loader = loader_of(make(), workers)
    kept: list[Iterator[Batch]] = []
    read = []
    for _ in range(EPOCHS):
        kept.append(iter(loader))
        read.append([next(kept[-1]) for _ in range(BATCHES)])
    assert read == beginnings(make, loader_of, workers, BATCHES)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_nested_loop_gives_the_position_back_to_the_outer_one(make: Make, workers: int) -> None:
    """A state of the outer loop resumes it in its epoch, and each sample comes once."""
    whole = list(loader_of(make(), workers))
    loader = loader_of(make(), workers)
    taken = []
    for step, batch in enumerate(loader):
        if step == 0:
            list(islice(loader, 2))
        taken.append(batch)
        if step == 5:
            break
        assert loader.epoch == 0
        assert loader.remaining == len(whole) - len(taken)
    state = loader.state_dict()
    resumed = loader_of(make(), workers)
    resumed.load_state_dict(state)
    assert taken + list(resumed) == whole


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_nested_loops_in_every_step_change_no_epoch_of_the_outer_one(
    make: Make, workers: int
) -> None:
    """Each pass of the outer loop reads the epoch after the one before it."""
    plain = loader_of(make(), workers)
    epochs = [list(plain) for _ in range(2)]
    loader = loader_of(make(), workers)
    for epoch in epochs:
        read = []
        for batch in loader:
            list(islice(loader, 2))
            read.append(batch)
        assert read == epoch


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_iterator_is_refused_once_a_state_was_loaded_under_it(make: Make, workers: int) -> None:
    """Its next batch is an error, and the next iterator resumes from the loaded state."""
    whole = list(loader_of(make(), workers))
    loader = loader_of(make(), workers)
    batches = iter(loader)
    taken = list(islice(batches, 4))
    state = loader.state_dict()
    taken += list(islice(batches, 3))
    assert taken == whole[:7]
    loader.load_state_dict(state)
    with pytest.raises(ConfigError, match="a state was loaded while this iterator was being read"):
        next(batches)
    assert loader.state_dict() == state
    assert list(loader) == whole[4:]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_of_the_dataset", [False, True])
def test_epoch_set_in_a_loop_concerns_the_next_iterator_only(
    make: Make, workers: int, is_of_the_dataset: bool
) -> None:
    """The running one keeps the position, and a state of it resumes with its next batch."""
    plain = loader_of(make(), workers)
    epochs = [list(plain) for _ in range(3)]
    dataset = make()
    loader = loader_of(dataset, workers)
    batches = iter(loader)
    taken = list(islice(batches, 4))
    state = loader.state_dict()
    (dataset if is_of_the_dataset else loader).set_epoch(2)
    assert loader.state_dict() == state
    assert loader.epoch == 0
    assert loader.remaining == len(epochs[0]) - 4
    assert taken + list(batches) == epochs[0]
    del batches
    assert loader.epoch == 2
    assert loader.remaining == len(epochs[2])
    assert list(loader) == epochs[2]


def test_epoch_set_in_an_iteration_of_samples_concerns_the_next_one_only(make: Make) -> None:
    """The dataset itself is where its iterator is."""
    plain = make()
    first = keys_of(plain)
    second = keys_of(plain)
    dataset = make()
    samples = iter(dataset)
    taken = keys_of(islice(samples, 10))
    state = dataset.state_dict()
    dataset.set_epoch(1)
    assert dataset.epoch == 0
    assert dataset.state_dict() == state
    assert taken + keys_of(samples) == first
    assert keys_of(dataset) == second


def test_epoch_and_remaining_hold_until_the_last_batch_is_left(make: Make) -> None:
    """In the last step of an epoch a log says that epoch, with no batch remaining."""
    loader = loader_of(make(), 0)
    logged = [(loader.epoch, loader.remaining) for _ in loader]
    assert logged == [(0, left) for left in reversed(range(len(loader)))]
    assert loader.epoch == 1
    assert loader.remaining == len(loader)
