"""The TCP port reads, and nothing else: on the loopback, or with a token."""

import asyncio
import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from shardcache.errors import ConfigError, DaemonError
from shardcache.server.listening.acceptor import Acceptor
from shardcache.server.listening.limits import Limits
from shardcache.server.listening.tcp_listener import listening_over_tcp
from support.network.http_requests import ask
from support.network.ports import free_port
from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S
from support.shards.tars import write_shards

TOKEN = "0123456789abcdef0123456789abcdef"
READABLE = ("/v1/health", "/v1/status", "/v1/shards")


@pytest.fixture(scope="module")
def port() -> int:
    """The port of the module's daemon."""
    return free_port()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[Daemon]:
    """A daemon that can be read at a port of the loopback, with a shard in its cache."""
    folder = tmp_path_factory.mktemp("d")
    (shard,) = write_shards(folder, 1, 10)
    with Daemon(folder, "--http", f"127.0.0.1:{port}") as running:
        running.request("POST", "/v1/warm", {"urls": [str(shard)]})
        yield running


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    """A token as an operator keeps it."""
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("path", READABLE)
def test_the_loopback_may_read(daemon: Daemon, port: int, path: str) -> None:
    """Health, status, shards and the API's description come as over the socket."""
    answer = ask(port, path)
    assert answer.status == 200
    assert "json" in answer.headers["Content-Type"]
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
    assert "Access-Control-Allow-Origin" not in answer.headers


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(
            ("POST", path)
            for path in ("/v1/warm", "/v1/index", "/v1/evict", "/v1/verify", *READABLE)
        ),
        *((method, "/v1/status") for method in ("PUT", "DELETE", "OPTIONS", "PATCH")),
        *(
            ("GET", path)
            for path in ("/v1/session", "/v1/evict", "/", "/v1/shards/../session", "/v1/%73ession")
        ),
        *(
            ("POST", path)
            for path in (
                "//v1/evict",
                "/v1/%65vict",
                "/v1/../v1/evict",
                "/v1/evict?x",
                "/v1/evict/",
            )
        ),
    ],
)
def test_tcp_refuses_changes_and_sessions(
    daemon: Daemon, port: int, method: str, path: str
) -> None:
    """Whatever changes something, and sessions, are refused; the cache is as before."""
    before = daemon.shards()
    answer = ask(
        port, path, method, Upgrade="websocket", Connection="Upgrade", Sec_WebSocket_Version="13"
    )
    assert answer.status in (403, 405)
    assert answer.lines[0]["error"]["code"] == "not_allowed"
    assert daemon.shards() == before
    assert daemon.sessions() == 0


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "[::2]", ""]
)
def test_a_site_that_rebinds_its_name_reads_nothing(daemon: Daemon, port: int, host: str) -> None:
    """A page's script sends its own site's name: to that, the loopback answers 403."""
    assert ask(port, "/v1/status", Host=host).status == 403
    assert ask(port, "/v1/status", Host=f"localhost:{port}").status == 200


def test_garbage_on_the_tcp_port_is_answered_and_not_logged(daemon: Daemon, port: int) -> None:
    """Whoever reaches the port, token or not, could fill the node's disk with tracebacks."""
    before = daemon.log.stat().st_size
    for nonsense in (
        b"\0\xff",
        b"GET / HTTP/9.9",
        b"GET /v1/health HTTP/1.1\r\nX: " + bytes(100_000),
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=GUARD_S) as connection:
            connection.sendall(nonsense + b"\r\n\r\n")
            assert b" 400 " in connection.recv(100)
    assert daemon.log.stat().st_size == before


def test_local_files_are_not_named_without_a_token(daemon: Daemon, port: int) -> None:
    """Whoever can log in to the node may ask: it sees what every user of the daemon may see."""
    assert len(daemon.shards()) == 1
    assert ask(port, "/v1/shards").lines == []


