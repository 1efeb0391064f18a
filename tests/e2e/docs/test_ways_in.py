"""The examples in docs/ run as they are: two ranks, uneven shards in S3, each sample once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.programs.daemon import Daemon
from support.programs.examples import (
    EPOCHS,
    RANKS,
    TRAINING,
    check,
    check_epochs,
    check_rest,
    check_resumed,
    check_usage,
    counted_shards,
    run,
    run_ranks,
    torchrun,
)
from support.stores.buckets import MotoS3

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def daemon(moto_server: MotoS3) -> Iterator[Daemon]:
    """A daemon with the shards in its store, their samples counted."""
    with counted_shards(moto_server) as it:
        yield it


@pytest.mark.parametrize(
    "way",
    [
        "torchrun",
        "webdataset",
        "lightning",
        "accelerate",
        "processes",
        "stateful_dataloader",
        "torchdata_nodes",
    ],
)
def test_usage_lines_work_as_they_stand(daemon: Daemon, tmp_path: Path, way: str) -> None:
    """With the file alone in a folder: the lines of its docstring, one after the other."""
    check_usage(daemon, tmp_path, f"with_{way}.py")


@pytest.mark.parametrize("script", ["with_torchrun.py", "with_webdataset.py"])
def test_every_sample_once_and_equal_steps(daemon: Daemon, tmp_path: Path, script: str) -> None:
    """Three epochs, each in an order of its own."""
    epochs = run(daemon, tmp_path / "out", *torchrun(script), "s3://bucket/train/{0..6}.tar")
    assert list(epochs) == [f"epoch {epoch}" for epoch in range(EPOCHS)]
    for ranks in epochs.values():
        check(ranks, TRAINING)
    assert epochs["epoch 0"] != epochs["epoch 1"] != epochs["epoch 2"]


def test_lightning_trains_validates_and_resumes(daemon: Daemon, tmp_path: Path) -> None:
    """Three epochs under DDP. A resumed run is shown what the first was shown from there.

    Lightning saves the loader's state of rank 0 alone, and gives it to all ranks.
    """
    check_resumed(daemon, tmp_path, ["with_lightning.py"], "epoch=1-step={}.ckpt".format)


def test_accelerate_trains_validates_and_resumes(daemon: Daemon, tmp_path: Path) -> None:
    """Three epochs on two processes. A run resumed from `save_state` reads on from there.

    Accelerate saves the states of rank 0 alone, and gives them to all ranks.
    """
    check_resumed(daemon, tmp_path, torchrun("with_accelerate.py"), "step-{}".format)


def test_nodes_of_torchdata_resume(daemon: Daemon, tmp_path: Path) -> None:
    """Three epochs through nodes that read ahead. All ranks resume with the very next batch."""
    command = [*torchrun("with_torchdata_nodes.py"), "s3://bucket/train.json"]
    epochs = run(daemon, tmp_path / "out", *command, "--checkpoints", str(tmp_path))
    check_epochs(epochs)
    saved = tmp_path / f"step-{len(epochs['epoch 0'][0]) + 3}.pt"
    check_rest(epochs, run(daemon, tmp_path / "rest", *command, "--resume", str(saved)), 3)


def test_processes_without_torch_read_in_turn_and_resume(daemon: Daemon, tmp_path: Path) -> None:
    """Two readers for each of two processes. Checkpoints resume with the next batch."""

    def ranks(*options: str) -> list[tuple[list[str], dict[str, str]]]:
        command = ["with_processes.py", "s3://bucket/train.json", *options]
        return [(command, {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}) for rank in range(RANKS)]

    epochs = run_ranks(daemon, tmp_path / "out", *ranks("--checkpoints", str(tmp_path)))
    check_epochs(epochs, readers=2 * RANKS)
    first, second = (len(epochs[f"epoch {epoch}"][0]) for epoch in (0, 1))
    for steps in (3, second - 1):
        rest = run_ranks(
            daemon,
            tmp_path / f"rest {steps}",
            *ranks("--resume", str(tmp_path / f"step-{first + steps}")),
        )
        check_rest(epochs, rest, steps)
