"""Many readers that come and go as rudely as they can: nothing wrong is served, and nothing of them is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from campaign import load
from campaign.harness import QUICK
from support.programs.daemon import Daemon, eventually
from support.programs.raw_session import RawSession
from support.shards.tars import make_tar, random_samples
from support.stores.canary import GatedStore

MANY = 40
MANIFEST = "s3://bucket/{00000..09999}.tar"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon of one test."""
    with Daemon(tmp_path) as running:
        yield running


@pytest.fixture
def closed() -> Iterator[list[str]]:
    """Shards of which the store tells that they are there, and gives no byte."""
    with GatedStore() as store:
        yield [store.put(f"{number}.tar", make_tar(random_samples(1))) for number in range(MANY)]


@pytest.mark.slow
def test_rude_readers_leave_nothing(tmp_path: Path) -> None:
    """Killed, frozen, torn off, deaf or half open, before a store that fails: no wrong byte, and nothing stays."""
    with load.ground(tmp_path, QUICK) as results:
        for row in load.ROWS[:-1]:  # the last is of time, which is the campaign's to judge
            row.check(results)


def test_answers_for_a_reader_that_never_listens_are_not_buffered(daemon: Daemon) -> None:
    """A reader that never listens has one answer waiting for it, not hundreds, and others are answered meanwhile."""
    with RawSession(daemon, "other") as other, RawSession(daemon, "deaf") as deaf:
        other.ask("resolve", urls=[MANIFEST])
        before_bytes = daemon.status()["process"]["rss_bytes"]
        for number in range(400):
            deaf.send(type="resolve", id=number, urls=[MANIFEST])
        for _ in range(5):
            assert len(other.ask("resolve", urls=[MANIFEST])["shards"]) == 10_000
        # All answers together are 160 MB.
        assert daemon.status()["process"]["rss_bytes"] - before_bytes < 80_000_000
    eventually(lambda: daemon.sessions() == 0)


def test_need_of_one_shard_is_handled_during_a_wait_for_many(daemon: Daemon, closed: list[str]) -> None:
    """However many shards a reader has asked for ahead, it is heard when it says that one of them is needed."""
    with RawSession(daemon) as session:
        session.plan(closed, list(range(MANY)))
        for position in range(MANY):
            session.send(type="lease", id=100 + position, position=position)
        session.send(type="need", of=100)
        eventually(lambda: [job["waiting"] for job in daemon.status()["jobs"]] == [1])


def test_a_reader_that_dies_waiting_for_many_shards_leaves_nothing(daemon: Daemon, closed: list[str]) -> None:
    """Its plan ends with it, though not one of the shards that it waits for can come."""
    session = RawSession(daemon)
    session.plan(closed, list(range(MANY)))
    for position in range(MANY):
        session.send(type="lease", id=100 + position, position=position)
    session.settle()
    session.close()
    eventually(lambda: daemon.sessions() == 0)


def test_tasks_and_descriptors_go_with_their_sessions(daemon: Daemon) -> None:
    """Status tells what the process holds; each session takes at least one of both, and gives it back."""
    with ExitStack() as sessions:
        for _ in range(MANY):
            sessions.enter_context(RawSession(daemon))
        during = daemon.status()["process"]
    for kind in ("fds", "tasks"):
        eventually(lambda kind=kind: daemon.status()["process"][kind] <= during[kind] - MANY)


def test_a_job_is_called_something_that_can_be_shown(daemon: Daemon) -> None:
    """Names are kept and shown after their job has gone, so they are no place for megabytes."""
    session = RawSession(daemon, "j" * 1_000_000)
    assert session.welcome["error"]["code"] == "protocol"
    assert "the limit is 255" in session.welcome["error"]["message"]
    assert daemon.status()["jobs"] == []
