"""session.py: plan and leases as they are told, waited for, and told again to the next daemon."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from shardcache.errors import AccessDeniedError, DaemonError, NoDaemonError, ShardTimeoutError
from shardcache.protocol import ShardRef
from shardcache_client.daemon.choice import DaemonChoice, Patience
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.session import Session
from shardcache_client.order.manifest import Plan
from support.network.peer import Json, Peer, scripted
from support.programs.daemon import eventually

READER = ReaderIdentity("job")
SHARDS = tuple(ShardRef(f"s3://bucket/{number}.tar") for number in range(3))
PLAN = Plan(epoch=0, shards=SHARDS, order=(0, 1, 2, 2, 1, 0), reads=3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a daemon would listen."""
    return tmp_path / "s.sock"


def kinds(heard: list[Json]) -> list[str]:
    """Return the types of messages."""
    return [message["type"] for message in heard]


def test_a_shard_is_asked_for_waited_for_and_given_back(path: Path) -> None:
    """The lease goes back under the name that the daemon gave it."""

    def script(peer: Peer) -> None:
        peer.begin()
        peer.grant(77, url=SHARDS[1].url)
        peer.stay()

    with scripted(path, script) as heard:
        session = Session(DaemonChoice(path), READER, Patience())
        session.declare(PLAN)
        lease = session.lease(1)
        assert session.wait(lease)["url"] == SHARDS[1].url
        session.release(lease)
        eventually(lambda: len(heard) == 4)  # the peer's library may drop what it has queued when the client closes
        session.close()
    assert kinds(heard) == ["hello", "plan", "lease", "release"]
    assert heard[1]["order"] == [0, 1, 2, 2, 1, 0] and heard[1]["reads"] == 3
    assert heard[2]["position"] == 1
    assert heard[3]["lease"] == 77


def test_a_shard_is_needed_when_it_is_waited_for(path: Path) -> None:
    """Asking ahead says nothing of need; waiting says it before anything else, and once."""

    def script(peer: Peer) -> None:
        peer.begin()
        first, ahead = peer.hear()["id"], peer.hear()["id"]
        assert peer.hear_need() == first
        for request, lease in ((first, 7), (ahead, 8)):
            peer.lend(request, lease)
        assert peer.hear() == {"type": "release", "lease": 7}
        assert peer.hear_need() == ahead
        peer.stay()

    with scripted(path, script) as heard:
        session = Session(DaemonChoice(path), READER, Patience())
        session.declare(PLAN)
        first, ahead = session.lease(0), session.lease(1)
        assert session.wait(first) is session.wait(first)
        session.release(first)
        session.wait(ahead)
        session.wait(ahead)
        eventually(lambda: len(heard.needs) == 2)
        session.close()
    assert kinds(heard) == ["hello", "plan", "lease", "lease", "release"]
    assert len(heard.needs) == 2


def test_a_shard_may_be_given_back_before_it_has_come(path: Path) -> None:
    """A shard no longer wanted goes back under its request's id; the next is served as ever."""

    def script(peer: Peer) -> None:
        peer.begin()
        request = peer.hear()["id"]
        assert peer.hear() == {"type": "release", "lease": request}
        peer.grant(1, url=SHARDS[1].url)
        peer.stay()

    with scripted(path, script):
        session = Session(DaemonChoice(path), READER, Patience())
        session.declare(PLAN)
        session.release(session.lease(0))
        assert session.wait(session.lease(1))["url"] == SHARDS[1].url
        session.close()


def test_the_next_plan_goes_over_the_same_connection(path: Path) -> None:
    """A session that is kept between epochs greets once."""

    def script(peer: Peer) -> None:
        peer.begin()
        peer.say(type="ok", id=peer.hear()["id"])
        peer.stay()

    with scripted(path, script) as heard:
        session = Session(DaemonChoice(path), READER, Patience())
        session.declare(PLAN)
        session.declare(Plan(epoch=1, shards=SHARDS, order=(2, 1, 0), reads=3))
        session.close()
    assert kinds(heard) == ["hello", "plan", "plan"]


