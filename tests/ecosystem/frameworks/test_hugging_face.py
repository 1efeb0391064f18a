"""transformers and datasets: ShardTrainer's exact resumption, and errors of double sharding."""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset

from shardcache.errors import ConfigError
from shardcache_client.dataset import ShardDataset
from shardcache_client.reader import ShardReader
from support.programs.daemon import Daemon
from support.programs.ranks import torchrun
from support.shards.reading import keys_of, write_index
from support.shards.tars import write_shards

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

from shardcache_client.transformers import ShardTrainer  # noqa: E402

BATCH = 5
SHARDS = 4
SAMPLES = 100
STEPS = SAMPLES // BATCH
KEYS = [f"{number:06d}" for number in range(SAMPLES)]
OPTIONS = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]

Make = Callable[..., ShardDataset[Any]]
Shown = list[list[int]]
Train = Callable[..., Shown]


class Net(nn.Module):
    """A model of one number, which notes what it is shown in training and in evaluation."""

    def __init__(self, largest: int = BATCH) -> None:
        super().__init__()
        self.largest = largest
        self.net = nn.Linear(1, 1)
        self.shown: Shown = []
        self.evaluated: list[int] = []

    def forward(self, number: Tensor) -> dict[str, Tensor]:
        """Return a loss and the logits. Raises RuntimeError for too large a batch, as CUDA does."""
        if self.training and len(number) > self.largest:
            raise RuntimeError("CUDA out of memory.")
        if self.training:
            self.shown.append(number.tolist())
        else:
            self.evaluated += number.tolist()
        logits = self.net(number.float().unsqueeze(-1))
        return {"loss": logits.mean(), "logits": logits}


class Squares(Dataset[dict[str, int]]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, number: int) -> dict[str, int]:
        return {"number": number**2}


def decode(sample: dict[str, Any]) -> dict[str, int]:
    return {"number": int(sample["__key__"])}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon in a folder that also holds the shards."""
    with tempfile.TemporaryDirectory(prefix="shardcache-hf-") as folder, Daemon(Path(folder)) as it:
        yield it


@pytest.fixture(scope="module")
def index(daemon: Daemon) -> str:
    source = daemon.root / "source"
    source.mkdir()
    write_shards(source, SHARDS, SAMPLES // SHARDS)
    return write_index(source, [SAMPLES // SHARDS] * SHARDS, "shard-{:06d}.tar")


@pytest.fixture
def make(index: str, daemon: Daemon) -> Make:
    return lambda **options: ShardDataset(index, socket=daemon.socket, **options)


@pytest.fixture
def dataset(make: Make) -> ShardDataset[dict[str, int]]:
    return make(shuffle=True, decode=decode)


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Train with checkpoints every third step, or resume from one of them; return the batches."""

    def train(
        dataset: Any,
        resume: int | None = None,
        trainer: Any = ShardTrainer,
        largest: int = BATCH,
        **options: Any,
    ) -> Shown:
        options = {
            "num_train_epochs": 2,
            "gradient_accumulation_steps": 1,
            "save_steps": 3,
        } | options
        net = Net(largest)
        arguments = transformers.TrainingArguments(
            output_dir=tmp_path, per_device_train_batch_size=BATCH, **OPTIONS, **options
        )
        made = trainer(net, arguments, train_dataset=dataset)
        checkpoint = None if resume is None else str(tmp_path / f"checkpoint-{resume}")
        made.train(resume_from_checkpoint=checkpoint)
        return net.shown

    return train


def test_each_step_of_each_epoch_resumes(dataset: ShardDataset[Any], train: Train) -> None:
    """Any point of an epoch does, and so does a resumed run's. Nothing else is decoded."""
    whole = train(dataset)
    assert len(whole) == 2 * STEPS
    assert sorted(chain.from_iterable(whole[:STEPS])) == list(range(SAMPLES))
    for step in (3, 6, 21, 39):
        assert train(dataset, step) == whole[step:]
    assert train(dataset, 18, save_strategy="epoch") == whole[18:]
    assert train(dataset, STEPS) == whole[STEPS:]


