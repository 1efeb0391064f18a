"""The frameworks' examples, with and without torch, by those projects' code on two processes."""

import json
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path

import pytest

from shardcache_client.dataset import ShardDataset
from support.network.ports import free_port
from support.programs.cli import shardcache
from support.programs.daemon import Daemon, eventually
from support.programs.examples import (
    BATCH,
    EPOCHS,
    LONG,
    RANKS,
    TRAINING,
    VALIDATION,
    Reports,
    check,
    check_epochs,
    check_rest,
    check_resumed,
    check_usage,
    counted_shards,
    run,
    run_ranks,
    start,
    torchrun,
)
from support.programs.guard import GUARD_S
from support.programs.processes import kill_tree
from support.stores.buckets import MotoS3

SHARDS = "s3://bucket/train/{0..6}.tar"
INDEX = "s3://bucket/train.json"
# TensorFlow takes a minute to import where the disk is cold.
LIMIT_S = 300
# Ray starts a dozen processes before the first of ours, and takes seconds for each checkpoint.
RAY_LIMIT_S = 900

LONG_KEYS = [f"{number:06d}" for number in range(sum(LONG))]

pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(3 * RAY_LIMIT_S)]


@pytest.fixture(scope="module")
def daemon(moto_server: MotoS3) -> Iterator[Daemon]:
    """A daemon with the shards in its store, their samples counted."""
    with counted_shards(moto_server) as it:
        yield it


