"""ShardDataset in one process and under DataLoader, against a real daemon."""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from shardcache.errors import ConfigError, NotFoundError
from shardcache_client.dataset import ShardDataset
from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S
from support.shards.reading import keys_of
from support.shards.tars import make_tar, random_samples, write_shards


def test_ranks_without_counts_are_refused_at_the_start(daemon: Daemon, folder: Path) -> None:
    """The error comes before any collective waits, and names what makes them equal."""
    (folder / "never-read.tar").write_bytes(make_tar(random_samples(4)))
    url = f"file://{folder}/never-read.tar"
    options: dict[str, Any] = {"socket": daemon.socket, "rank": 1, "world_size": 2}
    with pytest.raises(
        ConfigError, match=r"shardcache index[\s\S]*samples_per_epoch[\s\S]*even=None"
    ):
        iter(ShardDataset(url, **options))
    assert keys_of(ShardDataset(url, even=None, **options)) in (
        [],
        [f"{number:06d}" for number in range(4)],
    )


def sessions_of(daemon: Daemon, job: str) -> int:
    """Return how many readers of a job are connected."""
    return sum(each["sessions"] for each in daemon.status()["jobs"] if each["name"] == job)


def test_more_readers_than_uncounted_shards(
    daemon: Daemon, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole shards are dealt. Readers without one do not connect, and the job is told once."""
    source = folder / "few"
    source.mkdir()
    write_shards(source, 2, 3)
    options: dict[str, Any] = {"even": None, "socket": daemon.socket, "world_size": 5}
    ranks = [
        ShardDataset(f"file://{source}/", job=f"idle-{rank}", rank=rank, **options)
        for rank in range(5)
    ]
    read = [keys_of(rank) for rank in ranks]
    assert sorted(map(len, read)) == [0, 0, 0, 3, 3] == sorted(len(keys_of(rank)) for rank in ranks)
    for rank, keys in enumerate(read):
        assert bool(sessions_of(daemon, f"idle-{rank}")) == bool(keys)
    (told,) = [record.getMessage() for record in caplog.records]
    assert "2 of 2 shards were never counted" in told
    assert "3 of 5 workers get none" in told
    assert "shardcache index" in told


@pytest.mark.slow
def test_workers_end_with_a_killed_trainer(daemon: Daemon, urls: str) -> None:
    """SIGKILL of a trainer ends its workers and their leases, although their pipe is full."""
    ds = ShardDataset(urls, socket=daemon.socket, job="orphaned")
    context = multiprocessing.get_context("fork")
    started = context.Event()
    trainer = context.Process(target=_take_one_batch_and_stay, args=(ds, started))
    trainer.start()
    assert started.wait(GUARD_S)
    eventually(lambda: daemon.leases() > 0)
    trainer.kill()
    trainer.join()
    eventually(lambda: sessions_of(daemon, "orphaned") == 0)
    assert daemon.leases() == 0


def _take_one_batch_and_stay(ds: ShardDataset, started: Any) -> None:
    batches = iter(DataLoader(ds, batch_size=1, num_workers=2, collate_fn=_megabyte))
    next(batches)
    started.set()
    signal.pause()


def _megabyte(_samples: list[Any]) -> bytes:
    return bytes(1_000_000)


def test_an_iterator_dropped_midway(daemon: Daemon, urls: str, keys: list[str]) -> None:
    """Plan and leases go with the iterator, workers or not, and the next reads everything."""
    ds = ShardDataset(urls, socket=daemon.socket, job="dropped-alone")
    samples = iter(ds)
    next(samples)
    # The shard that is read; the next is kept by the plan alone.
    eventually(lambda: daemon.leases() == 1)
    del samples
    eventually(lambda: sessions_of(daemon, "dropped-alone") == 0)
    assert daemon.leases() == 0
    assert keys_of(ds) == keys


def test_a_fork_does_not_keep_its_parents_session(daemon: Daemon, urls: str) -> None:
    """A session ends with the process that opened it, though a forked child lives on."""
    ds = ShardDataset(urls, socket=daemon.socket, job="forked")
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    parent = context.Process(target=_read_one_and_fork, args=(ds, there))
    parent.start()
    child_pid = here.recv()
    try:
        parent.kill()
        parent.join()
        eventually(lambda: sessions_of(daemon, "forked") == 0)
        os.kill(child_pid, 0)
    finally:
        os.kill(child_pid, signal.SIGKILL)


def _read_one_and_fork(ds: ShardDataset, pipe: Any) -> None:
    samples = iter(ds)
    next(samples)
    child_pid = os.fork()
    if child_pid:
        pipe.send(child_pid)
    signal.pause()


@pytest.mark.parametrize(
    "url",
    [
        "shard-*.tar", "./shard-{000000..000007}.tar", "../source/", "../source", Path(),
        [Path("shard-000000.tar"), "shard-00000[1-7].tar"], "file:shard-*.tar", "file:../source/",
    ],
)  # fmt: skip
def test_local_paths_mean_the_working_folder(
    daemon: Daemon,
    urls: str,
    folder: Path,
    keys: list[str],
    monkeypatch: pytest.MonkeyPatch,
    url: Any,
) -> None:
    """Relative paths, globs, folders and `Path`s start at the training script's folder."""
    monkeypatch.chdir(folder / "source")
    assert keys_of(ShardDataset(url, socket=daemon.socket)) == keys


def test_a_missing_local_file_is_named_in_full(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says where a relative path was looked for, and `except IOError` catches it."""
    monkeypatch.chdir(tmp_path)
    for url in ("none.tar", "file:none.tar"):
        with pytest.raises(
            NotFoundError, match=f"{tmp_path}/none.tar: the file does not exist"
        ) as caught:
            keys_of(ShardDataset(url, socket=daemon.socket))
        assert isinstance(caught.value, FileNotFoundError)
        assert f"url='{tmp_path}/none.tar'" in repr(caught.value)
        assert f"ls {tmp_path}/" in caught.value.remedy
        assert "store" not in caught.value.remedy
    with pytest.raises(NotFoundError, match=f"{tmp_path}/none/: the folder does not exist"):
        ShardDataset("none/", socket=daemon.socket)
