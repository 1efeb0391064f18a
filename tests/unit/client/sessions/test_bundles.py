"""Many ranges by one message, or message by message to a daemon that takes no others."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from shardcache.shared.announced_range import MAX_ANNOUNCED
from shardcache.shared.protocol import MAX_BUNDLED, ShardRef
from shardcache_client.daemon.choice import DaemonChoice
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.patience import Patience
from shardcache_client.daemon.session import Session
from shardcache_client.order.shards.declared_plan import Plan
from shardcache_client.order.shards.manifest import Manifest
from support.network.peer import WELCOME, Heard, Json, Peer, Script, accepted, scripted
from support.programs.daemon import eventually

RANGES = [(0, (0, 10)), (2, (30, 40)), (0, (50, 60))]
PLAN = Plan.of(
    Manifest.of(ShardRef(f"s3://bucket/{number}.tar") for number in range(3)),
    0,
    range(3),
    wanted="ranges",
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a daemon's socket."""
    return tmp_path / "s.sock"


@contextmanager
def session_with(path: Path, script: Script) -> Iterator[tuple[Session, Heard]]:
    """Serve by a script; yield a session with a declared plan of ranges, and what it says."""
    with scripted(path, script) as heard:
        session = Session(DaemonChoice(path), ReaderIdentity("job"), Patience())
        session.declare(PLAN)
        yield session, heard
        session.close()


def begin(peer: Peer, *, bundles: bool) -> None:
    """Welcome a reader, and accept its plan."""
    peer.hear()
    peer.say(**(WELCOME | ({"bundles": True} if bundles else {})))
    accepted(peer)


def arriving(request: int) -> Json:
    """Return the grant of a range."""
    place = {
        "url": "s3://bucket/a.tar",
        "version": "v1",
        "path": "/nowhere.part",
        "size_bytes": 100,
    }
    return {
        "type": "arriving",
        "id": request,
        "lease": request,
        "ready_bytes": 0,
        "inode": 1,
        **place,
    }


def leased(message: Json) -> tuple[int, int, int]:
    """Return what a message asks for: position, and start and end of the bytes."""
    assert message["type"] == "lease"
    return message["position"], message["start"], message["beyond"] + 1


def test_ranges_are_requested_by_one_message(path: Path) -> None:
    """The first range's need goes along; releases go with the next requests."""

    def script(peer: Peer) -> None:
        begin(peer, bundles=True)
        asked = peer.hear()["messages"]
        peer.say(type="bundle", messages=[arriving(message["id"]) for message in asked])
        peer.stay()

    with session_with(path, script) as (session, heard):
        leases = session.lease_ranges(RANGES, needed=True)
        for lease in leases:
            assert session.wait(lease)["lease"] == lease.number
            session.release_later(lease)
        session.lease_ranges(RANGES[:1], needed=True)
        eventually(lambda: len(heard) == 4)
    first, second = heard[2:4]
    assert [leased(message) for message in first["messages"]] == [
        (0, 0, 10),
        (2, 30, 40),
        (0, 50, 60),
    ]
    assert [message.get("needed", False) for message in first["messages"]] == [True, False, False]
    assert [message["type"] for message in second["messages"]] == ["release"] * 3 + ["lease"]
    assert [message["lease"] for message in second["messages"][:3]] == [
        lease.number for lease in leases
    ]
    assert heard.needs == []


def test_daemon_of_an_earlier_release_gets_each_message(path: Path) -> None:
    """Each request by itself, with its need."""

    def script(peer: Peer) -> None:
        begin(peer, bundles=False)
        asked = [peer.hear() for _ in RANGES]
        for message in asked:
            peer.say(**arriving(message["id"]))
        peer.stay()

    with session_with(path, script) as (session, heard):
        leases = session.lease_ranges(RANGES, needed=True)
        for lease in leases:
            session.wait(lease)
            session.release_later(lease)
        session.flush()
        eventually(lambda: len(heard) == 8)
    assert [leased(message) for message in heard[2:5]] == [(0, 0, 10), (2, 30, 40), (0, 50, 60)]
    # A need of the others follows unless they came before they were waited for.
    assert heard.needs[0] == leases[0].number
    assert [message["type"] for message in heard[5:]] == ["release"] * 3


def test_releases_go_out_before_a_wait(path: Path) -> None:
    """The awaited shard may have no space until the releases have arrived."""

    def script(peer: Peer) -> None:
        begin(peer, bundles=True)
        first, second = peer.hear()["messages"]
        peer.say(**arriving(first["id"]))
        assert peer.hear() == {"type": "release", "lease": first["id"]}
        peer.say(**arriving(second["id"]))
        peer.stay()

    with session_with(path, script) as (session, _):
        first, second = session.lease_ranges(RANGES[:2], needed=True)
        session.wait(first)
        session.release_later(first)
        assert session.wait(second)["lease"] == second.number


def test_granted_range_needs_no_need(path: Path) -> None:
    """A range that came before it was waited for costs no further message."""

    def script(peer: Peer) -> None:
        begin(peer, bundles=True)
        asked = peer.hear()["messages"]
        peer.say(type="bundle", messages=[arriving(message["id"]) for message in asked])
        peer.stay()

    with session_with(path, script) as (session, heard):
        leases = session.lease_ranges(RANGES, needed=False)
        for lease in leases:
            session.wait(lease)
    assert heard.needs in ([leases[0].number], [])  # the first may have come by then as well


def test_releases_that_were_put_off_are_sent_before_the_next_plan(path: Path) -> None:
    """The daemon would keep the ranges of an epoch for as long as the session lasts."""

    def script(peer: Peer) -> None:
        begin(peer, bundles=True)
        peer.say(**arriving(peer.hear()["id"]))
        assert peer.hear()["type"] == "release"
        accepted(peer)
        peer.stay()

    with session_with(path, script) as (session, heard):
        (lease,) = session.lease_ranges(RANGES[:1], needed=False)
        session.wait(lease)
        session.release_later(lease)
        session.declare(replace(PLAN, epoch=1))
    assert [message["type"] for message in heard] == ["hello", "plan", "lease", "release", "plan"]


def test_more_messages_than_a_bundle_may_have_are_several_bundles(path: Path) -> None:
    """Samples whose members lie apart have several ranges each."""

    def script(peer: Peer) -> None:
        begin(peer, bundles=True)
        peer.stay()

    ranges = [(0, (number, number + 1)) for number in range(MAX_BUNDLED + 5)]
    with session_with(path, script) as (session, heard):
        session.lease_ranges(ranges, needed=False)
        eventually(lambda: len(heard) == 4)
    assert [len(message["messages"]) for message in heard[2:]] == [MAX_BUNDLED, 5]


def test_more_ranges_than_a_message_may_announce_are_several_messages(path: Path) -> None:
    """Only the first of them begins another order."""

    def script(peer: Peer) -> None:
        peer.hear()
        peer.say(**WELCOME, range_plans=True)
        accepted(peer)
        peer.stay()

    numbers = list(range(MAX_ANNOUNCED + 2))
    ranges = [field for number in numbers for field in (number, 0, number, number)]
    with session_with(path, script) as (session, heard):
        session.plan_ranges(ranges, begins=True)
        eventually(lambda: len(heard) == 4)
    announced = heard[2:]
    assert [message["type"] for message in announced] == ["plan_ranges"] * 2
    assert [message["begins"] for message in announced] == [True, False]
    assert announced[0]["ranges"] + announced[1]["ranges"] == ranges
    assert len(announced[1]["ranges"]) == 4 * 2
