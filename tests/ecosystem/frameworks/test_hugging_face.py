"""transformers' and datasets' ways to shard a dataset: an error where they would shard it a second time."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from shardcache.errors import ConfigError
from shardcache_client import ShardDataset, ShardReader
from support.programs.cli import clean_environment
from support.programs.daemon import Daemon
from support.shards.tars import write_shards

JOB = Path(__file__).with_name("trainer_job.py")
SHARDS = 4
SAMPLES = 25
KEYS = [f"{number:06d}" for number in range(SHARDS * SAMPLES)]
LIMIT_S = 100.0

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
    rows = [{"url": f"shard-{number:06d}.tar", "nsamples": SAMPLES} for number in range(SHARDS)]
    (source / "index.json").write_text(json.dumps({"wids_version": 1, "shardlist": rows}))
    return f"file://{source}/index.json"


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
    assert len({sample["__key__"] for sample in share(make(rank=0, world_size=1))}) == len(KEYS) / 2


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


def test_trainer_with_its_own_loaders_is_refused(daemon: Daemon, index: str, tmp_path: Path) -> None:
    """Two processes: train, evaluate and predict raise the typed error on both, with the class to use instead."""
    run_job(daemon, index, tmp_path, "own", ranks=2)
    for rank in range(2):
        errors = json.loads((tmp_path / f"{rank}.json").read_text())
        assert list(errors) == ["train", "evaluate", "predict"]
        assert all("ShardTrainer" in (error or "") for error in errors.values()), errors


def test_shard_trainer_resumes_on_another_mesh(daemon: Daemon, index: str, tmp_path: Path) -> None:
    """The two ranks of a copy train on the same batches; after a resume, four ranks on batches of their own."""

    def batches(how: str) -> list[list[list[int]]]:
        run_job(daemon, index, tmp_path, how, ranks=4)
        return [json.loads((tmp_path / f"{how}-{rank}.json").read_text()) for rank in range(4)]

    ranks = batches("divided")
    assert ranks[0] == ranks[1] and ranks[2] == ranks[3]
    shown = [*(of_rank[:4] for of_rank in ranks[::2]), *batches("whole")]
    numbers = [number for of_rank in shown for batch in of_rank for number in batch]
    assert len(numbers) == len(set(numbers)) == 64


def run_job(daemon: Daemon, index: str, out: Path, how: str, *, ranks: int) -> None:
    """Run the job on some ranks; it succeeds."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(JOB), str(daemon.socket), index, str(out), how]
    env = clean_environment({"OMP_NUM_THREADS": "1"})
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
