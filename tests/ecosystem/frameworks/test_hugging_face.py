"""transformers' and datasets' ways to shard a dataset: an error where they would shard it a second time."""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from shardcache.errors import ConfigError
from shardcache_client import ShardDataset, ShardReader
from support.programs.daemon import Daemon
from support.programs.ranks import torchrun
from support.shards.reading import keys_of, write_index
from support.shards.tars import write_shards

SHARDS = 4
SAMPLES = 25
KEYS = [f"{number:06d}" for number in range(SHARDS * SAMPLES)]

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]

Make = Callable[..., ShardDataset]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon in a folder that also holds the shards."""
    with tempfile.TemporaryDirectory(prefix="shardcache-hf-") as folder, Daemon(Path(folder)) as it:
        yield it


@pytest.fixture(scope="module")
def index(daemon: Daemon) -> str:
    """An index file of four shards."""
    source = daemon.root / "source"
    source.mkdir()
    write_shards(source, SHARDS, SAMPLES)
    return write_index(source, [SAMPLES] * SHARDS, "shard-{:06d}.tar")


@pytest.fixture
def make(index: str, daemon: Daemon) -> Make:
    """Make the dataset."""
    return lambda **options: ShardDataset(index, socket=daemon.socket, **options)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process be the second of two, by torchrun's variables."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")


def generated(dataset: Iterable[Any], **shards: Any) -> Any:
    """Wrap the dataset as one of datasets' own."""
    datasets = pytest.importorskip("datasets")

    def samples(part: Any = None) -> Iterator[dict[str, str]]:
        for sample in dataset:
            yield {"key": sample["__key__"]}

    return datasets.IterableDataset.from_generator(samples, **shards)


@pytest.mark.usefixtures("two_ranks")
def test_transformers_shard_of_a_rank_is_an_error(make: Make) -> None:
    """transformers' own IterableDatasetShard raises it, too, and shares out what every rank reads whole."""
    utils = pytest.importorskip("transformers.trainer_pt_utils")

    def share(dataset: ShardDataset) -> Any:
        return utils.IterableDatasetShard(dataset, batch_size=5, num_processes=2, process_index=1)

    with pytest.raises(ConfigError, match="IterableDatasetShard"):
        next(iter(share(make())))
    assert len(set(keys_of(share(make(rank=0, world_size=1))))) == len(KEYS) / 2


@pytest.mark.usefixtures("two_ranks")
def test_datasets_split_of_a_rank_is_an_error(make: Make, index: str, daemon: Daemon) -> None:
    """split_dataset_by_node around a generator raises it, and splits what every rank reads whole.

    The remedy fits a ShardReader as well: there may be one for each shard of the IterableDataset.
    """
    split = pytest.importorskip("datasets.distributed").split_dataset_by_node
    for dataset in (make(), ShardReader(index, socket=daemon.socket)):
        with pytest.raises(ConfigError, match=r"split_dataset_by_node[\s\S]*a ShardReader for each of its shards"):
            next(iter(split(generated(dataset), rank=1, world_size=2)))
    whole = split(generated(make(rank=0, world_size=1)), rank=1, world_size=2)
    assert [sample["key"] for sample in whole] == KEYS[1::2]


def test_datasets_idle_workers_are_an_error(make: Make) -> None:
    """Two workers for one shard of datasets' raise it, as one would read nothing; a shard for each of them is right."""
    with pytest.raises(ConfigError, match="fewer shards"):
        next(iter(DataLoader(generated(make()), batch_size=None, num_workers=2)))
    loader = DataLoader(generated(make(), gen_kwargs={"part": [0, 1]}), batch_size=None, num_workers=2)
    assert sorted(sample["key"] for sample in loader) == KEYS


OPTIONS = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}


class Net(torch.nn.Module):
    """A model of one number, which notes its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.batches: list[list[int]] = []

    def forward(self, number: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a loss and the logits."""
        self.batches.append([int(each) for each in number])
        logits = self.net(number.float().unsqueeze(-1))
        return {"loss": logits.mean(), "logits": logits}


def decode(sample: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the sample's number."""
    return {"number": torch.tensor(int(sample["__key__"]))}


def refused(socket: str, index: str, out: str) -> dict[str, str]:
    """Be one rank that calls each of Trainer's loops; return their errors."""
    from transformers import Trainer, TrainingArguments

    dataset = ShardDataset(index, socket=socket, batch_size=8, decode=decode)
    arguments = TrainingArguments(output_dir=out, max_steps=1, **OPTIONS)
    trainer = Trainer(Net(), arguments, train_dataset=dataset, eval_dataset=dataset)
    errors = {}
    for name, loop in {"train": trainer.train, "evaluate": trainer.evaluate, "predict": trainer.predict}.items():
        with pytest.raises(ConfigError) as caught:
            loop(*([dataset] if name == "predict" else []))
        errors[name] = str(caught.value)
    return errors


def test_trainer_with_its_own_loaders_is_refused(daemon: Daemon, index: str, tmp_path: Path) -> None:
    """Two processes: train, evaluate and predict raise the typed error on both, with the class to use instead."""
    for errors in torchrun(refused, daemon.socket, index, tmp_path):
        assert list(errors) == ["train", "evaluate", "predict"]
        assert all("ShardTrainer" in error for error in errors.values()), errors


def resumed(socket: str, index: str, out: str, how: str) -> list[list[int]]:
    """Be one rank that trains steps of eight samples over a mesh, saving the fourth; or goes on from there alone."""
    from transformers import TrainingArguments

    from shardcache_client.transformers import ShardTrainer

    size, names = ((2, 2), ("dp", "tp")) if how == "divided" else ((4,), ("dp",))
    steps = {"max_steps": 8, "save_steps": 4, "per_device_train_batch_size": 8 // size[0]}
    arguments = TrainingArguments(output_dir=out, **OPTIONS, **steps)
    assert arguments.device.type == "cpu"  # initialises torch.distributed
    mesh = init_device_mesh("cpu", size, mesh_dim_names=names)["dp"]
    dataset = ShardDataset(index, shuffle=True, seed=7, socket=socket, decode=decode, mesh=mesh)
    net = Net()
    trainer = ShardTrainer(net, arguments, train_dataset=dataset)
    trainer.train(resume_from_checkpoint=f"{out}/checkpoint-4" if how == "whole" else None)
    dist.barrier()
    return net.batches


def test_shard_trainer_resumes_on_another_mesh(daemon: Daemon, index: str, tmp_path: Path) -> None:
    """The two ranks of a copy train on the same batches; after a resume, four ranks on batches of their own."""
    ranks = torchrun(resumed, daemon.socket, index, tmp_path, "divided", ranks=4)
    assert ranks[0] == ranks[1] and ranks[2] == ranks[3]
    whole = torchrun(resumed, daemon.socket, index, tmp_path, "whole", ranks=4)
    shown = [*(of_rank[:4] for of_rank in ranks[::2]), *whole]
    numbers = [number for of_rank in shown for batch in of_rank for number in batch]
    assert len(numbers) == len(set(numbers)) == 64
