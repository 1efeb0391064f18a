"""Jobs in `status` and on the dashboard while waiting and after, and their log lines."""

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from shardcache_client.dataset import ShardDataset
from support.monitoring.dashboard import Page, live
from support.programs.daemon import Daemon, eventually
from support.programs.raw_session import RawSession
from support.shards.tars import make_tar, random_samples, write_shards
from support.stores.canary import GatedStore
from support.stores.faulty_s3 import FaultyS3
from support.stores.mischief import Mischief

PART_BYTES = 64 * 1024


def job(daemon: Daemon, name: str) -> dict[str, Any]:
    """Return what is told of a job; nothing while it is not known."""
    return next((row for row in daemon.status()["jobs"] if row["name"] == name), {})


async def test_a_slow_shard_shows_what_has_come_of_it(tmp_path: Path, faulty: FaultyS3) -> None:
    """Bytes are told as they come, long before the first part of the shard is whole."""
    body = make_tar(random_samples(4, {"bin": 9_000}))
    url = faulty.put("a.tar", body)
    faulty.fail(Mischief.STALL, key="a.tar")
    with (
        ThreadPoolExecutor(1) as thread,
        Daemon(tmp_path, "--stall-timeout-s", "300", env=faulty.env()) as daemon,
    ):

        def shown() -> None:
            with RawSession(daemon) as session:
                session.plan([url], [0])
                eventually(
                    lambda: (
                        [row["done_bytes"] for row in daemon.status()["transfers"]]
                        == [len(body) // 2]
                    )
                )

        await asyncio.get_running_loop().run_in_executor(thread, shown)


@pytest.mark.slow
def test_a_job_that_waits_for_the_network(tmp_path: Path) -> None:
    """Status and dashboard say for which shard it waits, and afterwards for how long."""
    with (
        GatedStore() as store,
        Daemon(tmp_path, "--part-size", str(PART_BYTES)) as daemon,
        live(daemon) as events,
    ):
        url = store.put("a.tar", make_tar(random_samples(50, {"bin": 9_000})))
        store.let("a.tar", 1)  # what tells size and version
        page = Page(events)
        dataset = ShardDataset(url, socket=daemon.socket, job="thirsty")
        thread = threading.Thread(target=lambda: list(dataset))
        thread.start()
        page.until(
            lambda: (
                [wait["reason"] for wait in page.moment["waits"]]
                == ["downloading from the object store"]
            )
        )
        (first,) = page.moment["waits"]
        assert first["job"] == "thirsty"
        assert first["url"] == url
        assert first["readers"] == 1
        assert page.lanes["thirsty"]["counts"]["fetching"][0] >= 1, "for this epoch, and the next"
        waiting = job(daemon, "thirsty")
        assert waiting["waiting_for"] == "downloading from the object store"
        assert waiting["waiting"] == 1
        assert waiting["ahead_s"] == 0.0
        assert waiting["shards_per_s"] == 0.0
        (transfer,) = daemon.status()["transfers"]
        assert transfer["class"] == "waiting"
        assert transfer["needed_in_s"] == 0.0
        assert transfer["waiters"] == 1
        eventually(lambda: [row["connections"] for row in daemon.status()["origins"]] == [8])
        page.until(lambda: page.moment["waits"][0]["for_s"] > first["for_s"])
        assert job(daemon, "thirsty")["waited_s"] > waiting["waited_s"], (
            "it counts while it goes on"
        )
        store.let("a.tar")
        thread.join()
        page.until(lambda: not page.moment["waits"])
        done = job(daemon, "thirsty")
        assert done["waiting"] == 0
        assert done["ahead_s"] is None
        assert done["shards_done"] == 1
        assert done["waited"]["network_s"] > 0
        assert sum(done["waited"].values()) == pytest.approx(done["waited_s"], abs=0.01)


def test_evicted_shards_that_are_fetched_again_are_counted(tmp_path: Path) -> None:
    """Two shards that take turns in a cache of one: each comes again after it went."""
    (tmp_path / "data").mkdir()
    urls = [f"file://{path}" for path in write_shards(tmp_path / "data", 2, 10, {"bin": 40_000})]
    with Daemon(tmp_path, capacity="500000") as daemon:
        for url in [*urls, *urls]:
            assert len(list(ShardDataset(url, socket=daemon.socket))) == 10
        daemon.await_publication()
        counters = daemon.status()["counters"]
    assert counters["evictions"] == 3
    assert counters["refetches"] == 2


# Lines in the log


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(
        tmp_path_factory.mktemp("d"), "--log-format", "json", "--log-level", "debug"
    ) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [f"file://{path}" for path in write_shards(tmp_path_factory.mktemp("shards"), 4, 4)]


def lines(daemon: Daemon, job: str, event: str) -> list[dict[str, Any]]:
    """Return the lines of one kind about a job."""
    logged = map(json.loads, daemon.log.read_text().splitlines())
    return [line for line in logged if line.get("job") == job and line["event"] == event]


def epochs(daemon: Daemon, job: str) -> list[int]:
    return [line["epoch"] for line in lines(daemon, job, "session started")]


@pytest.mark.slow
def test_an_epoch_is_one_line_however_many_workers_read_it(daemon: Daemon, urls: list[str]) -> None:
    """Two epochs of a DataLoader log two lines at info, and each connection at debug."""
    job = "train"
    dataset = ShardDataset(urls, socket=daemon.socket, job=job)
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    for epoch in range(2):
        dataset.set_epoch(epoch)
        assert len(list(loader)) == 16
    assert epochs(daemon, job) == [0, 1]
    line = lines(daemon, job, "session started")[0]
    assert line["level"] == "info"
    assert line["uid"] == 0
    assert line["workers"] == 2
    assert line["world_size"] == 1
    connected = lines(daemon, job, "reader connected")
    assert {line["worker"] for line in connected} == {0, 1}
    assert {line["level"] for line in connected} == {"debug"}


def test_an_epoch_that_goes_on_and_a_process_that_reads_nothing_are_no_lines(
    daemon: Daemon, urls: list[str]
) -> None:
    """A reader that replaces skipped samples declares the rest again, and resolving is debug."""
    with RawSession(daemon, job="again") as session:
        session.plan(urls, [0, 1])
        session.plan(urls, [2])
    with RawSession(daemon, job="looks", pid=4711) as session:
        assert session.ask("resolve", urls=urls)["type"] == "manifest"
    assert epochs(daemon, "again") == [0]
    assert epochs(daemon, "looks") == []
    assert [line["pid"] for line in lines(daemon, "looks", "reader connected")] == [4711]


def test_lines_name_job_and_shard(daemon: Daemon, urls: list[str]) -> None:
    """Each fetch, at level debug, has the job and the shard that it is for."""
    daemon.empty()
    assert len(list(ShardDataset(urls[1], socket=daemon.socket, job="loud"))) == 4
    daemon.await_publication()
    assert [line["shard"] for line in lines(daemon, "loud", "fetched")] == [urls[1]]


def test_an_error_names_job_and_shard(daemon: Daemon, urls: list[str], tmp_path: Path) -> None:
    """A shard not fetched ahead has a line with its job and its url without secrets."""
    cut = tmp_path / "cut.tar"
    cut.write_bytes(Path(urls[0].removeprefix("file://")).read_bytes()[:10_000])
    with RawSession(daemon, job="unlucky") as session:
        session.plan([urls[0], f"file://{cut}"], [0, 1])
        session.take(0)
        eventually(lambda: lines(daemon, "unlucky", "prefetch failed") != [])
    (line,) = lines(daemon, "unlucky", "prefetch failed")
    assert line["shard"] == f"file://{cut}"
    assert line["level"] == "warning"
    assert "url" not in line
    assert line["cause"]
