"""The examples for frameworks, by those projects' own code on two processes, checked sample by sample, and killed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from support.programs.cli import shardcache
from support.programs.daemon import Daemon
from support.programs.examples import (
    EPOCHS,
    TRAINING,
    VALIDATION,
    check,
    check_killed,
    check_resumed,
    counted_shards,
    run,
    torchrun,
)
from support.stores.moto_s3 import MotoS3

RAY_LIMIT_S = 300  # Ray starts a dozen processes before the first of ours

pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(3 * RAY_LIMIT_S)]


@pytest.fixture(scope="module")
def daemon(moto_server: MotoS3) -> Iterator[Daemon]:
    """A daemon with the shards in its store, their samples counted."""
    with counted_shards(moto_server) as it:
        yield it


def test_trainer_trains_evaluates_predicts_and_goes_on(daemon: Daemon, tmp_path: Path) -> None:
    """Three epochs, each evaluated, and predictions for every sample; a run resumed within the second one reads on."""
    epochs = check_resumed(daemon, tmp_path, torchrun("with_trainer.py"), "checkpoint-{}".format)
    samples = sum(VALIDATION)
    for predicted in map(chain.from_iterable, epochs["predicted"]):  # gathered: all of them on each rank
        keys = list(predicted)
        assert len(keys) == samples + samples % 2
        assert sorted(set(keys)) == [f"{number:06d}" for number in range(samples)]


def test_one_process_of_accelerate_goes_on_where_two_were_killed(daemon: Daemon, tmp_path: Path) -> None:
    """In the middle of an epoch, each of whose samples is shown exactly once up to the checkpoint and after it."""
    command = torchrun("with_accelerate.py"), torchrun("with_accelerate.py", ranks=1)
    check_killed(daemon, tmp_path, command, "step-{}".format)


def test_one_device_of_lightning_goes_on_where_two_were_killed(daemon: Daemon, tmp_path: Path) -> None:
    """Lightning gives rank 0's state to its only process."""
    command = ["with_lightning.py"], ["with_lightning.py", "--devices", "1"]
    check_killed(daemon, tmp_path, command, "epoch=0-step={}.ckpt".format)


@pytest.fixture
def ray_folder() -> Iterator[str]:
    """A folder for Ray's sockets: pytest's own may have too long a path."""
    with tempfile.TemporaryDirectory(prefix="shardcache-ray-", ignore_cleanup_errors=True) as folder:
        yield folder


def test_ray_train_trains_and_goes_on_under_its_own_name(
    daemon: Daemon, tmp_path: Path, ray_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three epochs; a run resumed from a checkpoint of the last one reads on; each is listed by the name of its run."""
    monkeypatch.setenv("RAY_TMPDIR", ray_folder)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    command = ["with_ray.py", "s3://ways-in/train/", "--storage", str(tmp_path / "storage")]
    epochs = run(daemon, tmp_path / "out", *command, "--name", "first-run", limit_s=RAY_LIMIT_S)
    for epoch in range(EPOCHS):
        check(epochs[f"epoch {epoch}"], TRAINING)
    *_, saved = sorted((tmp_path / "storage" / "first-run").glob("checkpoint_*/state.pt"))
    command += ["--name", "second-run", "--resume", str(saved)]
    resumed = run(daemon, tmp_path / "resumed", *command, limit_s=RAY_LIMIT_S)
    assert list(resumed) == [f"epoch {EPOCHS - 1}"]
    assert resumed[f"epoch {EPOCHS - 1}"] == [rank[3:] for rank in epochs[f"epoch {EPOCHS - 1}"]]
    jobs = shardcache("status", "--json", socket=daemon.socket).json["jobs"]
    assert {"first-run", "second-run"} <= {job["name"] for job in jobs}, jobs
