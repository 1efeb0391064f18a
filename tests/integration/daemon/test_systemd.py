"""Under a service manager: it is told how the daemon is, and its sockets outlive daemons."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest

from shardcache.errors import ConfigError
from shardcache.server.listening.activation import ActivatedSockets
from shardcache.server.listening.tcp_listener import listening_over_tcp
from shardcache_client.dataset import ShardDataset
from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S
from support.programs.processes import children
from support.shards.tars import write_shards

SHARDS = 4
SAMPLES = 25
TOLD = {b"LISTEN_PID", b"LISTEN_FDS", b"LISTEN_FDNAMES", b"NOTIFY_SOCKET", b"WATCHDOG_USEC"}
OK = b"HTTP/1.0 200"
# What takes over some of the sockets that it was handed at a time, and says what it got, or why
# not.
TAKE = """
import os, sys
from shardcache.errors import ConfigError
from shardcache.server.listening.activation import ActivatedSockets
copies = [os.dup(fd) for fd in range(3, 3 + int(os.environ["LISTEN_FDS"]))]
for case in sys.argv[1:]:
    for at, number in enumerate(case.split(",")):
        os.dup2(copies[int(number)], 3 + at)
    env = os.environ | {"LISTEN_FDS": str(at + 1)}
    try:
        handed = ActivatedSockets.take(env, os.getpid())
        left = [name for name in env if name.startswith("LISTEN")]
        print(handed.unix is not None, len(handed.tcp), left)
        del handed  # closes what it was given
    except ConfigError as exn:
        print("refused:", exn.message, exn.remedy)
"""


# The process id that the sockets are for is known only to who becomes that process. They are moved
# out of each other's way first: one of them may lie where another belongs.
_BECOME = """
import fcntl, os, sys
fds = [fcntl.fcntl(int(fd), fcntl.F_DUPFD_CLOEXEC, 100) for fd in sys.argv[1].split(",")]
for number, fd in enumerate(fds, 3):
    os.dup2(fd, number)
os.closerange(3 + len(fds), 100)
given = {
    "LISTEN_PID": str(os.getpid()),
    "LISTEN_FDS": str(len(fds)),
    "LISTEN_FDNAMES": ":".join("x" * len(fds)),
}
os.execve(sys.argv[2], sys.argv[2:], os.environ | given)
"""


class ServiceManager:
    """A context manager whose `spawn` is what `Daemon` takes to start its process by.

    Args:
        address: of its own socket: a path, or "@" and an abstract name.
        watchdog_s: silence after which it would end the daemon; it leaves that to the test.
        sockets: to be handed over.
    """

    def __init__(
        self,
        address: Path | str,
        *,
        watchdog_s: float | None = None,
        sockets: Sequence[socket.socket] = (),
    ) -> None:
        self.address = str(address)
        self.messages: list[dict[str, str]] = []
        self._watchdog_s = watchdog_s
        self._sockets = sockets
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        self._ear = self._exit.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        self._ear.bind(self.address.replace("@", "\0", 1))
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def spawn(
        self, args: Sequence[str], env: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Run `python -m shardcache` with arguments as a manager would, as `spawn` of `Daemon`."""
        told = {"NOTIFY_SOCKET": self.address}
        if self._watchdog_s is not None:
            told["WATCHDOG_USEC"] = str(int(self._watchdog_s * 1e6))
        with log.open("ab") as file:
            command = (sys.executable, "-m", "shardcache", *args)
            return handing_over(
                self._sockets, command, env={**env, **told}, stdout=file, stderr=file
            )

    def hear(self, limit_s: float = GUARD_S) -> dict[str, str]:
        """Return the fields of the next message. Raises TimeoutError if none comes in time."""
        self._ear.settimeout(limit_s)
        lines = self._ear.recv(4096).decode().splitlines()
        self.messages.append(dict(line.split("=", 1) for line in lines))
        return self.messages[-1]

    def hear_of(self, field: str) -> str:
        """Return what the next message says that has a field; others are passed over."""
        message = self.hear()
        while field not in message:
            message = self.hear()
        return message[field]

    def hear_nothing_for(self, silence_s: float) -> None:
        try:
            while True:
                self.hear(silence_s)
        except TimeoutError:
            return


def bound(path: Path, mode: int = 0o660) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(os.fspath(path))
    path.chmod(mode)
    sock.listen(64)
    return sock


