"""Jobs in `status`, while they wait and afterwards."""

from __future__ import annotations

import asyncio
import getpass
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shardcache_client import ShardDataset
from support.programs.cli import shardcache
from support.programs.daemon import Daemon, eventually
from support.programs.raw_session import RawSession
from support.shards.tars import make_tar, random_samples, write_shards
from support.stores.faulty_s3 import Fault, FaultyS3
from support.stores.gated_store import GatedStore

PART_BYTES = 64 * 1024


@pytest.fixture
def store() -> Iterator[GatedStore]:
    """A store that holds everything back."""
    with GatedStore() as running:
        yield running


def job(daemon: Daemon, name: str) -> dict[str, Any]:
    """Return what is told of a job; nothing while it is not known."""
    return next((row for row in daemon.status()["jobs"] if row["name"] == name), {})


async def test_a_slow_shard_shows_what_has_come_of_it(tmp_path: Path, faulty: FaultyS3) -> None:
    """Bytes are told as they come, long before the first part of the shard is whole."""
    body = make_tar(random_samples(4, {"bin": 9_000}))
    url = faulty.put("a.tar", body)
    faulty.fail("a.tar", Fault.STALL, times=1000)
    with ThreadPoolExecutor(1) as thread, Daemon(tmp_path, "--stall-timeout-s", "300", env=faulty.env()) as daemon:

        def shown() -> None:
            with RawSession(daemon) as session:
                session.plan([url], [0])
                eventually(lambda: [row["done_bytes"] for row in daemon.status()["transfers"]] == [len(body) // 2])

        await asyncio.get_running_loop().run_in_executor(thread, shown)


def test_a_job_that_waits_for_the_network(tmp_path: Path, store: GatedStore) -> None:
    """While it waits the page says for what and that nothing is ahead; afterwards how long, and its pace."""
    url = store.put("a.tar", make_tar(random_samples(50, {"bin": 9_000})))
    store.let("a.tar", 1)  # what tells size and version
    with Daemon(tmp_path, "--part-size", str(PART_BYTES)) as daemon:
        dataset = ShardDataset(url, socket=daemon.socket, job="thirsty")
        thread = threading.Thread(target=lambda: list(dataset))
        thread.start()
        eventually(lambda: job(daemon, "thirsty").get("waiting_for") == "downloading from the object store")
        waiting = job(daemon, "thirsty")
        assert (waiting["waiting"], waiting["ahead_s"], waiting["shards_per_s"]) == (1, 0.0, 0.0)
        (transfer,) = daemon.status()["transfers"]
        assert (transfer["class"], transfer["needed_in_s"], transfer["waiters"]) == ("waiting", 0.0, 1)
        eventually(lambda: [row["connections"] for row in daemon.status()["origins"]] == [8])
        assert job(daemon, "thirsty")["waited_s"] > waiting["waited_s"], "it counts while it goes on"
        store.let("a.tar")
        thread.join()
        done = job(daemon, "thirsty")
        assert (done["waiting"], done["ahead_s"], done["shards_done"]) == (0, None, 1)
        assert done["waited"]["network_s"] > 0
        assert sum(done["waited"].values()) == pytest.approx(done["waited_s"], abs=0.01)


def test_evicted_shards_that_are_fetched_again_are_counted(tmp_path: Path) -> None:
    """Two shards that take turns in a cache of one: each comes again after it went."""
    (tmp_path / "data").mkdir()
    urls = [f"file://{path}" for path in write_shards(tmp_path / "data", 2, 10, {"bin": 40_000})]
    with Daemon(tmp_path, capacity="500000") as daemon:
        for url in [*urls, *urls]:
            assert len(list(ShardDataset(url, socket=daemon.socket))) == 10
        counters = daemon.status()["counters"]
    assert (counters["evictions"], counters["refetches"]) == (3, 2)


def test_live_jobs_stand_before_ended_ones_with_their_users_name(tmp_path: Path) -> None:
    """Whichever joined first; so `status` begins with what is going on."""
    with Daemon(tmp_path) as daemon, RawSession(daemon, "long"):
        RawSession(daemon, "early").close()
        RawSession(daemon, "ended").close()
        with RawSession(daemon, "late"):
            eventually(lambda: [row["sessions"] for row in daemon.status()["jobs"]] == [1, 1, 0, 0])
            jobs = daemon.status()["jobs"]
            assert [row["name"] for row in jobs] == ["long", "late", "early", "ended"]
            assert {row["user"] for row in jobs} == {getpass.getuser()}
            shown = shardcache("status", socket=daemon.socket).out
    assert shown.index("late") < shown.index("early")