def test_steps_of_several_batches_resume(dataset: ShardDataset[Any], train: Train) -> None:
    """Trainer's last step of an epoch may have fewer batches than the others."""
    whole = train(dataset, gradient_accumulation_steps=3)
    assert len(whole) == 2 * STEPS
    assert train(dataset, 3, gradient_accumulation_steps=3) == whole[9:]
    assert train(dataset, 9, gradient_accumulation_steps=3) == whole[STEPS + 6 :]


def test_the_batch_size_that_fits_is_found(dataset: ShardDataset[Any], train: Train) -> None:
    """Each attempt of `auto_find_batch_size` has smaller batches, and the last reads all."""
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


@pytest.mark.parametrize("options", [{"num_train_epochs": 3}, {"max_steps": 3}])
@pytest.mark.parametrize("is_filtered", [False, True])
def test_epochs_of_one_step_follow_each_other(
    make: Make, train: Train, options: dict[str, int], is_filtered: bool
) -> None:
    """Each has its own order, of known length or not, and resumed after the first or not."""
    if is_filtered and "max_steps" not in options:
        pytest.skip("Trainer asks for max_steps where the length is unknown")

    def few() -> ShardDataset[Any]:
        found = make(shuffle=True, seed=7, shuffle_window=2, decode=decode, samples_per_epoch=BATCH)
        return found.filter(lambda item: item["number"] >= 0) if is_filtered else found

    whole = train(few(), save_steps=1, **options)
    epochs = few()
    assert whole == [[item["number"] for item in epochs] for _ in range(3)]
    assert train(few(), 1, save_steps=1, **options) == whole[1:]


def test_steps_of_another_size_are_refused(dataset: ShardDataset[Any], train: Train) -> None:
    """The error names the size to restore; the epoch may be read again all the same."""
    train(dataset)
    with pytest.raises(ConfigError, match=r"(?s)of 5 samples per step.*has 10.*is 5 as before"):
        train(dataset, 6, gradient_accumulation_steps=2)
    again = train(dataset, 6, gradient_accumulation_steps=2, ignore_data_skip=True)
    assert sorted(chain.from_iterable(again[:STEPS])) == list(range(SAMPLES))


def test_a_checkpoint_without_a_position_is_refused(
    dataset: ShardDataset[Any], train: Train
) -> None:
    """Trainer itself saved it. The epoch may be read again, but then steps end elsewhere."""
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


def test_evaluation_and_prediction_read_the_shards(
    dataset: ShardDataset[Any], tmp_path: Path
) -> None:
    """Of several datasets, too, by their names."""
    arguments = transformers.TrainingArguments(
        tmp_path, use_cpu=True, report_to="none", per_device_eval_batch_size=8
    )
    net = Net()
    trainer = ShardTrainer(net, arguments, eval_dataset={"all": dataset, "other": Squares()})
    trainer.evaluate()
    assert sorted(net.evaluated) == sorted([*range(SAMPLES), *(number**2 for number in range(9))])
    _, logits = trainer.predict(dataset).predictions
    assert logits.shape == (SAMPLES, 1)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process be the second of two, by torchrun's variables."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")


def generated(dataset: Iterable[Any], **shards: Any) -> Any:
    def samples(part: Any = None) -> Iterator[dict[str, str]]:
        for sample in dataset:
            yield {"key": sample["__key__"]}

    return datasets.IterableDataset.from_generator(samples, **shards)


@pytest.mark.usefixtures("two_ranks")
def test_transformers_shard_of_a_rank_is_an_error(make: Make) -> None:
    """Transformers' own IterableDatasetShard raises it, and shares out what all ranks read."""
    from transformers.trainer_pt_utils import IterableDatasetShard

    def share(dataset: ShardDataset) -> Any:
        return IterableDatasetShard(dataset, batch_size=5, num_processes=2, process_index=1)

    with pytest.raises(ConfigError, match="IterableDatasetShard"):
        next(iter(share(make())))
    assert len(set(keys_of(share(make(rank=0, world_size=1))))) == len(KEYS) / 2


