"""The examples in docs/ run as they are: two ranks over shards of uneven sizes in S3, every sample once an epoch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from support.cli import clean_environment, shardcache
from support.daemon import Daemon
from support.moto_s3 import MotoS3
from support.tars import make_tar, random_samples

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
TRAINING = (5, 11, 3, 8, 1, 13, 6)
VALIDATION = (4, 7, 2)
BATCH = 4
EPOCHS = 3
RANKS = 2
LIMIT_S = 150

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LIMIT_S)]

Rank = list[list[str]]  # the keys of each of its batches


@pytest.fixture(scope="module")
def daemon(moto_server: MotoS3) -> Iterator[Daemon]:
    """A daemon with the shards in its store, their samples counted."""
    moto_server.make_bucket("ways-in")
    for name, counts in (("train", TRAINING), ("val", VALIDATION)):
        put_shards(moto_server, name, counts)
    with (
        tempfile.TemporaryDirectory(prefix="shardcache-ways-") as root,
        Daemon(Path(root), env=moto_server.env()) as it,
    ):
        assert shardcache("warm", "s3://ways-in/train/", "s3://ways-in/val/", socket=it.socket).code == 0
        yield it


def put_shards(server: MotoS3, name: str, counts: tuple[int, ...]) -> None:
    """Store shards with so many samples each: an image, and a class from 0 to 9."""
    for number, count in enumerate(counts):
        samples = random_samples(count, {"jpg": 100}, first=sum(counts[:number]))
        tar = make_tar([sample | {"cls": str(place % 10).encode()} for place, sample in enumerate(samples)])
        server.put("ways-in", f"{name}/{number}.tar", tar)


def run(daemon: Daemon, out: Path, *command: str) -> dict[str, list[Rank]]:
    """Run an example; return what it reported: by the report's name, what each rank was given."""
    job = subprocess.Popen(
        [sys.executable, *command, "--socket", str(daemon.socket), "--out", str(out)],
        cwd=EXAMPLES,
        env=clean_environment({"OMP_NUM_THREADS": "1"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = job.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        job.terminate()  # a launcher that is killed would leave its ranks behind
        said, _ = job.communicate()
    assert job.returncode == 0, said
    return {row["name"]: row["ranks"] for row in map(json.loads, out.read_text().splitlines())}


def torchrun(script: str, *, ranks: int = RANKS) -> list[str]:
    """Return the command that starts an example on all ranks."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", script]


def check(ranks: list[Rank], counts: tuple[int, ...]) -> None:
    """Hold an epoch against the promise: equal steps of equal sizes, every sample, and no more twice than must be."""
    assert len(ranks) == RANKS
    assert len({tuple(map(len, rank)) for rank in ranks}) == 1
    reads = Counter(chain.from_iterable(chain.from_iterable(ranks)))
    assert sorted(reads) == [f"{number:06d}" for number in range(sum(counts))]
    assert reads.total() - len(reads) == -sum(counts) % RANKS


@pytest.mark.parametrize("script", ["with_torchrun.py", "with_webdataset.py"])
def test_every_sample_once_and_equal_steps(daemon: Daemon, tmp_path: Path, script: str) -> None:
    """Three epochs, each in an order of its own."""
    epochs = run(daemon, tmp_path / "out", *torchrun(script), "s3://ways-in/train/{0..6}.tar")
    assert list(epochs) == [f"epoch {epoch}" for epoch in range(EPOCHS)]
    for ranks in epochs.values():
        check(ranks, TRAINING)
    assert epochs["epoch 0"] != epochs["epoch 1"] != epochs["epoch 2"]


def test_lightning_trains_validates_and_goes_on(daemon: Daemon, tmp_path: Path) -> None:
    """Three epochs under DDP; a run that is resumed within the second one is shown what the first was shown from there.

    Lightning saves the loader's state of rank 0 alone, and gives it to all ranks.
    """
    saved = tmp_path / "saved"
    command = ["with_lightning.py", "s3://ways-in/train/", "--validation", "s3://ways-in/val/"]
    epochs = run(daemon, tmp_path / "out", *command, "--checkpoints", str(saved))
    for epoch in range(EPOCHS):
        check(epochs[f"epoch {epoch} training"], TRAINING)
        check(epochs[f"epoch {epoch} validation"], VALIDATION)
    steps = len(epochs["epoch 0 training"][0])
    resumed = run(daemon, tmp_path / "resumed", *command, "--resume", str(saved / f"epoch=1-step={steps + 3}.ckpt"))
    assert "epoch 0 training" not in resumed
    assert resumed["epoch 1 training"] == [rank[3:] for rank in epochs["epoch 1 training"]]
    assert resumed["epoch 2 training"] == epochs["epoch 2 training"]


def test_accelerate_trains_validates_and_goes_on(daemon: Daemon, tmp_path: Path) -> None:
    """Three epochs on two processes; a run resumed from `save_state` within the second one reads on from there.

    Accelerate saves the states of rank 0 alone, and gives them to all ranks.
    """
    saved = tmp_path / "saved"
    command = [*torchrun("with_accelerate.py"), "s3://ways-in/train/", "--validation", "s3://ways-in/val/"]
    epochs = run(daemon, tmp_path / "out", *command, "--checkpoints", str(saved))
    for epoch in range(EPOCHS):
        check(epochs[f"epoch {epoch} training"], TRAINING)
        check(epochs[f"epoch {epoch} validation"], VALIDATION)
    steps = len(epochs["epoch 0 training"][0])
    resumed = run(daemon, tmp_path / "resumed", *command, "--resume", str(saved / f"step-{steps + 3}"))
    assert "epoch 0 training" not in resumed
    assert resumed["epoch 1 training"] == [rank[3:] for rank in epochs["epoch 1 training"]]
    assert resumed["epoch 2 training"] == epochs["epoch 2 training"]


def test_another_number_of_processes_reads_the_rest(daemon: Daemon, tmp_path: Path) -> None:
    """Two ranks of two workers stop after three steps; three ranks of one worker each read every other sample."""
    script, url, state = "with_stateful_dataloader.py", "s3://ways-in/train/", str(tmp_path / "state.pt")
    before = run(daemon, tmp_path / "before", *torchrun(script), url, "--stop-after=3", "--save", state)["read"]
    command = [*torchrun(script, ranks=3), url, "--resume", state, "--workers=1"]
    after = run(daemon, tmp_path / "after", *command)["read"]
    first, rest = (Counter(chain.from_iterable(chain.from_iterable(part))) for part in (before, after))
    assert first.total() == len(first) == RANKS * 3 * BATCH
    assert len(first | rest) == sum(TRAINING)
    assert len({tuple(map(len, rank)) for rank in after}) == 1
    assert rest.total() == -(-(sum(TRAINING) - len(first)) // 3) * 3