def handing_over(
    sockets: Sequence[socket.socket],
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start a command with sockets as its descriptors 3, 4 …; other options are Popen's."""
    fds = [sock.fileno() for sock in sockets]
    become = (sys.executable, "-ISc", _BECOME, ",".join(map(str, fds)), *command)
    return subprocess.Popen(become if fds else command, env=env, pass_fds=fds, **options)


@pytest.fixture
def urls(tmp_path: Path) -> str:
    write_shards(tmp_path, SHARDS, SAMPLES)
    return f"file://{tmp_path}/shard-{{000000..{SHARDS - 1:06d}}}.tar"


@pytest.fixture
def handed(tmp_path: Path) -> Iterator[socket.socket]:
    """A socket where the daemon of the test will be."""
    with bound(tmp_path / "s.sock") as sock:
        yield sock


def asking(path: Path) -> socket.socket:
    """Return a connection to a socket, where a daemon was asked how it is."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(GUARD_S)
    sock.connect(str(path))
    sock.sendall(b"GET /v1/health HTTP/1.0\r\n\r\n")
    return sock


def names(pid: int) -> set[bytes]:
    return {row.split(b"=")[0] for row in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")}


@pytest.mark.slow
def test_service_manager_is_notified_of_the_daemons_state(tmp_path: Path) -> None:
    """READY comes first and means readiness. Signs of life and the stop follow."""
    path = tmp_path / "s.sock"
    options = ("--cache-dir", str(tmp_path / "cache"), "--capacity", "1GB")
    with ServiceManager(tmp_path / "notify", watchdog_s=1.5) as manager:
        process = manager.spawn(
            ("serve", "--socket", str(path), *options), os.environ, tmp_path / "log"
        )
        try:
            while "EXTEND_TIMEOUT_USEC" in manager.hear():
                pass  # a busy machine takes its time
            assert manager.messages[-1] == {"READY": "1"}
            with asking(path) as answer:
                assert answer.recv(100).startswith(OK)
            for _ in range(3):
                manager.hear_of("WATCHDOG")
            assert manager.messages[-1]["STATUS"].startswith(
                "0 readers; 0 shards, 0 Bytes of 1.0 GB"
            )
            process.terminate()
            assert process.wait(GUARD_S) == 0
        finally:
            process.kill()
            process.wait()
        assert manager.hear_of("STOPPING") == "1"
        assert int(manager.messages[-1]["EXTEND_TIMEOUT_USEC"]) > 20e6
        assert not path.exists()


@pytest.mark.slow
async def test_a_frozen_daemon_is_replaced_under_a_reading_job(
    tmp_path: Path, urls: str, handed: socket.socket
) -> None:
    """Its silent watchdog has it restarted, while new connections wait and are served."""
    with (
        ServiceManager(tmp_path / "notify", watchdog_s=1.5, sockets=[handed]) as manager,
        Daemon(tmp_path, spawn=manager.spawn) as daemon,
    ):
        samples = iter(
            ShardDataset(urls, socket=daemon.socket, timeout_s=GUARD_S, partial_reads=False)
        )
        found = [next(samples)["__key__"]]
        manager.hear_of("WATCHDOG")
        daemon.pause()
        manager.hear_nothing_for(1.5)
        daemon.kill()
        rest = asyncio.create_task(
            asyncio.to_thread(lambda: [sample["__key__"] for sample in samples])
        )
        with asking(daemon.socket) as queued:  # refused, were the socket the killed daemon's own
            daemon.start()
            assert queued.recv(100).startswith(OK)
        assert found + await rest == [f"{number:06d}" for number in range(SHARDS * SAMPLES)]


@pytest.mark.slow
def test_activated_sockets_remain_the_managers(tmp_path: Path, handed: socket.socket) -> None:
    """No further process gets sockets or variables, and the socket's name stays."""
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        ServiceManager(tmp_path / "notify", sockets=[handed, tcp]) as manager,
        Daemon(tmp_path, spawn=manager.spawn) as daemon,
    ):
        url = f"http://127.0.0.1:{tcp.getsockname()[1]}/v1/health"
        assert json.loads(urllib.request.urlopen(url).read())["status"] == "ok"
        for fd in (3, 4):
            flags = (
                Path(f"/proc/{daemon.pid}/fdinfo/{fd}").read_text().split("flags:")[1].split()[0]
            )
            assert int(flags, 8) & os.O_CLOEXEC
        # One that was just forked still shows its parent's variables.
        eventually(
            lambda: (
                bool(children(daemon.pid))
                and not set().union(*map(names, children(daemon.pid))) & TOLD
            )
        )
        assert daemon.stop() == 0
        assert daemon.socket.exists()
        asking(daemon.socket).close()


def test_a_socket_that_is_no_good_is_refused(tmp_path: Path) -> None:
    """A socket that is useless or open to all is refused, with the remedy for its unit."""
    with (
        bound(tmp_path / "good") as good,
        bound(tmp_path / "second") as second,
        bound(tmp_path / "everybody", 0o666) as everybody,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
        bound(tmp_path / "gone") as gone,
    ):
        abstract.bind(f"\0{tmp_path}")
        abstract.listen()
        (tmp_path / "gone").unlink()
        sockets = (good, second, everybody, abstract, datagrams, gone)
        cases = ("0", "0,1", "2", "3", "4", "5")
        command = (sys.executable, "-c", TAKE, *cases)
        with handing_over(sockets, command, env=os.environ, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            taken, *refused = process.stdout.read().decode().splitlines()
    assert taken == "True 0 []"
    reasons = (
        "more than one",
        "SocketMode=0660",
        "every user",
        "ListenStream=",
        "RuntimeDirectoryPreserve",
    )
    for reason, said in zip(reasons, refused, strict=True):
        assert said.startswith("refused:")
        assert reason in said
    # Variables that came down from a parent mean nothing, and go no further.
    env = {"LISTEN_PID": "1", "LISTEN_FDS": "1"}
    assert ActivatedSockets.take(env, os.getpid()) == ActivatedSockets()
    assert not env


def test_two_answers_to_one_question_are_refused(tmp_path: Path, handed: socket.socket) -> None:
    """A daemon told of one socket by the manager and another by options does not start."""
    with pytest.raises(ConfigError) as of_socket:
        ActivatedSockets(handed).path(tmp_path / "other")
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        pytest.raises(ConfigError) as of_http,
        listening_over_tcp("127.0.0.1:0", None, (tcp,)),
    ):
        pass
    assert "ListenStream=" in of_socket.value.remedy
    assert "--http" in of_http.value.remedy
