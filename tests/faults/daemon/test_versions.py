"""A client and a daemon of different releases work together, or say clearly why they cannot."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache import __version__
from shardcache.errors import NoDaemonError, ShardcacheError, StoppingError, VersionMismatchError
from shardcache.shared.exceptions import from_json
from shardcache.shared.protocol import ShardRef
from shardcache.shared.versions import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    ProtocolRange,
    Release,
    agree,
)
from shardcache_client.daemon.choice import DaemonChoice
from shardcache_client.daemon.connection import DaemonConnection, ReaderIdentity
from shardcache_client.daemon.patience import Patience
from shardcache_client.daemon.session import Session
from shardcache_client.dataset import ShardDataset
from shardcache_client.order.shards.declared_plan import Plan
from shardcache_client.order.shards.manifest import Manifest
from support.network.peer import WELCOME, Peer, scripted
from support.programs.daemon import Daemon
from support.programs.guard import GUARD_S
from support.programs.raw_session import RawSession
from support.shards.tars import write_shards

SAMPLES = 4
READER = ReaderIdentity("job")
LATER = {"news": {"of": ["a", "later"]}, "release": 1}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon, and two shards."""
    folder = tmp_path_factory.mktemp("v")
    write_shards(folder, 2, SAMPLES)
    with Daemon(folder) as running:
        yield running


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a daemon's socket."""
    return tmp_path / "s.sock"


@st.composite
def spoken(draw: st.DrawFn) -> ProtocolRange:
    """Any range of versions."""
    oldest = draw(st.integers(1, 6))
    return ProtocolRange(oldest, draw(st.integers(oldest, 6)))


@given(spoken(), spoken())
def test_the_newest_that_both_speak_is_chosen(daemon: ProtocolRange, client: ProtocolRange) -> None:
    """It is the best that both know. Without one, whoever is behind has to be upgraded."""
    common = set(range(daemon.oldest, daemon.newest + 1)) & set(
        range(client.oldest, client.newest + 1)
    )
    if common:
        assert agree(daemon=Release("1", daemon), client=Release("2", client)) == max(common)
        return
    with pytest.raises(VersionMismatchError) as caught:
        agree(daemon=Release("1.0", daemon), client=Release("2.0", client))
    behind = "2.0 on the node" if daemon.newest < client.oldest else "1.0 in the training image"
    assert behind in caught.value.remedy
    assert "1.0" in caught.value.message
    assert "2.0" in caught.value.message


def test_a_newer_client_that_still_speaks_ours_is_served(daemon: Daemon) -> None:
    """The latest common version is spoken, and the welcome names it."""
    with RawSession(
        daemon, protocol=PROTOCOL_VERSION + 4, oldest_protocol=PROTOCOL_VERSION
    ) as session:
        assert session.welcome["protocol"] == PROTOCOL_VERSION
        session.plan([f"file://{daemon.root}/shard-000000.tar"], [0])
        assert session.take(0)["samples"] == SAMPLES


@pytest.mark.parametrize(
    ("speaks", "behind"),
    [
        (
            {"protocol": PROTOCOL_VERSION + 2, "oldest_protocol": PROTOCOL_VERSION + 1},
            "shardcache 7.8 on the node",
        ),
        ({"protocol": PROTOCOL_VERSION + 2}, "shardcache 7.8 on the node"),
        (
            {"protocol": OLDEST_PROTOCOL_VERSION - 1},
            f"shardcache {__version__} in the training image",
        ),
    ],
)
def test_client_without_a_common_version_gets_an_error(
    daemon: Daemon, speaks: dict[str, int], behind: str
) -> None:
    """The error names both releases, and which of them to upgrade."""
    with RawSession(daemon, client_version="7.8", **speaks) as session:
        error = from_json(session.welcome["error"])
    assert isinstance(error, VersionMismatchError)
    assert "7.8" in error.message
    assert __version__ in error.message
    assert behind in error.remedy


def test_a_daemon_that_welcomes_in_another_version(path: Path) -> None:
    """A daemon from before there was a choice is recognised by its welcome."""

    def script(peer: Peer) -> None:
        peer.hear()
        peer.say(**(WELCOME | {"protocol": OLDEST_PROTOCOL_VERSION - 1, "version": "0.0.9"}))
        peer.stay()

    with scripted(path, script), pytest.raises(VersionMismatchError, match=r"0\.0\.9") as caught:
        DaemonConnection(path, READER, time.monotonic() + GUARD_S)
    assert f"shardcache {__version__} on the node" in caught.value.remedy


def test_unknown_fields_mean_nothing_to_the_daemon(daemon: Daemon) -> None:
    """Every message may carry more than this release knows of."""
    url = f"file://{daemon.root}/shard-000001.tar"
    with RawSession(daemon, **LATER) as session:
        assert session.ask("resolve", urls=[url], **LATER)["type"] == "manifest"
        assert session.plan([url], [0], **LATER)["type"] == "ok"
        assert session.ask("extend", order=[0], **LATER)["type"] == "ok"
        granted = session.take(0, **LATER)
        assert granted["type"] == "leased"
        session.send(type="release", lease=granted["lease"], **LATER)
        session.settle()
    assert daemon.leases() == 0


def test_additions_of_a_later_daemon_are_ignored(path: Path) -> None:
    """Fields and messages that this client does not know change nothing of what it does know."""

    def script(peer: Peer) -> None:
        peer.hear()
        peer.say(**(WELCOME | LATER | {"version": "9.9"}))
        peer.say(type="ok", id=peer.hear()["id"], **LATER)
        request = peer.hear()["id"]
        peer.say(type="weather", id=None, **LATER)
        peer.say(type="weather", id=4711, **LATER)
        peer.lend(request, 1, url="s3://bucket/0.tar", **LATER)
        peer.stay()

    with scripted(path, script):
        session = Session(DaemonChoice(path), READER, Patience(limit_s=GUARD_S))
        session.declare(Plan.of(Manifest.of([ShardRef("s3://bucket/0.tar")]), 0, [0]))
        assert session.wait(session.lease(0))["url"] == "s3://bucket/0.tar"
        session.close()


def test_an_unknown_error_is_taken_for_the_nearest_that_is_known() -> None:
    """An error's class, and whether a retry may help, outlive a code that only one side knows."""
    sent = StoppingError("soon", url="s3://bucket/0.tar").to_json()
    assert type(from_json(sent)) is StoppingError
    nearest = from_json(
        sent
        | {"code": "of a later release"}
        | {"parents": ["another", "no_daemon", "daemon", "error"]}
    )
    assert type(nearest) is NoDaemonError
    assert nearest.retryable
    assert nearest.message == "soon"
    assert nearest.url == "s3://bucket/0.tar"
    assert nearest.remedy == sent["remedy"]
    assert type(from_json({"code": "of a later release", "message": "no"})) is ShardcacheError


def test_a_mismatch_reaches_the_script_at_once(path: Path) -> None:
    """A version that does not fit is no daemon to be waited for: nobody asks a second time."""

    def script(peer: Peer) -> None:
        peer.hear()
        peer.say(
            type="error", id=None, error=VersionMismatchError("too old", remedy="upgrade").to_json()
        )

    with scripted(path, script) as heard, pytest.raises(VersionMismatchError, match="too old"):
        ShardDataset("s3://bucket/0.tar", socket=path, timeout_s=GUARD_S)
    assert len(heard) == 1
