"""The examples for JAX, tf.data, DALI and datasets, by those projects' own code on two processes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from support.network.ports import free_port
from support.programs.daemon import Daemon
from support.programs.examples import (
    RANKS,
    check_epochs,
    check_rest,
    check_usage,
    counted_shards,
    run,
    run_ranks,
    torchrun,
)
from support.stores.moto_s3 import MotoS3

SHARDS = "s3://bucket/train/{0..6}.tar"
INDEX = "s3://bucket/train.json"
LIMIT_S = 300  # TensorFlow takes a minute to import where the disk is cold

pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(3 * LIMIT_S)]

Rank = tuple[Sequence[str], Mapping[str, str]]


@pytest.fixture(scope="module")
def daemon(moto_server: MotoS3) -> Iterator[Daemon]:
    """A daemon with the shards in its store."""
    with counted_shards(moto_server) as it:
        yield it


def jax_ranks(*options: str) -> list[Rank]:
    """Return the commands of two processes with a coordinator on loopback."""
    common = ["with_jax.py", INDEX, "--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(RANKS), *options]
    return [([*common, "--process", str(rank)], {"JAX_PLATFORMS": "cpu"}) for rank in range(RANKS)]


def tf_data_ranks(*options: str) -> list[Rank]:
    """Return the commands of two workers of MultiWorkerMirroredStrategy."""
    cluster = {"worker": [f"127.0.0.1:{free_port()}" for _ in range(RANKS)]}
    tasks = ({"cluster": cluster, "task": {"type": "worker", "index": rank}} for rank in range(RANKS))
    return [(["with_tf_data.py", INDEX, *options], {"TF_CONFIG": json.dumps(task)}) for task in tasks]


def dali_ranks(*options: str) -> list[Rank]:
    """Return the commands of two ranks."""
    return [(["with_dali.py", INDEX, *options], launched(rank)) for rank in range(RANKS)]


def launched(rank: int) -> dict[str, str]:
    """Return a launcher's variables."""
    return {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}


@pytest.mark.parametrize("way", ["jax", "tf_data", "dali", "datasets", "load_dataset"])
def test_usage_lines_work_as_they_stand(daemon: Daemon, tmp_path: Path, way: str) -> None:
    """With the file alone in a folder: the lines of its docstring, one after the other."""
    check_usage(daemon, tmp_path, f"with_{way}.py")


@pytest.mark.parametrize("ranks", [jax_ranks, tf_data_ranks, dali_ranks])
def test_every_sample_once_and_an_exact_resume(daemon: Daemon, tmp_path: Path, ranks: type[list[Rank]]) -> None:
    """Three epochs, each in an order of its own; a run resumed within the second one goes on with the next batch."""
    epochs = run_ranks(daemon, tmp_path / "out", *ranks("--checkpoints", str(tmp_path)))
    check_epochs(epochs)
    saved = tmp_path / f"step-{len(epochs['epoch 0'][0]) + 3}.json"
    check_rest(epochs, run_ranks(daemon, tmp_path / "rest", *ranks("--resume", str(saved))), 3)


def test_datasets_shares_out_readers_and_resumes(daemon: Daemon, tmp_path: Path) -> None:
    """The same with two workers per process, to which datasets gives a reader each."""
    command = [*torchrun("with_datasets.py"), INDEX]
    epochs = run(daemon, tmp_path / "out", *command, "--checkpoints", str(tmp_path), limit_s=LIMIT_S)
    check_epochs(epochs, readers=2 * RANKS)
    rest = run(daemon, tmp_path / "rest", *command, "--resume", str(tmp_path / "epoch-1-step-3"), limit_s=LIMIT_S)
    check_rest(epochs, rest, 3)


def test_load_dataset_reads_cached_tars(daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """datasets' own reader, on paths of cached shards: every sample once, and the shards released at the end."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    ranks = [(["with_load_dataset.py", SHARDS], launched(rank)) for rank in range(RANKS)]
    check_epochs(run_ranks(daemon, tmp_path / "out", *ranks), readers=1)
    assert daemon.leases() == 0
