"""Too few descriptors: surplus readers are refused, and no file is taken for damaged."""

import asyncio
import json
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from campaign.disks import SHARDS, CacheRig
from shardcache.cli.admin_client import AdminClient
from shardcache.errors import ExhaustedError, ShardcacheError
from shardcache.server.listening.acceptor import Acceptor
from shardcache.server.listening.limits import Limits
from shardcache.shared.exceptions import from_json
from shardcache_client.daemon.websocket import HandshakeError
from shardcache_client.dataset import ShardDataset
from support.network.other_user import needs_root, open_folder
from support.programs.daemon import Daemon, Spawn, eventually
from support.programs.guard import GUARD_S
from support.programs.processes import logged
from support.programs.raw_session import RawSession
from support.shards.tars import write_shards

SILENT = 1000
FLOOD = """
import os, resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
os.setgroups([])
os.setuid(65534)
held = [socket.socket(socket.AF_UNIX) for _ in range(int(sys.argv[2]))]
for connection in held:
    connection.connect(sys.argv[1])
print("connected", flush=True)
sys.stdin.read()
"""


def limited(files: int) -> Spawn:
    """Return how to start a daemon that may open so many files, and raise the limit no further."""

    def spawn(args: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        command = (
            "sh",
            "-c",
            f'ulimit -n {files}; exec "$@"',
            "sh",
            sys.executable,
            "-m",
            "shardcache",
            *args,
        )
        return logged(command, log, env=env)

    return spawn


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """One shard on disk."""
    (tmp_path / "data").mkdir()
    return write_shards(tmp_path / "data", 1, 4, {"bin": 1000})[0]


def served(session: RawSession, shard: Path) -> bool:
    """Return whether a session gets the shard, byte by byte."""
    session.plan([f"file://{shard}"], [0])
    return Path(session.take(0)["path"]).read_bytes() == shard.read_bytes()


def connect(
    daemon: Daemon, count: int, stack: ExitStack
) -> tuple[list[RawSession], list[ShardcacheError]]:
    """Return the sessions that were admitted, and the errors of those refused."""
    sessions = []
    refusals = []
    for _ in range(count):
        try:
            sessions.append(stack.enter_context(RawSession(daemon)))
        except HandshakeError as exn:
            refusals.append(from_json(json.loads(exn.body)["error"]))
    return sessions, refusals


@pytest.mark.slow
def test_readers_beyond_the_descriptors_are_refused_and_all_others_served(
    tmp_path: Path, shard: Path
) -> None:
    """Twice as many readers as files get typed refusals, and freed places are taken again."""
    files = 256
    with Daemon(tmp_path, spawn=limited(files)) as daemon:
        with ExitStack() as stack:
            sessions, refusals = connect(daemon, 2 * files, stack)
            assert len(sessions) >= files / 8
            assert len(sessions) + len(refusals) == 2 * files
            assert {type(exn) for exn in refusals} == {ExhaustedError}
            assert "LimitNOFILE" in refusals[0].remedy
            assert refusals[0].retryable
            assert all(served(session, shard) for session in sessions)
            with pytest.raises(ExhaustedError, match="readers"):
                list(ShardDataset([f"file://{shard}"], socket=daemon.socket))
            assert daemon.status()["jobs"][0]["sessions"] == len(sessions)
        eventually(lambda: len(list(ShardDataset([f"file://{shard}"], socket=daemon.socket))) == 4)


@pytest.mark.slow
def test_silent_connections_stop_no_established_session(tmp_path: Path, shard: Path) -> None:
    """Those beyond the limit are refused at once, and take no descriptor from the daemon."""
    with (
        Daemon(tmp_path, spawn=limited(256)) as daemon,
        RawSession(daemon) as session,
        ExitStack() as stack,
    ):
        for _ in range(SILENT):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.connect(str(daemon.socket))
        with pytest.raises(HandshakeError) as refused:
            RawSession(daemon)
        assert isinstance(from_json(json.loads(refused.value.body)["error"]), ExhaustedError)
        with pytest.raises(ExhaustedError) as error:
            AdminClient(daemon.socket).status()
        assert "LimitNOFILE" in error.value.remedy
        assert served(session, shard)
        assert "connections refused" in daemon.log.read_text()


@needs_root
@pytest.mark.slow
def test_silent_connections_of_one_user_stop_no_other_user(shard: Path) -> None:
    """A user's connections are limited to half of them, and another user connects and reads."""
    with open_folder() as folder, Daemon(folder, spawn=limited(256)) as daemon:
        command = [sys.executable, "-I", "-c", FLOOD, str(daemon.socket), str(SILENT)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as flood:
            assert flood.stdout is not None
            assert flood.stdout.readline() == b"connected\n"
            with RawSession(daemon) as session:
                assert served(session, shard)
            assert "this user has" in daemon.log.read_text()
            flood.kill()


def test_lack_of_descriptors_ends_no_daemon_and_condemns_no_shard(tmp_path: Path) -> None:
    """A daemon that can open nothing continues once it can, and takes unread files for sound."""
    with CacheRig(tmp_path, "--scrub-rate", "1GB", "--scrub-pause-s", "0") as rig:
        assert all(rig.read(number) for number in range(SHARDS))
        before = resource.prlimit(rig.daemon.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(rig.daemon.pid, resource.RLIMIT_NOFILE, (3, before[1]))
        eventually(lambda: "Too many open files" in rig.daemon.log.read_text())
        resource.prlimit(rig.daemon.pid, resource.RLIMIT_NOFILE, before)
        eventually(lambda: rig.disk()["state"] == "ok")
        assert rig.daemon.status()["counters"]["corrupt"] == 0
        assert len(rig.daemon.shards()) == SHARDS
        rig.evict()
        assert all(rig.read(number) for number in range(SHARDS))


class Listening(socket.socket):
    """A socket that counts the connections that it accepts."""

    accepted = 0

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection, and count it."""
        self.accepted += 1
        return super().accept()


@contextmanager
def listening(path: Path) -> Iterator[Listening]:
    """Lend a socket that somebody may connect to."""
    with Listening(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()
        sock.setblocking(False)
        yield sock


class Greeter(asyncio.Protocol):
    """A protocol that greets each client."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the greeting."""
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(b"hello")


async def test_acceptance_pauses_without_descriptors(tmp_path: Path) -> None:
    """A connection that cannot be accepted leaves the event loop idle, and is accepted later.

    Without a pause it would be tried in each of a hundred turns of the loop.
    """
    limits = Limits(connections=9, per_user=9, lifetime_s=GUARD_S)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (
        listening(tmp_path / "s") as sock,
        Acceptor(Greeter, lambda: limits).accepting(sock),
        socket.socket(socket.AF_UNIX) as late,
    ):
        late.setblocking(False)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            late.connect(str(tmp_path / "s"))
            for _ in range(100):
                await asyncio.sleep(0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert 1 <= sock.accepted < 50
        assert await asyncio.get_running_loop().sock_recv(late, 5) == b"hello"


async def test_first_request_has_its_time(tmp_path: Path) -> None:
    """A silent connection is closed at the limit, an older one with a request is not."""
    limits = Limits(connections=9, per_user=9, first_request_s=0.05)
    with listening(tmp_path / "s") as sock, Acceptor(Greeter, lambda: limits).accepting(sock):
        asked, asking = await asyncio.open_unix_connection(str(tmp_path / "s"))
        asking.write(b"GET / HTTP/1.1\r\n\r")
        await asking.drain()
        asking.write(b"\n")
        silent, waiting = await asyncio.open_unix_connection(str(tmp_path / "s"))
        assert await silent.read() == b"hello"
        assert await asked.readexactly(5) == b"hello"
        assert not asked.at_eof()
        asking.close()
        waiting.close()
