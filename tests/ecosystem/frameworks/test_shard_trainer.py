"""ShardTrainer in one process: what it resumes exactly, what it refuses, and the datasets that it leaves to Trainer."""

import tempfile
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.data import Dataset

from shardcache.errors import ConfigError
from shardcache_client import ShardDataset
from support.programs.daemon import Daemon
from support.shards.reading import write_index
from support.shards.tars import write_shards

transformers = pytest.importorskip("transformers")

from shardcache_client.transformers import ShardTrainer  # noqa: E402

BATCH = 5
SAMPLES = 100
STEPS = SAMPLES // BATCH

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]

Shown = list[list[int]]
Train = Callable[..., Shown]


class Net(nn.Module):
    """A model of one number, which notes the numbers that it is shown in training and in evaluation."""

    def __init__(self, largest: int = BATCH) -> None:
        super().__init__()
        self.largest = largest
        self.net = nn.Linear(1, 1)
        self.shown: Shown = []
        self.evaluated: list[int] = []

    def forward(self, number: Tensor) -> dict[str, Tensor]:
        """Return a loss and the logits. Raises RuntimeError for a batch that is too large, as CUDA does."""
        if self.training and len(number) > self.largest:
            raise RuntimeError("CUDA out of memory.")
        if self.training:
            self.shown.append(number.tolist())
        else:
            self.evaluated += number.tolist()
        logits = self.net(number.float().unsqueeze(-1))
        return {"loss": logits.mean(), "logits": logits}


class Squares(Dataset[dict[str, int]]):
    """A dataset of another kind."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, number: int) -> dict[str, int]:
        return {"number": number**2}


def decode(sample: dict[str, Any]) -> dict[str, int]:
    """Return the sample's number."""
    return {"number": int(sample["__key__"])}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon in a folder that also holds four shards and their index file."""
    with tempfile.TemporaryDirectory(prefix="shardcache-trainer-") as folder, Daemon(Path(folder)) as it:
        source = it.root / "source"
        source.mkdir()
        write_shards(source, 4, SAMPLES // 4)
        write_index(source, [SAMPLES // 4] * 4, "shard-{:06d}.tar")
        yield it


@pytest.fixture
def dataset(daemon: Daemon) -> ShardDataset[dict[str, int]]:
    """The shards' numbers, in another order each epoch."""
    return ShardDataset(f"{daemon.root}/source/index.json", shuffle=True, decode=decode, socket=daemon.socket)


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Train with checkpoints every third step, or resume from one of them; return the batches."""

    def train(
        dataset: Any, resume: int | None = None, trainer: Any = ShardTrainer, largest: int = BATCH, **options: Any
    ) -> Shown:
        options = {"num_train_epochs": 2, "gradient_accumulation_steps": 1} | options
        net = Net(largest)
        arguments = transformers.TrainingArguments(
            output_dir=tmp_path,
            use_cpu=True,
            per_device_train_batch_size=BATCH,
            save_steps=3,
            report_to="none",
            disable_tqdm=True,
            **options,
        )
        made = trainer(net, arguments, train_dataset=dataset)
        made.train(resume_from_checkpoint=None if resume is None else str(tmp_path / f"checkpoint-{resume}"))
        return net.shown

    return train


def test_each_step_of_each_epoch_resumes(dataset: ShardDataset[Any], train: Train) -> None:
    """From within an epoch, from its end, and from a run that was itself resumed; nothing else is decoded."""
    whole = train(dataset)
    assert len(whole) == 2 * STEPS
    assert sorted(chain.from_iterable(whole[:STEPS])) == list(range(SAMPLES))
    for step in (3, 6, 21, 39):
        assert train(dataset, step) == whole[step:]
    assert train(dataset, 18, save_strategy="epoch") == whole[18:]
    assert train(dataset, STEPS) == whole[STEPS:]


def test_steps_of_several_batches_resume(dataset: ShardDataset[Any], train: Train) -> None:
    """Where Trainer's last step of an epoch has fewer batches than the others."""
    whole = train(dataset, gradient_accumulation_steps=3)
    assert len(whole) == 2 * STEPS
    assert train(dataset, 3, gradient_accumulation_steps=3) == whole[9:]
    assert train(dataset, 9, gradient_accumulation_steps=3) == whole[STEPS + 6 :]


