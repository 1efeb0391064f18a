"""session.py: a shard that is granted in pieces, and a plan that is told in pieces."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from shardcache.errors import ShardChangedError, ShardTimeoutError
from shardcache.protocol import ShardRef
from shardcache_client.daemon.choice import DaemonChoice, Patience
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.session import Session
from shardcache_client.order.manifest import Plan
from support.network.peer import Peer, scripted
from support.programs.daemon import eventually

READER = ReaderIdentity("job")
SHARDS = tuple(ShardRef(f"s3://bucket/{number}.tar") for number in range(3))
PLAN = Plan(epoch=0, shards=SHARDS, order=(0, 1, 2), reads=3)
LONG = Plan(epoch=0, shards=SHARDS, order=(0, 1, 2) * 3_000, reads=9_000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a daemon would listen."""
    return tmp_path / "s.sock"


def open_session(path: Path, plan: Plan = PLAN, patience: Patience | None = None, *, partial: bool = True) -> Session:
    """Return a session that has declared a plan."""
    session = Session(DaemonChoice(path), READER, patience or Patience(), partial_reads=partial)
    session.declare(plan)
    return session


@pytest.mark.parametrize("partial", [True, False])
def test_daemon_knows_which_readers_take_arriving_shards(path: Path, partial: bool) -> None:
    """Each request for a shard says whether its beginning is welcome."""

    def script(peer: Peer) -> None:
        peer.begin()
        peer.grant(1)
        peer.stay()

    with scripted(path, script) as heard:
        session = open_session(path, partial=partial)
        session.wait(session.lease(0))
        session.close()
    assert heard[2]["partial"] is partial


def test_each_lease_may_say_for_itself_whether_a_beginning_will_do(path: Path) -> None:
    """A lease's version outranks the one that the session was told, after a break of the connection, too."""

    def first(peer: Peer) -> None:
        peer.begin()
        peer.hear()

    def second(peer: Peer) -> None:
        peer.begin()
        peer.grant(1)
        peer.stay()

    with scripted(path, first, second) as heard:
        session = open_session(path, partial=True)
        session.wait(session.lease(0, partial=False))
        session.close()
    assert [message["partial"] for message in heard if message["type"] == "lease"] == [False, False]


def test_more_is_asked_for_until_the_shard_is_whole(path: Path) -> None:
    """Each question names the lease and what is there already; what is granted last is what the lease holds."""

    def script(peer: Peer) -> None:
        peer.begin()
        peer.arrive(7, 1024)
        peer.arrive(7, 4096)
        peer.grant(7)
        peer.stay()

    with scripted(path, script) as heard:
        session = open_session(path)
        lease = session.lease(0)
        first = session.wait(lease)
        assert (first["type"], first["lease"]) == ("arriving", 7)
        second = session.more(lease, 1500)
        assert second is not None and second["type"] == "arriving"
        last = session.more(lease, 5000)
        assert last is not None and last["type"] == "leased"
        assert session.wait(lease) is last
        session.close()
    questions = [(message["lease"], message["beyond"]) for message in heard if message["type"] == "more"]
    assert questions == [(7, 1500), (7, 5000)]


def test_a_break_ends_what_was_granted(path: Path) -> None:
    """The old daemon's lease is not read on: the shard is asked for again, and the new one's word counts."""

    def first(peer: Peer) -> None:
        peer.begin()
        peer.arrive(7, 4096)
        peer.hear()

    def second(peer: Peer) -> None:
        peer.begin()
        peer.arrive(1, 1024)
        peer.grant(1)
        peer.stay()

    with scripted(path, first, second) as heard:
        session = open_session(path)
        lease = session.lease(0)
        session.wait(lease)
        assert session.more(lease, 5000) is None
        again = session.wait(lease)
        assert (again["type"], again["lease"]) == ("arriving", 1)
        assert session.more(lease, 2000) is not None
        session.close()
    assert [message["type"] for message in heard].count("lease") == 2
    assert heard[-1]["lease"] == 1


def test_a_new_daemons_numbers_are_the_ones_that_count(path: Path) -> None:
    """A shard that is still held when another daemon takes over is given back by the number which that one gave it."""

    def first(peer: Peer) -> None:
        peer.begin()
        peer.grant(7)
        peer.hear()

    def second(peer: Peer) -> None:
        peer.begin()
        peer.grant(32)
        peer.grant(31)
        peer.stay()

    with scripted(path, first, second) as heard:
        session = open_session(path)
        held, ahead = session.lease(0), session.lease(1)
        session.wait(held)
        session.wait(ahead)
        assert session.wait(held)["lease"] == 31
        session.release(held)
        eventually(lambda: heard[-1] == {"type": "release", "lease": 31})
        session.close()


def test_an_error_of_the_rest_ends_the_lease(path: Path) -> None:
    """The daemon's verdict on the rest is raised; there is nothing to give back then."""

    def script(peer: Peer) -> None:
        peer.begin()
        peer.arrive(7, 1024)
        peer.refuse(ShardChangedError("replaced", url=SHARDS[0].url))
        peer.grant(8)
        peer.stay()

    with scripted(path, script) as heard:
        session = open_session(path)
        lease = session.lease(0)
        session.wait(lease)
        with pytest.raises(ShardChangedError, match="replaced"):
            session.more(lease, 1500)
        session.release(lease)
        session.wait(session.lease(1))
        session.close()
    assert [message["type"] for message in heard] == ["hello", "plan", "lease", "more", "lease"]


