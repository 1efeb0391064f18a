"""connection.py and websocket.py: a client's view of whatever answers at the socket."""

import gc
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from shardcache.errors import (
    ConfigError,
    DaemonError,
    NoDaemonError,
    ProtocolError,
    VersionMismatchError,
)
from shardcache.shared.versions import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from shardcache_client.daemon.choice import DaemonChoice
from shardcache_client.daemon.connection import DaemonConnection, ReaderIdentity
from shardcache_client.daemon.session import resolve
from shardcache_client.daemon.websocket import FarewellError, WebSocket
from shardcache_client.order.topology import Topology
from support.network.peer import Peer, scripted, welcomed
from support.programs.guard import GUARD_S

READER = ReaderIdentity("job", Topology(1, 2, 3, 4))


def soon() -> float:
    """Return a deadline that a test never reaches unless something is broken."""
    return time.monotonic() + GUARD_S


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a daemon's socket."""
    return tmp_path / "s.sock"


def test_hello_identifies_the_reader(path: Path) -> None:
    """The daemon learns job, rank, worker and process of the reader."""
    with scripted(path, welcomed()) as heard:
        DaemonConnection(path, READER, soon()).close()
    (hello,) = heard
    assert hello.pop("client_version")
    assert hello == {
        "type": "hello",
        "protocol": PROTOCOL_VERSION,
        "oldest_protocol": OLDEST_PROTOCOL_VERSION,
        "job": "job",
        "rank": 1,
        "world_size": 2,
        "worker": 3,
        "workers": 4,
        "pid": os.getpid(),
        "bundles": True,
    }


def test_missing_socket_is_named_with_the_command(path: Path) -> None:
    """Whoever forgot to start the daemon reads how to."""
    with pytest.raises(NoDaemonError) as caught:
        DaemonConnection(path, READER, soon())
    assert str(path) in str(caught.value)
    assert f"shardcache serve --socket {path}" in str(caught.value)


def test_connection_waits_for_its_turn_in_a_full_backlog(path: Path) -> None:
    """However many connect at once, none is told that there is no daemon."""
    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as stack:
        listener.bind(str(path))
        listener.listen(0)
        stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path))
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(WebSocket, path, "/", soon())
            with pytest.raises(TimeoutError):
                opening.result(0.1)
            listener.accept()[0].close()
            with listener.accept()[0] as connection:
                assert connection.recv(5) == b"GET /"
            assert isinstance(opening.exception(), ConnectionError)
        with pytest.raises(NoDaemonError, match="temporarily") as caught:
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path))
            DaemonConnection(path, READER, time.monotonic() + 0.01)
        assert "which process to end if it hangs" in caught.value.remedy


def test_sending_in_a_forked_child_is_a_lost_connection(path: Path) -> None:
    """A worker's inherited file closes in the child, and its release fails nothing else."""
    with scripted(path, welcomed()), closing(DaemonConnection(path, READER, soon())) as connection:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                connection.tell("release", lease=1)
            except NoDaemonError:
                status = 0
            finally:
                os._exit(status)
        _, waited = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(waited) == 0


def test_a_path_that_no_socket_can_have(tmp_path: Path) -> None:
    """A path beyond the kernel's limit is a mistake in the configuration, not an absent daemon."""
    with pytest.raises(ConfigError, match="107 bytes"):
        DaemonConnection(tmp_path / ("x" * 200), READER, soon())


@contextmanager
def unprivileged() -> Iterator[None]:
    """Drop root's right to open everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_socket_that_is_not_ours(path: Path) -> None:
    """A user outside the socket's group is told to join it, not to start a second daemon."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        path.chmod(0)
        with unprivileged(), pytest.raises(DaemonError, match="group") as caught:
            DaemonConnection(path, READER, soon())
    assert not isinstance(caught.value, NoDaemonError)


def test_the_last_words_of_one_that_has_left_are_heard(path: Path) -> None:
    """Messages and the goodbye arrive, though nobody is there to take an answer."""
    left = threading.Event()

    def script(peer: Peer) -> None:
        peer.say(type="last")
        peer.websocket.ping()
        peer.websocket.close(1001)
        left.set()

    with scripted(path, script):
        websocket = WebSocket(path, "/v1/session", soon())
        assert left.wait(GUARD_S)
        message = websocket.receive(soon())
        assert message is not None
        assert json.loads(message) == {"type": "last"}
        with pytest.raises(FarewellError):
            websocket.receive(soon())


def test_message_of_an_object_that_is_collected_with_its_connection_is_lost(path: Path) -> None:
    """The collector closes the socket first, so the sender finds a broken connection."""
    errors = []

    class Holder:
        def __init__(self, connection: DaemonConnection) -> None:
            self.connection = connection
            self.itself = self

        def __del__(self) -> None:
            try:
                self.connection.tell("release", lease=1)
            except NoDaemonError as exn:
                errors.append(exn)

    with scripted(path, welcomed()):
        Holder(DaemonConnection(path, READER, soon()))
        gc.collect()
    assert len(errors) == 1


def test_a_daemon_that_refuses_our_protocol(path: Path) -> None:
    """The daemon's own verdict arrives as the same error."""

    def script(peer: Peer) -> None:
        peer.hear()
        peer.say(type="error", id=None, error=VersionMismatchError("too old").to_json())

    with scripted(path, script), pytest.raises(VersionMismatchError, match="too old"):
        DaemonConnection(path, READER, soon())