def check_killed(
    daemon: Daemon,
    folder: Path,
    command: tuple[list[str], list[str]],
    checkpoint: Callable[[int], str],
) -> Reports:
    """Kill all processes of an example in its first epoch; go on with one from the last checkpoint.

    What the two ranks had been shown up to that, and what the one is shown, is every sample exactly
    once; the epochs after it are whole. Return what the one reported.

    Args:
        command: starts two ranks, and one.
        checkpoint: as for `check_resumed`.
    """
    saved = folder / "saved"
    steps = 9
    shards = ["s3://bucket/long/", "--validation", "s3://bucket/val/", "--checkpoints", str(saved)]
    ranks, alone = ([*each, *shards] for each in command)
    run_and_kill(daemon, folder / "killed", ranks, (saved / checkpoint(steps + 3)).exists)
    seen = first_samples(daemon, steps, num_workers=2)
    resumed = run(daemon, folder / "resumed", *alone, "--resume", str(saved / checkpoint(steps)))
    seen.update(chain.from_iterable(resumed["epoch 0 training"][0]))
    assert sorted(seen.elements()) == LONG_KEYS
    for epoch in range(1, EPOCHS):
        assert sorted(chain.from_iterable(resumed[f"epoch {epoch} training"][0])) == LONG_KEYS
        assert len(resumed[f"epoch {epoch} validation"][0]) == -(-sum(VALIDATION) // BATCH)
    return resumed


def run_and_kill(
    daemon: Daemon,
    out: Path,
    command: Sequence[str],
    due: Callable[[], bool],
    limit_s: float = GUARD_S,
) -> None:
    """Run an example until the kill is due within its first epoch; then kill all processes."""
    job = start(daemon, out, command)
    try:
        eventually(lambda: due() or job.poll() is not None, limit_s=limit_s, pause_s=0.005)
    finally:
        kill_tree(job.pid)
        said, _ = job.communicate()
    assert job.returncode == -signal.SIGKILL, said
    assert not out.exists(), "the first epoch was over before the kill"


def first_samples(daemon: Daemon, steps: int, *, num_workers: int) -> Counter[str]:
    """Return the keys that the examples give all ranks in first steps over long shards."""
    seen = Counter(
        key for rank in range(RANKS) for key in _first_keys(daemon, rank, steps, num_workers)
    )
    assert seen.total() == steps * BATCH * RANKS
    return seen


def _first_keys(daemon: Daemon, rank: int, steps: int, num_workers: int) -> list[str]:
    """Return the keys of the first batches that the examples' loaders give a rank."""
    dataset = ShardDataset(
        "s3://bucket/long/", shuffle=True, seed=7, rank=rank, world_size=RANKS, socket=daemon.socket
    )
    loader = dataset.loader(
        batch_size=BATCH, num_workers=num_workers, collate_fn=list, persistent_workers=False
    )
    return [sample["__key__"] for batch in islice(loader, steps) for sample in batch]


@pytest.mark.usefixtures("ray_env")
@pytest.mark.parametrize(
    "way", ["trainer", "ray", "jax", "tf_data", "dali", "datasets", "load_dataset"]
)
def test_usage_lines_work_as_they_stand(daemon: Daemon, tmp_path: Path, way: str) -> None:
    """With the file alone in a folder: the lines of its docstring, one after the other."""
    check_usage(daemon, tmp_path, f"with_{way}.py")


def test_trainer_trains_evaluates_predicts_and_resumes(daemon: Daemon, tmp_path: Path) -> None:
    """Three epochs, each evaluated, and all predictions. A run resumed in the second reads on."""
    epochs = check_resumed(daemon, tmp_path, torchrun("with_trainer.py"), "checkpoint-{}".format)
    samples = sum(VALIDATION)
    # Gathered: all of them on each rank.
    for predicted in map(chain.from_iterable, epochs["predicted"]):
        keys = list(predicted)
        assert len(keys) == samples + samples % 2
        assert sorted(set(keys)) == [f"{number:06d}" for number in range(samples)]


def test_one_process_of_trainer_resumes_where_two_were_killed_and_two_where_it_was(
    daemon: Daemon, tmp_path: Path
) -> None:
    """Training ends after as many steps, resumed within the first and the second epoch."""
    command = torchrun("with_trainer.py"), torchrun("with_trainer.py", ranks=1)
    alone = check_killed(daemon, tmp_path, command, "checkpoint-{}".format)
    saved = tmp_path / "saved"
    steps = -(-sum(LONG) // (BATCH * RANKS))
    assert (saved / f"checkpoint-{EPOCHS * steps}").exists()
    shutil.rmtree(saved / f"checkpoint-{EPOCHS * steps}")
    taken = 7
    command_of_two = [*command[0], "s3://bucket/long/", "--validation", "s3://bucket/val/"]
    checkpoints = [
        "--checkpoints",
        str(saved),
        "--resume",
        str(saved / f"checkpoint-{steps + taken}"),
    ]
    two = run(daemon, tmp_path / "two", *command_of_two, *checkpoints)
    assert "epoch 0 training" not in two
    seen = list(chain.from_iterable(alone["epoch 1 training"][0][: taken * RANKS]))
    seen += chain.from_iterable(chain.from_iterable(two["epoch 1 training"]))
    assert sorted(seen) == LONG_KEYS
    assert sorted(chain.from_iterable(chain.from_iterable(two["epoch 2 training"]))) == LONG_KEYS
    assert (saved / f"checkpoint-{EPOCHS * steps}").exists()


def test_one_process_of_accelerate_resumes_where_two_were_killed(
    daemon: Daemon, tmp_path: Path
) -> None:
    """Each sample of the epoch is shown exactly once up to the checkpoint and after it."""
    command = torchrun("with_accelerate.py"), torchrun("with_accelerate.py", ranks=1)
    check_killed(daemon, tmp_path, command, "step-{}".format)


def test_one_device_of_lightning_resumes_where_two_were_killed(
    daemon: Daemon, tmp_path: Path
) -> None:
    """Lightning gives rank 0's state to its only process."""
    command = ["with_lightning.py"], ["with_lightning.py", "--devices", "1"]
    check_killed(daemon, tmp_path, command, "epoch=0-step={}.ckpt".format)


@pytest.fixture
def ray_env(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Variables for Ray, with its own folder for sockets, as pytest's path may be too long."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with tempfile.TemporaryDirectory(
        prefix="shardcache-ray-", ignore_cleanup_errors=True
    ) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield


def ray_checkpoints(run_folder: Path) -> list[Path]:
    """Return the states in the checkpoints of a run, in order."""
    return sorted(run_folder.glob("checkpoint_*/state.pt"))


@pytest.mark.usefixtures("ray_env")
def test_ray_train_trains_and_resumes_under_its_own_name(daemon: Daemon, tmp_path: Path) -> None:
    """Three epochs, resumed from a checkpoint of the last; each run is listed by its name."""
    command = ["with_ray.py", "s3://bucket/train/", "--storage", str(tmp_path / "storage")]
    epochs = run(daemon, tmp_path / "out", *command, "--name", "first-run", limit_s=RAY_LIMIT_S)
    for epoch in range(EPOCHS):
        check(epochs[f"epoch {epoch}"], TRAINING)
    *_, saved = ray_checkpoints(tmp_path / "storage" / "first-run")
    command += ["--name", "second-run", "--resume", str(saved)]
    resumed = run(daemon, tmp_path / "resumed", *command, limit_s=RAY_LIMIT_S)
    assert list(resumed) == [f"epoch {EPOCHS - 1}"]
    assert resumed[f"epoch {EPOCHS - 1}"] == [rank[3:] for rank in epochs[f"epoch {EPOCHS - 1}"]]
    jobs = shardcache("status", "--json", socket=daemon.socket).json["jobs"]
    assert {"first-run", "second-run"} <= {job["name"] for job in jobs}, jobs


@pytest.mark.usefixtures("ray_env")
def test_one_worker_of_ray_train_resumes_where_two_were_killed(
    daemon: Daemon, tmp_path: Path
) -> None:
    """Ray's own processes are killed as well, and each sample of the epoch is shown once.

    The newest checkpoint may have been written only in part; the one before it is whole.
    """
    storage = tmp_path / "storage"
    command = ["with_ray.py", "s3://bucket/long/", "--storage", str(storage)]
    killed = [*command, "--name", "killed-run"]
    run_and_kill(
        daemon,
        tmp_path / "killed",
        killed,
        lambda: len(ray_checkpoints(storage / "killed-run")) > 1,
        RAY_LIMIT_S,
    )
    *whole, _ = ray_checkpoints(storage / "killed-run")
    command += ["--name", "resumed-run", "--workers", "1", "--resume", str(whole[-1])]
    resumed = run(daemon, tmp_path / "resumed", *command, limit_s=RAY_LIMIT_S)
    seen = first_samples(daemon, 3 + 20 * (len(whole) - 1), num_workers=1)
    seen.update(chain.from_iterable(resumed["epoch 0"][0]))
    assert sorted(seen.elements()) == LONG_KEYS
    for epoch in range(1, EPOCHS):
        assert sorted(chain.from_iterable(resumed[f"epoch {epoch}"][0])) == LONG_KEYS


# Without torch

Rank = tuple[Sequence[str], Mapping[str, str]]


def jax_ranks(*options: str) -> list[Rank]:
    """Return the commands of two processes with a coordinator on loopback."""
    common = [
        "with_jax.py",
        INDEX,
        "--coordinator",
        f"127.0.0.1:{free_port()}",
        "--processes",
        str(RANKS),
        *options,
    ]
    return [([*common, "--process", str(rank)], {"JAX_PLATFORMS": "cpu"}) for rank in range(RANKS)]


def tf_data_ranks(*options: str) -> list[Rank]:
    cluster = {"worker": [f"127.0.0.1:{free_port()}" for _ in range(RANKS)]}
    tasks = (
        {"cluster": cluster, "task": {"type": "worker", "index": rank}} for rank in range(RANKS)
    )
    return [
        (["with_tf_data.py", INDEX, *options], {"TF_CONFIG": json.dumps(task)}) for task in tasks
    ]


def dali_ranks(*options: str) -> list[Rank]:
    return [(["with_dali.py", INDEX, *options], launched(rank)) for rank in range(RANKS)]


def launched(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}


@pytest.mark.parametrize("ranks", [jax_ranks, tf_data_ranks, dali_ranks])
def test_every_sample_once_and_an_exact_resume(
    daemon: Daemon, tmp_path: Path, ranks: type[list[Rank]]
) -> None:
    """Three epochs differ in order, and a run resumed in the second has the next batch next."""
    epochs = run_ranks(daemon, tmp_path / "out", *ranks("--checkpoints", str(tmp_path)))
    check_epochs(epochs)
    saved = tmp_path / f"step-{len(epochs['epoch 0'][0]) + 3}.json"
    check_rest(epochs, run_ranks(daemon, tmp_path / "rest", *ranks("--resume", str(saved))), 3)


def test_datasets_shares_out_readers_and_resumes(daemon: Daemon, tmp_path: Path) -> None:
    """The same with two workers per process, to which datasets gives a reader each."""
    command = [*torchrun("with_datasets.py"), INDEX]
    epochs = run(
        daemon, tmp_path / "out", *command, "--checkpoints", str(tmp_path), limit_s=LIMIT_S
    )
    check_epochs(epochs, readers=2 * RANKS)
    rest = run(
        daemon,
        tmp_path / "rest",
        *command,
        "--resume",
        str(tmp_path / "epoch-1-step-3"),
        limit_s=LIMIT_S,
    )
    check_rest(epochs, rest, 3)


def test_load_dataset_reads_cached_tars(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The datasets package's reader gets every sample once, and releases the shards at the end."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    ranks = [(["with_load_dataset.py", SHARDS], launched(rank)) for rank in range(RANKS)]
    check_epochs(run_ranks(daemon, tmp_path / "out", *ranks), readers=1)
    assert daemon.leases() == 0
