"""Readers that keep each other waiting for room are told within seconds, for any form."""

import gc
import gzip
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from shardcache.errors import CapacityError
from shardcache_client.dataset import ShardDataset
from support.programs.daemon import Daemon, eventually
from support.programs.raw_session import RawSession
from support.shards.tars import make_tar, random_samples, write_shards

SHARDS = 6
SAMPLES = 10
SIZES = {"bin": 40_000}
SHARD_BYTES = 500_000  # one shard, and what is set aside for its sidecar

HOURS_S = 7200.0  # of a reader's patience: far beyond what a test may take
# Longer than it takes until workers that keep their shards for each other are told so.
LONG_S = 5.0


def write_compressed(folder: Path, name: str, first: int) -> str:
    """Write a shard of samples that gzip makes a tenth of; return its url."""
    sizes = {ext: size // 10 for ext, size in SIZES.items()}
    samples = [
        {**sample, "txt": bytes(36_000)} for sample in random_samples(SAMPLES, sizes, first=first)
    ]
    path = folder / f"{name}.tar.gz"
    path.write_bytes(gzip.compress(make_tar(samples)))
    return f"file://{path}"


@pytest.fixture
def compressed(tmp_path: Path) -> list[str]:
    (tmp_path / "packed").mkdir()
    return [
        write_compressed(tmp_path / "packed", str(number), number * SAMPLES)
        for number in range(SHARDS)
    ]


@pytest.fixture
def plain(tmp_path: Path) -> list[str]:
    (tmp_path / "plain").mkdir()
    return [f"file://{path}" for path in write_shards(tmp_path / "plain", SHARDS, SAMPLES, SIZES)]


def waits_for_room(daemon: Daemon, url: str) -> bool:
    """Return whether a shard's transfer is told to wait for room."""
    stages = {row["url"]: row["stage"] for row in daemon.status()["transfers"]}
    return stages.get(url, "").startswith("waiting for space")


def hold_and_want(daemon: Daemon, session: RawSession, held: int, position: int) -> None:
    """Take the first shards of a plan in hand and wait for another."""
    for number in range(held):
        leases = daemon.leases()
        granted = session.take(number)
        # Between the grant and the news that it is needed, a shard may have given way to another. A
        # reader that then does not find the file asks again.
        while daemon.leases() == leases:
            session.send(type="release", lease=granted["lease"], read=False)
            granted = session.take(number)
    session.send(type="lease", id=99, position=position)
    session.send(type="need", of=99)


def test_need_and_no_more_than_that_makes_a_reader_wait(tmp_path: Path, plain: list[str]) -> None:
    """The page of jobs shows a reader as reading until it needs what it has asked for."""
    with (
        Daemon(tmp_path, capacity=str(SHARD_BYTES)) as daemon,
        RawSession(daemon) as holding,
        RawSession(daemon, job="waiting") as waiting,
    ):

        def waits() -> tuple[int, bool, list[int]]:
            status = daemon.status()
            (job,) = (job for job in status["jobs"] if job["name"] == "waiting")
            return (
                job["waiting"],
                job["waited_s"] > 0,
                [row["waiters"] for row in status["transfers"]],
            )

        holding.plan(plain, [0])
        holding.take(0)
        waiting.plan(plain, [1, 0])
        waiting.send(type="lease", id=50, position=0)
        eventually(lambda: waits() == (0, False, [1]))
        waiting.need(50)
        eventually(lambda: waits() == (1, True, [1]))

        def reason_of_wait() -> str:
            return str(waiting.ask("explain", of=50)["reason"])

        # It waits for the object's version first.
        eventually(lambda: "waiting for space" in reason_of_wait())
        reason = reason_of_wait()
        assert "the cache's capacity is 500.0 kB, 42" in reason
        assert "--capacity" in reason
        waiting.send(type="release", lease=50)
        eventually(lambda: waits()[0] == 0 and 1 not in waits()[2])
        assert waiting.take(1)["url"] == plain[0], "the request that was given up has no answer"


@pytest.mark.slow
def test_compressed_shard_without_room_delays_no_other(
    tmp_path: Path, compressed: list[str], plain: list[str]
) -> None:
    """The job whose own shards leave no room to inflate the next is told; others continue."""
    with (
        Daemon(tmp_path, capacity=str(3 * SHARD_BYTES)) as daemon,
        RawSession(daemon, job="greedy") as greedy,
        RawSession(daemon, job="packed") as packed,
        RawSession(daemon, job="plain") as modest,
    ):
        greedy.plan(compressed, [0, 1, 2, 3])
        packed.plan(compressed, [4])
        modest.plan(plain, [0])
        hold_and_want(daemon, greedy, 3, 3)
        hold_and_want(daemon, packed, 0, 0)
        hold_and_want(daemon, modest, 0, 0)
        error = greedy.receive()["error"]
        assert error["code"] == CapacityError.code
        assert error["url"] == compressed[3]
        assert "--capacity" in error["remedy"]
        greedy.close()
        assert packed.receive()["url"] == compressed[4]
        assert modest.receive()["url"] == plain[0]


@pytest.mark.slow
def test_compressed_shard_that_is_not_needed_yet_gives_way(
    tmp_path: Path, compressed: list[str], plain: list[str]
) -> None:
    """A shard inflated ahead gives up its space if a reader with nothing to read waits for that."""
    with (
        Daemon(tmp_path, capacity=str(2 * SHARD_BYTES + 200_000)) as daemon,
        RawSession(daemon, job="holds") as holding,
        RawSession(daemon, job="ahead") as ahead,
    ):
        holding.plan(plain, [0, 1, 2])
        holding.take(0)
        holding.take(1)
        ahead.plan(compressed, [0])
        eventually(lambda: waits_for_room(daemon, compressed[0]))
        hold_and_want(daemon, holding, 0, 2)
        assert holding.receive()["error"]["code"] == CapacityError.code, (
            "two in hand and a third do not fit"
        )
        holding.close()
        eventually(
            lambda: (
                [shard["url"] for shard in daemon.shards() if shard["url"] == compressed[0]] != []
            )
        )


@pytest.mark.slow
def test_workers_that_wait_for_each_other_get_a_deadlock_error(
    tmp_path: Path, plain: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker keeps the only room while the loader waits for the other, which has none."""
    # torch waits so long for a worker that itself waits for hours, and then ends it.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    with Daemon(tmp_path, capacity=str(SHARD_BYTES)) as daemon:
        dataset = ShardDataset(
            plain, shuffle=True, shuffle_window=0, socket=daemon.socket, timeout_s=HOURS_S
        )
        with pytest.raises(Exception, match="deadlock: ") as caught:
            list(DataLoader(dataset, batch_size=None, num_workers=2))
    assert "--capacity" in str(caught.value)
    del caught
    gc.collect()  # the loader


@pytest.mark.slow
def test_a_worker_with_few_batches_left_is_waited_for(tmp_path: Path, plain: list[str]) -> None:
    """A loader lets workers be some batches ahead, so a short shard is given back."""
    loader = {"loader": "one", "rank": 0, "batch_size": SAMPLES // 2}
    with (
        Daemon(tmp_path, capacity=str(SHARD_BYTES)) as daemon,
        RawSession(daemon, worker=0, **loader) as slow,
        RawSession(daemon, worker=1, **loader) as waiting,
    ):
        slow.plan(plain, [0])
        waiting.plan(plain, [1])
        held = slow.take(0)
        hold_and_want(daemon, waiting, 0, 0)
        eventually(lambda: daemon.status()["jobs"][0]["waited_s"] > LONG_S)
        slow.send(type="release", lease=held["lease"])
        assert waiting.receive()["url"] == plain[1]
