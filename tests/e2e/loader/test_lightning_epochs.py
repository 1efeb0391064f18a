"""Epochs of Lightning's Trainer, which takes as many batches as the loader's length says."""

from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.utils.data import DataLoader

from shardcache_client.dataset import ShardDataset
from support.shards.reading import keys_of
from support.shards.tars import BATCH, KEYS, Make

pytestmark = pytest.mark.slow

# The machine may have fewer CPUs than a test has workers, and Lightning warns of much.
quietly = pytest.mark.filterwarnings("ignore")

EPOCHS = 3
BATCHES = 6
WHOLE = len(KEYS)


@pytest.fixture(scope="module")
def training() -> ModuleType:
    """The module that imports Lightning: seconds that no other test should wait for."""
    return import_module("lightning_training")


def loader_of(dataset: ShardDataset, workers: int = 0) -> Any:
    """Return the recommended loader."""
    return dataset.loader(num_workers=workers, collate_fn=keys_of)


def plain_loader_of(dataset: ShardDataset, workers: int) -> Any:
    """Return torch's own loader."""
    return DataLoader(dataset, batch_size=BATCH, num_workers=workers, collate_fn=keys_of)


def epochs_of(dataset: ShardDataset) -> list[list[list[str]]]:
    """Return the batches of each epoch, as `set_epoch` reads them to their end."""
    loader = loader_of(dataset)
    found = []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        found.append(list(loader))
    return found


@quietly
@pytest.mark.parametrize("make_loader", [loader_of, plain_loader_of], ids=["loader", "plain"])
@pytest.mark.parametrize(
    "workers", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_lightning_with_limited_batches_reads_one_epoch_after_another(
    make: Make, training: ModuleType, make_loader: Any, workers: int
) -> None:
    """`limit_train_batches` leaves each epoch early, while the Trainer holds its iterator."""
    trainer = training.trainer(EPOCHS, limit_train_batches=BATCHES)
    model = training.Recorder(EPOCHS)
    trainer.fit(model, make_loader(make(), workers))
    beginnings = []
    dataset = make()
    for epoch in range(EPOCHS):
        dataset.set_epoch(epoch)
        beginnings.append(list(islice(make_loader(dataset, workers), BATCHES)))
    assert model.read == beginnings


@pytest.mark.filterwarnings("ignore", "error:Your .IterableDataset. has .__len__. defined")
def test_lightning_trusts_the_length_of_the_loader(make: Make, training: ModuleType) -> None:
    """Epochs have as many batches, and nothing warns of samples that are read twice."""
    trainer = training.trainer(1)
    model = training.Recorder(1)
    loader = loader_of(make())
    trainer.fit(model, loader, loader_of(make()))
    assert len(model.read[0]) == trainer.num_training_batches == len(loader)


@quietly
def test_lightning_resumed_with_one_batch_left_reads_each_epoch(
    make: Make, training: ModuleType, tmp_path: Path
) -> None:
    """The checkpoint is that of the last step but one of the first epoch."""
    steps = len(loader_of(make())) - 1
    whole = training.Recorder(EPOCHS)
    training.trainer(EPOCHS, training.saver(tmp_path, steps)).fit(whole, loader_of(make()))
    resumed = training.Recorder(EPOCHS)
    training.trainer(EPOCHS).fit(
        resumed, loader_of(make()), ckpt_path=tmp_path / f"step={steps}.ckpt"
    )
    assert [*chain(*resumed.read)] == [*chain(*whole.read)][steps:]


@quietly
def test_lightning_reads_epochs_of_one_batch_one_after_another(
    make: Make, training: ModuleType
) -> None:
    """Each with the samples in another order."""
    model = training.Recorder(EPOCHS)
    training.trainer(EPOCHS).fit(model, loader_of(make(batch_size=WHOLE)))
    assert model.read == epochs_of(make(batch_size=WHOLE))
