"""The log: one line for each epoch of a job, reading processes only at level debug, and the shards of other lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from shardcache_client import ShardDataset
from support.programs.daemon import Daemon, eventually
from support.programs.raw_session import RawSession
from support.shards.tars import write_shards

WORKERS = 2


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon for all tests here."""
    with Daemon(tmp_path_factory.mktemp("d"), "--log-format", "json", "--log-level", "debug") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The urls of some shards."""
    return [f"file://{path}" for path in write_shards(tmp_path_factory.mktemp("shards"), 4, 4)]


def lines(daemon: Daemon, job: str, event: str) -> list[dict[str, Any]]:
    """Return the lines of one kind about a job."""
    logged = map(json.loads, daemon.log.read_text().splitlines())
    return [line for line in logged if line.get("job") == job and line["event"] == event]


def epochs(daemon: Daemon, job: str) -> list[int]:
    """Return the epochs of a job's lines."""
    return [line["epoch"] for line in lines(daemon, job, "session started")]


@pytest.mark.parametrize("persistent", [False, True], ids=["new workers", "persistent workers"])
def test_an_epoch_is_one_line_however_many_workers_read_it(daemon: Daemon, urls: list[str], persistent: bool) -> None:
    """Two epochs of a DataLoader: two lines at info, with user and sizes; each worker's connection at debug."""
    job = f"train-{persistent}"
    dataset = ShardDataset(urls, socket=daemon.socket, job=job)
    loader = DataLoader(dataset, batch_size=None, num_workers=WORKERS, persistent_workers=persistent)
    for epoch in range(2):
        dataset.set_epoch(epoch)
        assert len(list(loader)) == 16
    assert epochs(daemon, job) == [0, 1]
    line = lines(daemon, job, "session started")[0]
    assert (line["level"], line["uid"], line["workers"], line["world_size"]) == ("info", 0, WORKERS, 1)
    connected = lines(daemon, job, "reader connected")
    assert {line["worker"] for line in connected} == {0, 1} and {line["level"] for line in connected} == {"debug"}


def test_ranks_share_a_line_and_a_new_run_has_its_own(daemon: Daemon, urls: list[str]) -> None:
    """A rank that comes later adds nothing, in the same epoch or the next; the same reader again is another run."""

    def read(rank: int, *numbers: int) -> None:
        with RawSession(daemon, job="ranks", rank=rank, worker=0) as session:
            for number in numbers:
                shards = [[urls[0], None, None, None]]
                assert session.ask("plan", epoch=number, shards=shards, order=[0], reads=1)["type"] == "ok"

    read(0, 0, 1)
    read(1, 0, 1)
    assert epochs(daemon, "ranks") == [0, 1]
    read(0, 0)
    assert epochs(daemon, "ranks") == [0, 1, 0]


def test_another_plan_in_an_epoch_is_no_line(daemon: Daemon, urls: list[str]) -> None:
    """A reader that replaces skipped samples declares the rest of its epoch again."""
    with RawSession(daemon, job="again") as session:
        session.plan(urls, [0, 1])
        session.plan(urls, [2])
    assert epochs(daemon, "again") == [0]


def test_a_process_that_reads_nothing_is_no_line(daemon: Daemon, urls: list[str]) -> None:
    """A connection that only resolves urls is at debug."""
    with RawSession(daemon, job="looks", pid=4711) as session:
        assert session.ask("resolve", urls=urls)["type"] == "manifest"
    assert epochs(daemon, "looks") == []
    assert [line["pid"] for line in lines(daemon, "looks", "reader connected")] == [4711]


def test_lines_name_job_and_shard(daemon: Daemon, urls: list[str]) -> None:
    """Each fetch, at level debug, has the job and the shard that it is for."""
    daemon.empty()
    assert len(list(ShardDataset(urls[1], socket=daemon.socket, job="loud"))) == 4
    assert [line["shard"] for line in lines(daemon, "loud", "fetched")] == [urls[1]]


def test_an_error_names_job_and_shard(daemon: Daemon, urls: list[str], tmp_path: Path) -> None:
    """A shard that could not be fetched ahead has a line with whose it is, its url without its secrets."""
    cut = tmp_path / "cut.tar"
    cut.write_bytes(Path(urls[0].removeprefix("file://")).read_bytes()[:10_000])
    with RawSession(daemon, job="unlucky") as session:
        session.plan([urls[0], f"file://{cut}"], [0, 1])
        session.take(0)
        eventually(lambda: lines(daemon, "unlucky", "prefetch failed") != [])
    (line,) = lines(daemon, "unlucky", "prefetch failed")
    assert (line["shard"], line["level"]) == (f"file://{cut}", "warning")
    assert "url" not in line and line["cause"]
