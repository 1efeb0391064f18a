"""session.py: plan and leases as they are sent, waited for, and sent again to the next daemon."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shardcache.errors import CapacityError, NoDaemonError, ShardTimeoutError
from shardcache.shared.protocol import ShardRef, parse
from shardcache_client.daemon.choice import DaemonChoice
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.patience import Deadline, Patience
from shardcache_client.daemon.session import Session
from shardcache_client.order.shards.declared_plan import Plan
from shardcache_client.order.shards.manifest import Manifest
from support.network.peer import (
    Heard,
    Json,
    Peer,
    Script,
    Step,
    accepted,
    arriving,
    begun,
    granted,
    refused,
    scripted,
    welcomed,
)
from support.programs.daemon import eventually

MANIFEST = Manifest.of(ShardRef(f"s3://bucket/{number}.tar") for number in range(3))
PLAN = Plan.of(MANIFEST, 0, [0, 1, 2], lambda: [2, 1, 0])
LONG = Plan.of(MANIFEST, 0, [0, 1, 2] * 3_000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a daemon's socket."""
    return tmp_path / "s.sock"


@contextmanager
def session_with(
    path: Path, *scripts: Script, plan: Plan = PLAN, partial: bool = False, **patience: float
) -> Iterator[tuple[Session, Heard]]:
    """Serve by scripts; yield a session that has declared a plan, and what is heard of it."""
    with scripted(path, *scripts) as heard:
        session = Session(
            DaemonChoice(path), ReaderIdentity("job"), Patience(**patience), partial_reads=partial
        )
        session.declare(plan)
        yield session, heard
        session.close()


def needed(peer: Peer) -> int:
    """Return what the client says that it needs, which has to be its next message, and note it."""
    message = parse(peer.websocket.recv())
    assert message["type"] == "need", message
    peer.heard.needs.append(message["of"])
    return peer.heard.needs[-1]


def explaining(reason: str, **fields: Any) -> Step:
    """Return the step that hears the question for the reason of a wait, and answers it."""

    def explain(peer: Peer) -> None:
        question = peer.hear()
        assert question["type"] == "explain"
        peer.say(type="waiting", id=question["id"], of=question["of"], reason=reason, **fields)

    return explain


def kinds(heard: list[Json]) -> list[str]:
    """Return the types of messages."""
    return [message["type"] for message in heard]


def after_the_break(heard: list[Json]) -> list[Json]:
    """Return the messages to the second daemon."""
    return heard[kinds(heard).index("hello", 1) :]


def test_a_shard_is_needed_when_it_is_waited_for(path: Path) -> None:
    """Asking ahead says nothing of need; waiting says it before anything else, and once."""

    def script(peer: Peer) -> None:
        first = peer.hear()["id"]
        ahead = peer.hear()["id"]
        assert needed(peer) == first
        for request, lease in ((first, 7), (ahead, 8)):
            peer.lend(request, lease)
        assert peer.hear() == {"type": "release", "lease": 7}
        assert needed(peer) == ahead

    with session_with(path, begun(script)) as (session, heard):
        first = session.lease(0)
        ahead = session.lease(1)
        assert session.wait(first) is session.wait(first)
        session.release(first)
        session.wait(ahead)
        session.wait(ahead)
        eventually(lambda: len(heard.needs) == 2)
    assert kinds(heard) == ["hello", "plan", "lease", "lease", "release"]
    assert heard[1]["order"] == [0, 1, 2, 2, 1, 0]
    assert heard[1]["reads"] == 3
    assert [message["position"] for message in heard[2:4]] == [0, 1]
    assert len(heard.needs) == 2


def test_a_shard_may_be_given_back_before_it_has_come(path: Path) -> None:
    """A shard no longer wanted goes back under its request's id; the next is served as ever."""

    def withdrawn(peer: Peer) -> None:
        request = peer.hear()["id"]
        assert peer.hear() == {"type": "release", "lease": request}

    with session_with(path, begun(withdrawn, granted(1, url=MANIFEST[1].url))) as (session, _):
        session.release(session.lease(0))
        assert session.wait(session.lease(1))["url"] == MANIFEST[1].url