@contextmanager
def http_server(path: Path, status: int, body: bytes) -> Iterator[None]:
    """Serve one answer to one request at a Unix socket."""
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            with listener.accept()[0] as connection:
                connection.recv(65_536)
                connection.sendall(
                    f"HTTP/1.1 {status} No\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
                )

        pool.submit(answer)
        yield


def test_another_server_at_the_socket_is_no_daemon(path: Path) -> None:
    """A server that knows no sessions is not taken for a daemon."""
    with (
        http_server(path, 404, b"not here"),
        pytest.raises(ProtocolError, match=r"not a shardcache daemon.*404"),
    ):
        DaemonConnection(path, READER, soon())


def test_a_refusal_keeps_its_type(path: Path) -> None:
    """An error that comes with the HTTP answer is raised as what it is."""
    body = json.dumps({"error": DaemonError("draining", remedy="wait").to_json()}).encode()
    with http_server(path, 503, body), pytest.raises(DaemonError, match="draining"):
        DaemonConnection(path, READER, soon())


def test_an_answer_that_does_not_come(path: Path) -> None:
    """A daemon that is silent for the whole time is an error that says so."""
    with scripted(path, welcomed()), pytest.raises(DaemonError, match="did not answer 'resolve'"):
        resolve(DaemonChoice(path), READER, ["s3://bucket/"], 0.05)


def test_answers_are_distinguished_by_id(path: Path) -> None:
    """Two leases under way are each answered by their own answer, whichever comes first."""

    def in_reverse(peer: Peer) -> None:
        first = peer.hear()["id"]
        second = peer.hear()["id"]
        peer.lend(second, 22)
        peer.lend(first, 11)

    with scripted(path, welcomed(in_reverse)):
        connection = DaemonConnection(path, READER, soon())
        first = connection.request("lease", position=0)
        second = connection.request("lease", position=1)
        assert (connection.answer(first, soon()) or {})["lease"] == 11
        assert (connection.answer(second, soon()) or {})["lease"] == 22
        connection.close()


def test_long_messages_in_pieces_and_pings(path: Path) -> None:
    """A message of several frames arrives whole, and a ping between them is answered."""
    text = json.dumps({"type": "manifest", "id": 1}) + "\n" + "x" * 3_000_000
    ponged = threading.Event()

    def in_pieces(peer: Peer) -> None:
        peer.hear()
        pong = peer.websocket.ping()
        peer.websocket.send([text[:100], text[100:2_000_000], text[2_000_000:]])
        if pong.wait(GUARD_S):
            ponged.set()

    with scripted(path, welcomed(in_pieces)):
        connection = DaemonConnection(path, READER, soon())
        answer = connection.call("resolve", soon(), urls=[])
        assert answer["packed"] == b"x" * 3_000_000
        connection.close()
    assert ponged.is_set()


def test_answers_are_received_while_requests_are_sent(path: Path) -> None:
    """A daemon that takes no requests until its answers are read does not block the sender."""
    number = 64
    padding = "x" * 64 * 1024

    def answers_first(peer: Peer) -> None:
        for id_ in range(1, number + 1):
            peer.say(type="ok", id=id_, padding=padding)

    with (
        scripted(path, welcomed(answers_first)),
        closing(DaemonConnection(path, READER, soon())) as connection,
    ):
        requests = [connection.request("plan", soon(), padding=padding) for _ in range(number)]
        for request in requests:
            answer = connection.answer(request, soon())
            assert answer is not None
            assert answer["padding"] == padding


def test_a_daemon_that_leaves(path: Path) -> None:
    """A request raises NoDaemonError at once if the daemon closes, or dies without a word."""
    dying = welcomed(lambda peer: peer.websocket.socket.shutdown(socket.SHUT_RDWR), stays=False)
    for leaving in (Peer.welcome, dying):
        with scripted(path, leaving):
            connection = DaemonConnection(path, READER, soon())
            with pytest.raises(NoDaemonError, match="broke"):
                connection.call("resolve", soon(), urls=[])
            with pytest.raises(NoDaemonError, match="broke"):
                connection.tell("release", lease=1)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("not JSON", "invalid JSON"),
        (json.dumps({"type": "welcome", "protocol": PROTOCOL_VERSION, "id": [1]}), "id"),
    ],
)
def test_noise_is_a_protocol_error(path: Path, message: str, said: str) -> None:
    """A message without JSON or with a wrong id is named, not taken for a lost connection."""
    with scripted(path, welcomed(lambda peer: peer.websocket.send(message))):
        connection = DaemonConnection(path, READER, soon())
        with pytest.raises(ProtocolError, match=said):
            connection.call("resolve", soon(), urls=[])
        connection.close()


def test_a_connection_costs_one_descriptor_and_no_thread(path: Path) -> None:
    """A connection that nobody closes goes with its object, and leaves no thread to fork over."""
    with scripted(path, welcomed()):
        before = _sockets_to(path)
        connection = DaemonConnection(path, READER, soon())
        assert _sockets_to(path) == before + 1
        assert sum("recv_events" in thread.name for thread in threading.enumerate()) == 1, (
            "the server's own, no other"
        )
        del connection
        gc.collect()
        assert _sockets_to(path) == before


def _sockets_to(path: Path) -> int:
    """Count this process's descriptors of sockets whose other end listens at `path`."""
    count = 0
    for fd in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        try:
            with socket.socket(fileno=os.dup(fd)) as sock:
                count += sock.getpeername() == str(path)
        except OSError:
            continue  # gone meanwhile, or no connected socket
    return count