@pytest.mark.usefixtures("two_ranks")
def test_datasets_split_of_a_rank_is_an_error(make: Make, index: str, daemon: Daemon) -> None:
    """split_dataset_by_node around a generator raises it, and splits what every rank reads whole.

    The remedy fits a ShardReader as well: there may be one for each shard of the IterableDataset.
    """
    from datasets.distributed import split_dataset_by_node as split

    for dataset in (make(), ShardReader(index, socket=daemon.socket)):
        with pytest.raises(
            ConfigError, match=r"split_dataset_by_node[\s\S]*a ShardReader for each of its shards"
        ):
            next(iter(split(generated(dataset), rank=1, world_size=2)))
    whole = split(generated(make(rank=0, world_size=1)), rank=1, world_size=2)
    assert [sample["key"] for sample in whole] == KEYS[1::2]


def test_datasets_idle_workers_are_an_error(make: Make) -> None:
    """Two workers for one shard raise it, as one would idle, but not for a shard each."""
    with pytest.raises(ConfigError, match="fewer shards"):
        next(iter(DataLoader(generated(make()), batch_size=None, num_workers=2)))
    loader = DataLoader(
        generated(make(), gen_kwargs={"part": [0, 1]}), batch_size=None, num_workers=2
    )
    assert sorted(sample["key"] for sample in loader) == KEYS


def refused(socket: str, index: str, out: str) -> dict[str, str]:
    """Be one rank that calls each of Trainer's loops; return their errors."""
    dataset = ShardDataset(index, socket=socket, batch_size=8, decode=decode)
    arguments = transformers.TrainingArguments(output_dir=out, max_steps=1, **OPTIONS)
    trainer = transformers.Trainer(Net(), arguments, train_dataset=dataset, eval_dataset=dataset)
    errors = {}
    for name, loop in {
        "train": trainer.train,
        "evaluate": trainer.evaluate,
        "predict": trainer.predict,
    }.items():
        with pytest.raises(ConfigError) as caught:
            loop(*([dataset] if name == "predict" else []))
        errors[name] = str(caught.value)
    return errors


def test_trainer_with_its_own_loaders_is_refused(
    daemon: Daemon, index: str, tmp_path: Path
) -> None:
    """Training, evaluation and prediction raise it on both processes, with the right class."""
    for errors in torchrun(refused, daemon.socket, index, tmp_path):
        assert list(errors) == ["train", "evaluate", "predict"]
        assert all("ShardTrainer" in error for error in errors.values()), errors


def resumed(socket: str, index: str, out: str, how: str) -> list[list[int]]:
    """Be one rank that trains over a mesh and saves the fourth step, or resume from it alone."""
    meshes = {"divided": ((2, 2), ("dp", "tp"))}
    size, names = meshes.get(how, ((4,), ("dp",)))
    steps = {"max_steps": 8, "save_steps": 4, "per_device_train_batch_size": 8 // size[0]}
    arguments = transformers.TrainingArguments(output_dir=out, **OPTIONS, **steps)
    assert arguments.device.type == "cpu"  # initialises torch.distributed
    mesh = init_device_mesh("cpu", size, mesh_dim_names=names)["dp"]
    dataset = ShardDataset(index, shuffle=True, seed=7, socket=socket, decode=decode, mesh=mesh)
    net = Net()
    trainer = ShardTrainer(net, arguments, train_dataset=dataset)
    trainer.train(resume_from_checkpoint=f"{out}/checkpoint-4" if how == "whole" else None)
    dist.barrier()
    return net.shown


def test_shard_trainer_resumes_on_another_mesh(daemon: Daemon, index: str, tmp_path: Path) -> None:
    """The two ranks of a copy share batches. On resume, four ranks have batches of their own."""
    ranks = torchrun(resumed, daemon.socket, index, tmp_path, "divided", ranks=4)
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    whole = torchrun(resumed, daemon.socket, index, tmp_path, "whole", ranks=4)
    shown = [*(of_rank[:4] for of_rank in ranks[::2]), *whole]
    numbers = [number for of_rank in shown for batch in of_rank for number in batch]
    assert len(numbers) == len(set(numbers)) == 64