def test_the_next_plan_goes_over_the_same_connection(path: Path) -> None:
    """A session that is kept between epochs greets once."""
    with session_with(path, begun(accepted)) as (session, heard):
        session.declare(Plan.of(MANIFEST, 1, [2, 1, 0]))
    assert kinds(heard) == ["hello", "plan", "plan"]


def test_more_of_a_shard_from_before_a_break_is_not_asked_for(path: Path) -> None:
    """A grant ends with its connection, also if another shard's wait has opened the next one."""

    def second(peer: Peer) -> None:
        request = peer.hear()["id"]
        peer.lend(request, request)

    with session_with(
        path, begun(arriving(1, 5_000), Peer.hear, stays=False), begun(second), partial=True
    ) as (
        session,
        _,
    ):
        first = session.lease(0)
        session.wait(first)
        session.wait(session.lease(1))
        assert session.more(first, 5_000) is None


def test_leases_are_taken_again_after_a_break(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The plan is sent from the oldest lease on, and each is requested, the newest first."""

    def second(peer: Peer) -> None:
        asked = [peer.hear() for _ in range(4)]
        assert [message["position"] for message in asked] == [4, 3, 2, 0]
        peer.lend(asked[1]["id"], 1)
        assert peer.hear() == {"type": "release", "lease": asked[3]["id"]}
        assert peer.heard.needs[-3:] == [message["id"] for message in asked[1:]]

    plan = Plan.of(MANIFEST, 0, [2, 0, 1, 2, 0, 1], lambda: [0])
    first = begun(granted(0), granted(1), granted(2), Peer.hear, stays=False)
    with session_with(path, first, begun(second), plan=plan) as (session, heard):
        hand = [session.lease(position) for position in range(1, 4)]
        for lease in hand:
            session.wait(lease)
        session.release(hand.pop(1))
        session.lease(5)
        session.wait(session.lease(4))
        session.release(hand[0])
        eventually(lambda: heard[-1]["type"] == "release" and kinds(heard).count("hello") == 2)
    again = after_the_break(heard)[1]
    assert again["reads"] == 5
    assert again["order"] == [0, 1, 2, 0, 1, 0]
    assert "retrying for up to" in caplog.text


def test_patience_with_an_absent_daemon_ends(path: Path) -> None:
    """A daemon that does not come back is NoDaemonError once the time is over."""
    session = Session(DaemonChoice(path), ReaderIdentity("job"), Patience(limit_s=0.4))
    with scripted(path, begun(stays=False)):
        session.declare(PLAN)
    lease = session.lease(0)
    with pytest.raises(NoDaemonError, match=r"no daemon listens .*; gave up after 0\.\d s"):
        session.wait(lease)


@pytest.mark.slow
def test_a_shard_that_does_not_come(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log has the daemon's reason after a while, then the error, with shard and remedy.

    The next wait asks over a new connection, without the lost shard.
    """
    arrives = explaining("downloading", done_bytes=3_000_000, total_bytes=64_000_000)
    first = begun(Peer.hear, arrives, explaining("waiting for space in the cache"))
    scripts = first, begun(granted(1, url=MANIFEST[1].url))
    caplog.set_level(logging.WARNING, "shardcache")
    with session_with(path, *scripts, limit_s=3, first_report_s=0.05) as (session, heard):
        with pytest.raises(
            ShardTimeoutError,
            match="no more of it arrived within 3 s: waiting for space in the cache",
        ) as caught:
            session.wait(session.lease(0))
        line = caplog.records[0].getMessage()
        assert session.wait(session.lease(1))["url"] == MANIFEST[1].url
    assert MANIFEST[0].url in line
    assert "downloading (3 of 64 MB)" in line
    assert caught.value.url == MANIFEST[0].url
    assert "timeout_s" in caught.value.remedy
    assert [message["of"] for message in heard if message["type"] == "explain"] == [
        heard[2]["id"]
    ] * 2
    assert [message["reads"] for message in heard if message["type"] == "plan"] == [3, 2]


def test_wait_lasts_as_long_as_bytes_arrive() -> None:
    """The limit counts from the last time when there were more of them."""
    done = iter(range(1, 8))
    asked = threading.Event()

    def poll(until_s: float) -> None:
        asked.wait(max(0.0, until_s - time.monotonic()))

    with pytest.raises(ShardTimeoutError, match=r"no more of it arrived within 0\.01 s: slow"):
        Patience().wait("s3://b/a", Deadline(0.01), poll, lambda _: ("slow", next(done, 7)), None)
    assert next(done, None) is None


def unknown(peer: Peer) -> None:
    peer.say(type="unknown", id=peer.hear()["id"])


@pytest.mark.parametrize(
    "steps", [(refused(CapacityError("raise its")),), (unknown, unknown, accepted, unknown)]
)
def test_a_plan_that_is_refused(path: Path, steps: tuple[Step, ...]) -> None:
    """A refusal or an instant loss of a plan is raised, not asked for again."""
    with pytest.raises(CapacityError, match="raise its"), session_with(path, welcomed(*steps)):
        pass


def test_each_lease_says_whether_a_beginning_will_do(path: Path) -> None:
    """A lease's own wish outranks that of the session, after a break of the connection, too."""
    scripts = begun(granted(0), Peer.hear, stays=False), begun(granted(1), granted(2))
    with session_with(path, *scripts, partial=True) as (session, heard):
        session.wait(session.lease(0))
        session.wait(session.lease(1, partial=False))
        eventually(lambda: kinds(heard).count("lease") == 4)
    asked = [
        [each["partial"] for each in some if each["type"] == "lease"]
        for some in (heard, after_the_break(heard))
    ]
    assert asked == [[True, False, False, True], [False, True]]  # the newest first


# A plan that is sent in pieces


def sends_a_piece(session: Session, heard: list[Json]) -> int:
    """Have the session send the next piece if it may; return how many have been heard."""
    session.extend()
    return kinds(heard).count("extend")


def test_long_plan_is_sent_in_pieces_apart_from_the_shards(path: Path) -> None:
    """Only the first piece precedes the first request; each further one waits for an answer."""
    with session_with(path, begun(granted(1), accepted, accepted), plan=LONG) as (session, heard):
        session.wait(session.lease(0))
        eventually(lambda: sends_a_piece(session, heard) == 2)
        session.extend()
    assert kinds(heard) == ["hello", "plan", "lease", "extend", "extend"]
    pieces = [message for message in heard if message["type"] in ("plan", "extend")]
    assert [len(message["order"]) for message in pieces] == [1_000, 4_000, 4_000]
    assert [index for message in pieces for index in message["order"]] == list(LONG.order)
    assert pieces[0]["reads"] == 9_000


def test_long_plan_is_resent_from_its_beginning_after_a_break(path: Path) -> None:
    """A break between two pieces leaves no gap: the next daemon hears all of the rest."""
    scripts = (
        begun(granted(1), Peer.hear, Peer.hear, stays=False),
        begun(granted(1), accepted, accepted),
    )
    with session_with(path, *scripts, plan=LONG) as (session, heard):
        lease = session.lease(0)
        session.wait(lease)
        ahead = session.lease(1)
        session.extend()
        session.release(lease)
        session.wait(ahead)
        eventually(lambda: sends_a_piece(session, heard) == 3)
    pieces: list[dict[str, Any]] = [
        each for each in after_the_break(heard) if each["type"] in ("plan", "extend")
    ]
    assert [len(message["order"]) for message in pieces] == [1_000, 4_000, 3_999]
    assert pieces[0]["reads"] == 8_999


def test_plan_is_resent_as_far_as_there_are_leases_after_a_break(path: Path) -> None:
    """A shard kept for thousands of others does not stop requests for the newest."""
    scripts = begun(granted(1), Peer.hear, stays=False), begun(accepted, granted(1), granted(2))
    with session_with(path, *scripts, plan=LONG) as (session, heard):
        in_hand = session.lease(10)
        session.wait(in_hand)
        session.wait(session.lease(1_500))
        session.wait(in_hand)  # asked for behind the newest
    again = after_the_break(heard)
    assert kinds(again) == ["hello", "plan", "extend", "lease", "lease"]
    assert [message["position"] for message in again if message["type"] == "lease"] == [1_490, 0]


def test_piece_that_is_not_accepted_holds_up_no_reader(path: Path) -> None:
    """Shards are granted while the daemon accepts no piece, and no further piece is sent."""
    with session_with(path, begun(Peer.hear, granted(1)), plan=LONG) as (session, heard):
        session.extend()
        session.extend()
        session.wait(session.lease(0))
        session.extend()
    assert kinds(heard) == ["hello", "plan", "extend", "lease"]
