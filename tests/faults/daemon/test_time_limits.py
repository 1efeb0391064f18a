"""A wait for a daemon that does not answer ends at its limit, and says how long it was.

Steps that had limits of their own took 5, 10 or 60 seconds on top. The bounds here are far above
the limits that the waits are given, and below what these steps took.
"""

import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from shardcache.errors import NoDaemonError, ShardTimeoutError
from shardcache.shared.protocol import ShardRef
from shardcache_client.daemon.choice import DaemonChoice
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.patience import Patience
from shardcache_client.daemon.session import Session
from shardcache_client.dataset import ShardDataset
from shardcache_client.files.paths import cached_paths
from shardcache_client.order.shards.declared_plan import Plan
from shardcache_client.order.shards.manifest import Manifest
from support.cases import first_quick
from support.network.peer import Heard, Peer, Script, begun, scripted, welcomed
from support.programs.daemon import Daemon
from support.shards.tars import write_shards

LIMIT_S = 0.5
PAUSE_S = 0.05
PLAN = Plan.of(Manifest.of([ShardRef("s3://bucket/0.tar")]), 0, [0])


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="shardcache-t-") as name:
        yield Path(name)


@contextmanager
def lasts_less_than(bound_s: float) -> Iterator[None]:
    """Check that the block does not last as long as a step that ignores the limit.

    Counted are the pauses of a thread of this process: on a loaded machine, they last as much
    longer as the block does.
    """
    ended = threading.Event()
    pauses: list[None] = []

    def count() -> None:
        while not ended.wait(PAUSE_S):
            pauses.append(None)

    counting = threading.Thread(target=count)
    counting.start()
    try:
        yield
    finally:
        ended.set()
        counting.join()
    assert len(pauses) * PAUSE_S < bound_s


@contextmanager
def session_at(path: Path, *scripts: Script) -> Iterator[tuple[Session, Heard]]:
    """Serve by scripts; yield a session that has declared its plan and is not patient."""
    with scripted(path, *scripts) as heard:
        session = Session(DaemonChoice(path), ReaderIdentity("job"), Patience(LIMIT_S))
        session.declare(PLAN)
        yield session, heard
        session.close()


def silent(peer: Peer) -> None:
    """Shake hands, and say nothing."""
    peer.stay()


@pytest.mark.slow
def test_unanswered_question_for_the_reason_ends_with_the_wait(folder: Path) -> None:
    """A daemon that does not answer, nor say why, is given up at the limit, and named."""
    with session_at(folder / "s.sock", begun()) as (session, heard):
        lease = session.lease(0)
        late = r"did not arrive within 0\.5 s: the daemon does not answer"
        with lasts_less_than(5.0), pytest.raises(ShardTimeoutError, match=late):
            session.wait(lease)
    assert heard[-1]["type"] == "explain"


@pytest.mark.parametrize("next_daemon", first_quick([welcomed(), silent]))
def test_reconnect_ends_with_the_wait(folder: Path, next_daemon: Script) -> None:
    """The next daemon is silent after its handshake or welcome, and gets no limit of its own."""
    lost = begun(Peer.hear, stays=False)
    with session_at(folder / "s.sock", lost, *[next_daemon] * 20) as (session, _):
        lease = session.lease(0)
        silence = r"did not answer '(hello|plan)' in time; gave up after \d"
        with lasts_less_than(9.0), pytest.raises(NoDaemonError, match=silence):
            session.wait(lease)


def test_handshake_of_a_reconnect_ends_with_the_wait(folder: Path) -> None:
    """The next daemon accepts connections and does not answer the handshake."""
    path = folder / "s.sock"
    session = Session(DaemonChoice(path), ReaderIdentity("job"), Patience(LIMIT_S))
    with scripted(path, begun(stays=False)):
        session.declare(PLAN)
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(path))
        frozen.listen()
        lease = session.lease(0)
        with (
            lasts_less_than(9.0),
            pytest.raises(NoDaemonError, match=r"handshake; gave up after \d"),
        ):
            session.wait(lease)


@pytest.mark.slow
def test_full_socket_does_not_outlast_the_wait(folder: Path) -> None:
    """A daemon that stops in mid-session takes no more bytes than a socket's buffer holds."""
    (path,) = write_shards(folder, 1, 3)
    urls = [f"s3://bucket/{number:060d}.tar" for number in range(20_000)]
    with Daemon(folder) as daemon:
        session = Session(DaemonChoice(daemon.socket), ReaderIdentity("job"), Patience(LIMIT_S))
        with closing(session):
            session.resolve([f"file://{path}"])
            daemon.pause()
            with lasts_less_than(30.0), pytest.raises(NoDaemonError, match=r"gave up after \d"):
                session.resolve(urls)


@pytest.mark.slow
def test_stopped_daemon_ends_every_wait_at_its_limit(folder: Path) -> None:
    """Readers of samples or files, and new ones, each get a frozen daemon's error in time."""
    urls = [f"file://{path}" for path in write_shards(folder, 8, 3)]
    with Daemon(folder) as daemon:
        dataset = ShardDataset(urls, socket=daemon.socket, timeout_s=1.0)
        samples = iter(dataset)
        next(samples)
        daemon.pause()
        with lasts_less_than(30.0):
            with pytest.raises(
                ShardTimeoutError, match="did not arrive within 1 s: the daemon does not answer"
            ):
                list(samples)
            with pytest.raises(NoDaemonError, match=r"handshake; gave up after \d") as caught:
                ShardDataset(urls, socket=daemon.socket, timeout_s=1.0)
            assert "shardcache status" in caught.value.remedy, (
                "it is there: to start another one is no remedy"
            )
            with (
                pytest.raises(NoDaemonError, match=r"handshake; gave up after \d"),
                cached_paths(urls[0], socket=daemon.socket, timeout_s=1.0),
            ):
                pass