def test_waiting_for_more_shows_in_the_log_and_ends(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As for a whole shard: the reason after a while, and an error when patience ends; the next connection is new."""

    def first(peer: Peer) -> None:
        peer.begin()
        peer.arrive(7, 1024)
        request = peer.hear()["id"]
        for _ in range(2):
            question = peer.hear()
            assert (question["type"], question["of"]) == ("explain", request)
            peer.say(type="waiting", id=question["id"], of=request, reason="downloading")
        peer.stay()

    def second(peer: Peer) -> None:
        peer.begin()
        peer.grant(1)
        peer.stay()

    with scripted(path, first, second), caplog.at_level(logging.WARNING, "shardcache"):
        session = open_session(path, patience=Patience(limit_s=3, first_report_s=0.05))
        lease = session.lease(0)
        session.wait(lease)
        with pytest.raises(ShardTimeoutError, match="downloading") as caught:
            session.more(lease, 1500)
        assert session.wait(session.lease(1))["type"] == "leased"
        session.close()
    assert caught.value.url == SHARDS[0].url
    assert SHARDS[0].url in caplog.text and "downloading" in caplog.text


def test_long_plan_is_sent_in_pieces_apart_from_the_shards(path: Path) -> None:
    """Only the first piece comes before the first shard is asked for; each further one is answered before the next."""

    def script(peer: Peer) -> None:
        peer.begin()
        peer.grant(1)
        for _ in range(2):
            peer.say(type="ok", id=peer.hear()["id"])
        peer.stay()

    with scripted(path, script) as heard:
        session = open_session(path, LONG)
        lease = session.lease(0)
        for _ in range(3):
            session.extend()
        session.wait(lease)
        session.close()
    assert [message["type"] for message in heard] == ["hello", "plan", "lease", "extend", "extend"]
    told = [message for message in heard if message["type"] in ("plan", "extend")]
    assert [len(message["order"]) for message in told] == [1_000, 4_000, 4_000]
    assert [index for message in told for index in message["order"]] == list(LONG.order)
    assert told[0]["reads"] == 9_000


def test_long_plan_is_resent_from_its_beginning_after_a_break(path: Path) -> None:
    """A connection that breaks between two pieces leaves no gap: the next daemon hears all that is still to be read."""

    def first(peer: Peer) -> None:
        peer.begin()
        peer.grant(1)
        peer.hear()
        peer.hear()  # a piece that this daemon takes to its grave

    def second(peer: Peer) -> None:
        peer.begin()
        peer.grant(1)
        for _ in range(2):
            peer.say(type="ok", id=peer.hear()["id"])
        peer.stay()

    with scripted(path, first, second) as heard:
        session = open_session(path, LONG)
        lease = session.lease(0)
        session.wait(lease)
        ahead = session.lease(1)
        session.extend()
        session.release(lease)
        session.wait(ahead)
        for _ in range(3):
            session.extend()
        session.close()
    again = [message["type"] for message in heard].index("hello", 1)
    told: list[dict[str, Any]] = [message for message in heard[again:] if message["type"] in ("plan", "extend")]
    assert [len(message["order"]) for message in told] == [1_000, 4_000, 3_999]
    assert told[0]["reads"] == 8_999


def test_plan_is_resent_as_far_as_there_are_leases_after_a_break(path: Path) -> None:
    """A shard that stayed in hand for thousands of others does not keep the newest from being asked for."""

    def first(peer: Peer) -> None:
        peer.begin()
        peer.grant(1)
        peer.hear()

    def second(peer: Peer) -> None:
        peer.begin()
        peer.say(type="ok", id=peer.hear()["id"])
        peer.grant(1)
        peer.grant(2)
        peer.stay()

    with scripted(path, first, second) as heard:
        session = open_session(path, LONG)
        session.wait(in_hand := session.lease(10))
        session.wait(session.lease(1_500))
        session.wait(in_hand)  # asked for behind the newest
        session.close()
    again = [message["type"] for message in heard].index("hello", 1)
    assert [message["type"] for message in heard[again:]] == ["hello", "plan", "extend", "lease", "lease"]
    assert [message["position"] for message in heard[again:] if message["type"] == "lease"] == [1_490, 0]


def test_a_daemon_that_does_not_answer_a_piece(path: Path) -> None:
    """Silence over a piece of the plan is as good as a lost connection: the next daemon is told of it anew."""

    def first(peer: Peer) -> None:
        peer.begin()
        peer.stay()

    def second(peer: Peer) -> None:
        peer.begin()
        peer.grant(1)
        peer.stay()

    with scripted(path, first, second) as heard:
        session = open_session(path, LONG, Patience(limit_s=3))
        session.extend()
        session.wait(session.lease(0))
        session.close()
    assert [message["type"] for message in heard] == ["hello", "plan", "extend", "hello", "plan", "lease"]