def test_status_needs_the_token_where_one_is_set(tmp_path: Path, token_file: Path) -> None:
    """By `Authorization: Bearer`; then everything is named, by whatever name the node is called."""
    (shard,) = write_shards(tmp_path, 1, 10)
    port = free_port()
    with Daemon(
        tmp_path, "--http", f"0.0.0.0:{port}", "--http-token-file", str(token_file)
    ) as daemon:
        daemon.request("POST", "/v1/warm", {"urls": [str(shard)]})
        for wrong in (
            "",
            TOKEN,
            f"Basic {TOKEN}",
            f"Bearer {TOKEN}x",
            f"Bearer {TOKEN[:-1]}",
            "Bearer ",
            "Bearer é",
        ):
            answer = ask(port, "/v1/shards", Authorization=wrong)
            assert answer.status == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        answer = ask(port, "/v1/shards", Authorization=f"bearer {TOKEN}", Host="node-7.example")
        assert [row["url"] for row in answer.lines] == [str(shard)]
        assert TOKEN not in daemon.log.read_text()


@pytest.mark.parametrize(
    "where", ["0.0.0.0:0", ":0", "[::]:0", f"{socket.gethostname()}-nowhere:1", "9300", "h:x", ""]
)
def test_beyond_the_loopback_a_token_is_needed(where: str) -> None:
    """An address that others reach, or none at all, is refused before anything is bound."""
    with pytest.raises(ConfigError), listening_over_tcp(where, None):
        pass


@pytest.mark.parametrize(
    ("text", "mode"), [("short", 0o600), ("", 0o600), (TOKEN, 0o644), (TOKEN, 0o660)]
)
def test_a_token_that_protects_nothing_is_refused(text: str, mode: int, token_file: Path) -> None:
    """One that can be guessed, or that others read or replace."""
    token_file.write_text(text)
    token_file.chmod(mode)
    with pytest.raises(ConfigError) as refused, listening_over_tcp("127.0.0.1:0", token_file):
        pass
    assert refused.value.remedy
    assert not text or text not in str(refused.value) or text == "short"


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Not taken for no token."""
    with (
        pytest.raises(ConfigError, match="none"),
        listening_over_tcp("127.0.0.1:0", tmp_path / "none"),
    ):
        pass


def test_a_port_in_use_is_an_error_that_names_it(port: int, daemon: Daemon) -> None:
    """Before anything is served."""
    with pytest.raises(DaemonError, match=str(port)), listening_over_tcp(f"127.0.0.1:{port}", None):
        pass


@pytest.mark.slow
def test_idle_connections_do_not_keep_others_out_of_the_socket(daemon: Daemon, port: int) -> None:
    """Silent TCP connections leave the jobs' socket in service, and the port once they are gone."""
    idle = [socket.create_connection(("127.0.0.1", port), timeout=GUARD_S) for _ in range(200)]
    try:
        assert json.loads(daemon.request("GET", "/v1/health"))["status"] == "ok"
        # The connections beyond the bound are refused.
        assert idle[-1].recv(4096).startswith(b"HTTP/1.1 503")
    finally:
        for connection in idle:
            connection.close()
    eventually(lambda: _answers(port))


def _answers(port: int) -> bool:
    try:
        return ask(port, "/v1/health").status == 200
    except (ConnectionError, http.client.HTTPException):
        return False


BRIEF = Limits(connections=1, per_user=1, lifetime_s=0.05)


def _listening() -> socket.socket:
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    return sock


class _Talker(asyncio.Protocol):
    """Sends more than sockets hold."""

    def __init__(self) -> None:
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Write 64 MiB."""
        cast(asyncio.Transport, transport).write(bytes(64 * 1024 * 1024))

    def connection_lost(self, exc: Exception | None) -> None:
        """Set the event."""
        self.lost.set()


async def test_slow_client_is_disconnected_at_the_timeout() -> None:
    """An answer that nobody takes holds its place for the limit, not until it is taken."""
    talker = _Talker()
    acceptor = Acceptor(lambda: talker, lambda: BRIEF)
    sock = _listening()
    with acceptor.accepting(sock), socket.create_connection(sock.getsockname()):
        async with asyncio.timeout(GUARD_S):
            await talker.lost.wait()
    assert not acceptor.connections