def test_the_batch_size_that_fits_is_found(dataset: ShardDataset[Any], train: Train) -> None:
    """With `auto_find_batch_size`, each attempt has smaller batches, and the last reads all epochs whole."""
    shown = train(dataset, largest=2, auto_find_batch_size=True)
    assert {len(batch) for batch in shown} == {2}
    assert [sorted(chain(*shown[:50])), sorted(chain(*shown[50:]))] == [list(range(SAMPLES))] * 2
    assert train(dataset, 30, largest=2, auto_find_batch_size=True) == shown[30:]


def test_loader_of_unknown_length_resumes(dataset: ShardDataset[Any], train: Train) -> None:
    """With a filter, Trainer knows no epochs: the loader's own count of them goes on."""

    def of_odd() -> ShardDataset[Any]:
        return dataset.filter(lambda item: item["number"] % 2)

    whole = train(of_odd(), max_steps=36)
    first = train(of_odd(), max_steps=10)
    assert whole[:10] == first
    assert {number for batch in whole for number in batch} == set(range(1, SAMPLES, 2))
    for step in (6, 12, 33):
        assert train(of_odd(), step, max_steps=36) == whole[step:]


def test_steps_of_another_size_are_refused(dataset: ShardDataset[Any], train: Train) -> None:
    """The error names the size to restore; the epoch may be read again all the same."""
    train(dataset)
    with pytest.raises(ConfigError, match=r"(?s)of 5 samples per step.*has 10.*is 5 as before"):
        train(dataset, 6, gradient_accumulation_steps=2)
    again = train(dataset, 6, gradient_accumulation_steps=2, ignore_data_skip=True)
    assert sorted(chain.from_iterable(again[:STEPS])) == list(range(SAMPLES))


def test_a_checkpoint_without_a_position_is_refused(dataset: ShardDataset[Any], train: Train) -> None:
    """One that Trainer itself saved. The epoch may be read again; then Trainer's steps do not end with epochs."""
    train(dataset, trainer=transformers.Trainer, num_train_epochs=1)
    with pytest.raises(ConfigError, match="no position"):
        train(dataset, 6)
    again = train(dataset, 6, ignore_data_skip=True)
    assert sorted(chain.from_iterable(again[:STEPS])) == list(range(SAMPLES))
    with pytest.raises(ConfigError, match="no position"):
        train(dataset, 9)
    assert train(dataset, 9, ignore_data_skip=True)[:STEPS] == again[:STEPS]


def test_other_datasets_are_left_to_trainer(train: Train) -> None:
    """They are read as without us, and resumed as Trainer does it."""
    whole = train(Squares(), num_train_epochs=3)
    assert sorted(chain.from_iterable(whole[:2])) == [number**2 for number in range(9)]
    assert train(Squares(), 3, num_train_epochs=3) == whole[3:]


def test_evaluation_and_prediction_read_the_shards(dataset: ShardDataset[Any], tmp_path: Path) -> None:
    """Of several datasets, too, by their names."""
    arguments = transformers.TrainingArguments(tmp_path, use_cpu=True, report_to="none", per_device_eval_batch_size=8)
    net = Net()
    trainer = ShardTrainer(net, arguments, eval_dataset={"all": dataset, "other": Squares()})
    trainer.evaluate()
    assert sorted(net.evaluated) == sorted([*range(SAMPLES), *(number**2 for number in range(9))])
    _, logits = trainer.predict(dataset).predictions
    assert logits.shape == (SAMPLES, 1)