def test_after_a_break_the_plan_begins_where_we_are(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The next daemon is told what is still to be read, and leases that were asked for are asked for again."""

    def first(peer: Peer) -> None:
        peer.begin()
        peer.grant(1, url=SHARDS[0].url)
        peer.hear()  # the lease of position 1, which this daemon takes to its grave

    def second(peer: Peer) -> None:
        peer.begin()
        peer.grant(1, url=SHARDS[1].url)
        peer.grant(2, url=SHARDS[2].url)
        peer.stay()

    with scripted(path, first, second) as heard:
        session = Session(DaemonChoice(path), READER, Patience())
        session.declare(PLAN)
        lease = session.lease(0)
        session.wait(lease)
        ahead = session.lease(1)
        session.release(lease)
        assert session.wait(ahead)["url"] == SHARDS[1].url
        last = session.lease(2)
        assert session.wait(last)["url"] == SHARDS[2].url
        session.close()
    again = next(i for i, message in enumerate(heard) if i and message["type"] == "hello")
    assert heard[again + 1]["reads"] == 2
    assert [row[0] for row in heard[again + 1]["shards"]] == [SHARDS[number].url for number in (1, 2, 0)]
    assert heard[again + 1]["order"] == [0, 1, 1, 0, 2]
    assert [message["position"] for message in heard[again + 2 :]] == [0, 1]
    assert "retrying for up to" in caplog.text


def test_after_a_break_all_that_is_in_hand_is_taken_again(path: Path) -> None:
    """From the oldest in hand on the plan is told, and each is asked for, the newest first; what is ahead stays so."""

    def first(peer: Peer) -> None:
        peer.begin()
        for position in range(3):
            peer.grant(position)
        peer.hear()  # a release, which this daemon takes to its grave

    def second(peer: Peer) -> None:
        peer.begin()
        asked = [peer.hear() for _ in range(4)]
        assert [message["position"] for message in asked] == [4, 3, 2, 0]
        peer.lend(asked[1]["id"], 1)
        assert peer.hear() == {"type": "release", "lease": asked[3]["id"]}
        assert heard.needs[-3:] == [message["id"] for message in asked[1:]]
        peer.stay()

    with scripted(path, first, second) as heard:
        session = Session(DaemonChoice(path), READER, Patience())
        session.declare(Plan(epoch=0, shards=SHARDS, order=(2, 0, 1, 2, 0, 1, 0), reads=6))
        hand = [session.lease(position) for position in range(1, 4)]
        for lease in hand:
            session.wait(lease)
        session.release(hand.pop(1))
        session.lease(5)
        session.wait(session.lease(4))
        session.release(hand[0])
        eventually(lambda: heard[-1]["type"] == "release" and kinds(heard).count("hello") == 2)
        session.close()
    plan = [message for message in heard if message["type"] == "plan"][1]
    assert plan["reads"] == 5
    assert [SHARDS.index(ShardRef(plan["shards"][index][0])) for index in plan["order"]] == [0, 1, 2, 0, 1, 0]


def test_patience_with_an_absent_daemon_ends(path: Path) -> None:
    """A daemon that does not come back is NoDaemonError once the time is over."""

    def script(peer: Peer) -> None:
        peer.begin()

    session = Session(DaemonChoice(path), READER, Patience(limit_s=0.4))
    with scripted(path, script):
        session.declare(PLAN)
    lease = session.lease(0)
    with pytest.raises(NoDaemonError, match="no daemon listens"):
        session.wait(lease)


def test_waiting_shows_in_the_log(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The line names the shard, the daemon's reason and how far the transfer is."""

    def script(peer: Peer) -> None:
        peer.begin()
        request = peer.hear()["id"]
        question = peer.hear()
        assert (question["type"], question["of"]) == ("explain", request)
        peer.say(
            type="waiting",
            id=question["id"],
            of=request,
            reason="downloading",
            done_bytes=3_000_000,
            total_bytes=64_000_000,
        )
        peer.lend(request, 1)
        peer.stay()

    with scripted(path, script), caplog.at_level(logging.WARNING, "shardcache"):
        session = Session(DaemonChoice(path), READER, Patience(first_report_s=0.05))
        session.declare(PLAN)
        session.wait(session.lease(0))
        session.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert SHARDS[0].url in line
    assert "downloading (3 of 64 MB)" in line


def test_a_shard_that_does_not_come(path: Path) -> None:
    """The error names shard, cause and remedy; the next wait asks over a new connection, without the lost one."""

    def first(peer: Peer) -> None:
        peer.begin()
        peer.hear()
        question = peer.hear()
        peer.say(type="waiting", id=question["id"], of=question["of"], reason="waiting for space in the cache")
        peer.stay()

    def second(peer: Peer) -> None:
        peer.begin()
        peer.grant(1, url=SHARDS[1].url)
        peer.stay()

    with scripted(path, first, second) as heard:
        session = Session(DaemonChoice(path), READER, Patience(limit_s=3))
        session.declare(PLAN)
        with pytest.raises(ShardTimeoutError, match="within 3 s: waiting for space in the cache") as caught:
            session.wait(session.lease(0))
        assert session.wait(session.lease(1))["url"] == SHARDS[1].url
        session.close()
    assert caught.value.url == SHARDS[0].url
    assert "timeout_s" in caught.value.remedy
    assert [message["reads"] for message in heard if message["type"] == "plan"] == [3, 2]


def test_an_error_ends_its_lease_alone(path: Path) -> None:
    """The daemon's error for one shard is raised as it is; the next shard comes over the same connection."""

    def script(peer: Peer) -> None:
        peer.begin()
        peer.refuse(AccessDeniedError("403", url=SHARDS[0].url))
        peer.grant(1, url=SHARDS[1].url)
        peer.stay()

    with scripted(path, script) as heard:
        session = Session(DaemonChoice(path), READER, Patience())
        session.declare(PLAN)
        with pytest.raises(AccessDeniedError):
            session.wait(session.lease(0))
        assert session.wait(session.lease(1))["url"] == SHARDS[1].url
        session.close()
    assert kinds(heard) == ["hello", "plan", "lease", "lease"]


def test_a_plan_that_is_refused(path: Path) -> None:
    """The daemon's verdict on a plan is raised, not asked for again."""

    def script(peer: Peer) -> None:
        peer.welcome()
        peer.refuse(DaemonError("no such plan"))
        peer.stay()

    with scripted(path, script):
        session = Session(DaemonChoice(path), READER, Patience())
        with pytest.raises(DaemonError, match="no such plan"):
            session.declare(PLAN)
        session.close()
