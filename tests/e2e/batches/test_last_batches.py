"""An epoch's last batch ends the epoch, also for a loop that counts and asks for no more."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader

from shardcache_client.dataset import Mixture, ShardDataset
from shardcache_client.loading.loader import ShardLoader
from support.cases import first_quick
from support.shards.reading import keys_of
from support.shards.tars import BATCH, KEYS, Make

# The machine may have fewer CPUs than a test has workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

EPOCHS = 3
WHOLE = len(KEYS)

Batch = list[str]

workers = pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])


def load(dataset: ShardDataset, workers: int = 0, **options: Any) -> ShardLoader[Batch]:
    """Return a loader of lists of keys."""
    return dataset.loader(num_workers=workers, collate_fn=keys_of, **options)


def epochs_of(make_loader: Callable[[], ShardLoader[Batch]]) -> list[list[Batch]]:
    """Return the batches of each epoch, as `set_epoch` reads them to their end."""
    loader = make_loader()
    found = []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        found.append(list(loader))
    return found


@workers
@pytest.mark.parametrize("options", first_quick([{}, {"drop_last": True}]))
def test_last_batch_of_a_resumed_epoch_is_read_once(
    make: Make, workers: int, options: dict[str, Any]
) -> None:
    """A loop over `loader.remaining` batches reads the one that is left, and then whole epochs."""
    epochs = epochs_of(lambda: load(make(), workers, **options))
    saving = load(make(), workers, **options)
    for _ in islice(saving, len(saving) - 1):
        state = saving.state_dict()
    loader = load(make(), workers, **options)
    loader.load_state_dict(state)
    read = [list(islice(loader, loader.remaining)) for _ in range(EPOCHS)]
    assert read == [epochs[0][-1:], *epochs[1:]]


@workers
def test_epochs_of_one_batch_follow_each_other(make: Make, workers: int) -> None:
    """A loop over `len(loader)` batches, of which there is one, reads another epoch each time."""

    def make_loader() -> ShardLoader[Batch]:
        return load(make(batch_size=WHOLE), min(workers, 1))

    epochs = epochs_of(make_loader)
    loader = make_loader()
    assert [list(islice(loader, len(loader))) for _ in range(EPOCHS)] == epochs


def test_state_after_the_only_batch_of_an_epoch_resumes_with_the_next_one(make: Make) -> None:
    """As does one that is saved once the loop has left."""
    epochs = epochs_of(lambda: load(make(batch_size=WHOLE)))
    loader = load(make(batch_size=WHOLE))
    states = [loader.state_dict() for _ in islice(loader, 1)]
    states.append(loader.state_dict())
    for state in states:
        resumed = load(make(batch_size=WHOLE))
        resumed.load_state_dict(state)
        assert list(resumed) == epochs[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_epochs_of_one_batch_follow_each_other_in_a_plain_loader(make: Make, workers: int) -> None:
    """Torch's own DataLoader, read for as many batches as it has."""
    epochs = epochs_of(lambda: load(make(batch_size=WHOLE)))
    dataset = make(batch_size=WHOLE)
    loader = DataLoader(dataset, batch_size=WHOLE, num_workers=workers, collate_fn=keys_of)
    assert [list(islice(loader, len(loader))) for _ in range(EPOCHS)] == epochs


def test_samples_of_one_batch_follow_each_other(make: Make) -> None:
    """A loop over the dataset itself that takes `len(dataset)` samples."""
    dataset = make(batch_size=WHOLE)
    whole = make(batch_size=WHOLE)
    expected = [keys_of(whole) for _ in range(EPOCHS)]
    assert [keys_of(islice(dataset, len(dataset))) for _ in range(EPOCHS)] == expected


def test_last_batch_of_a_filtered_epoch_ends_it(make: Make) -> None:
    """Its number of batches is unknown, but a short batch is the last one."""
    kept = KEYS[:3]

    def make_loader() -> ShardLoader[Batch]:
        return load(make(decode=None).filter(lambda sample: sample["__key__"] in kept))

    epochs = epochs_of(make_loader)
    assert [len(batches) for batches in epochs] == [1] * EPOCHS
    loader = make_loader()
    assert [list(islice(loader, 1)) for _ in range(EPOCHS)] == epochs


def test_epochs_of_one_batch_of_a_mixture_follow_each_other(make: Make) -> None:
    """It counts as the datasets that it mixes do."""

    def make_loader() -> ShardLoader[Batch]:
        mixture = Mixture([make(), make()], samples_per_epoch=BATCH)
        return load(mixture)

    epochs = epochs_of(make_loader)
    loader = make_loader()
    assert [list(islice(loader, 1)) for _ in range(EPOCHS)] == epochs
