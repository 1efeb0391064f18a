"""Readers that have several shards in hand: what a small cache can do for them, and what becomes of all they hold."""

import os
from pathlib import Path

import pytest

from shardcache.errors import CapacityError
from shardcache.protocol import ShardRef
from shardcache_client.daemon.choice import DaemonChoice, Patience
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.session import Session
from shardcache_client.order.manifest import Plan
from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S
from support.programs.raw_session import RawSession
from support.shards.tars import write_shards

SHARDS = 12
SHARD_BYTES = 500_000  # one shard, and what is set aside for its sidecar
WINDOW = 3


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    """The dataset."""
    (tmp_path / "data").mkdir()
    return [f"file://{path}" for path in write_shards(tmp_path / "data", SHARDS, 10, {"bin": 40_000})]


def waits_for_space(daemon: Daemon) -> bool:
    """Return whether there is one transfer, for a reader that waits, and it waits for space."""
    transfers = daemon.status()["transfers"]
    return [(row["class"], row["stage"]) for row in transfers] == [("waiting", "waiting for space in the cache")]


def test_readers_that_wait_for_each_others_shards_get_an_error(tmp_path: Path, urls: list[str]) -> None:
    """The last to come gets an error that says how much would be enough; when it leaves, the other continues."""
    with (
        Daemon(tmp_path, capacity=str(4 * SHARD_BYTES)) as daemon,
        RawSession(daemon, job="first") as first,
        RawSession(daemon, job="second") as second,
    ):
        for session, order in ((first, [0, 1, 4]), (second, [2, 3, 5])):
            session.plan(urls, order)
            session.take(0)
            session.take(1)
        for session in (first, second):
            session.send(type="lease", id=99, position=2)
            session.send(type="need", of=99)
            if session is first:
                eventually(lambda: waits_for_space(daemon))
        error = second.receive()["error"]
        assert (error["code"], error["url"]) == (CapacityError.code, urls[5])
        assert "readers x (shuffle_window + 1) shards" in error["remedy"]
        second.close()
        assert first.receive()["url"] == urls[4]


def test_need_and_no_more_than_that_makes_a_reader_wait(tmp_path: Path, urls: list[str]) -> None:
    """Asking leaves it reading, as the page of jobs sees it; needing does not; giving up what was asked ends it."""
    with (
        Daemon(tmp_path, capacity=str(SHARD_BYTES)) as daemon,
        RawSession(daemon) as holding,
        RawSession(daemon, job="waiting") as waiting,
    ):

        def waits() -> tuple[int, bool, list[int]]:
            status = daemon.status()
            (job,) = (job for job in status["jobs"] if job["name"] == "waiting")
            return job["waiting"], job["waited_s"] > 0, [row["waiters"] for row in status["transfers"]]

        holding.plan(urls, [0])
        holding.take(0)
        waiting.plan(urls, [1, 0])
        waiting.send(type="lease", id=50, position=0)
        eventually(lambda: waits() == (0, False, [1]))
        waiting.need(50)
        eventually(lambda: waits() == (1, True, [1]))
        reason = waiting.ask("explain", of=50)["reason"]
        assert "the cache's capacity is 500.0 kB, 42" in reason and "--capacity" in reason
        waiting.send(type="release", lease=50)
        eventually(lambda: waits()[0] == 0 and 1 not in waits()[2])
        assert waiting.take(1)["url"] == urls[0], "the request that was given up has no answer"


def test_all_leases_are_held_again_after_a_restart(tmp_path: Path, urls: list[str]) -> None:
    """Files stay readable meanwhile, and each can be given back to the new daemon, in whichever order."""
    with Daemon(tmp_path) as daemon:
        session = Session(DaemonChoice(daemon.socket), ReaderIdentity("job"), Patience(limit_s=GUARD_S))
        session.declare(Plan(0, tuple(map(ShardRef, urls)), tuple(range(SHARDS)), SHARDS))
        hand = [session.lease(position) for position in range(2, 2 + WINDOW)]
        files = [os.open(session.wait(lease)["path"], os.O_RDONLY) for lease in hand]
        ahead = session.lease(6)
        session.wait(hand[0])
        daemon.restart()
        assert [os.read(file, 10**7) for file in files] == [Path(url[7:]).read_bytes() for url in urls[2 : 2 + WINDOW]]
        needed = session.lease(5)
        assert session.wait(needed)["url"] == urls[5]
        eventually(lambda: in_use(daemon) == set(urls[2:6]))
        assert session.wait(ahead)["url"] == urls[6]
        for file in files:
            os.close(file)
        for lease in (hand[1], needed, hand[0], hand[2]):
            session.release(lease)
        eventually(lambda: in_use(daemon) == {urls[6]})
        session.close()
        eventually(lambda: not in_use(daemon))


def in_use(daemon: Daemon) -> set[str]:
    """Return the shards that are pinned."""
    return {shard["url"] for shard in daemon.shards() if shard["leases"]}
