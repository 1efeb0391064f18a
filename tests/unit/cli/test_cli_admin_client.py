"""The commands' client of the admin API, against servers that answer as a daemon does not."""

import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from subprocess import run
from threading import Event

import pytest

from shardcache.cli.admin_client import AdminClient
from shardcache.errors import NoDaemonError, NotAllowedError, ProtocolError
from support.programs.guard import GUARD_S

OK = b"HTTP/1.1 200 OK\r\n"
LINES = OK + b"Transfer-Encoding: chunked\r\n\r\n"

Serve = Callable[[socket.socket], None]


@contextmanager
def answering(path: Path, serve: Serve) -> Iterator[AdminClient]:
    """Have `serve` answer the first request at a socket; yield a client of it."""

    def take() -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as request:
            connection.settimeout(GUARD_S)
            size_bytes = 0
            for line in iter(request.readline, b"\r\n"):
                name, _, value = line.partition(b":")
                if name == b"Content-Length":
                    size_bytes = int(value)
            request.read(size_bytes)
            serve(connection)

    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as threads:
        listener.settimeout(GUARD_S)
        listener.bind(str(path))
        listener.listen()
        served = threads.submit(take)
        yield AdminClient(path)
        served.result()


def sends(answer: bytes) -> Serve:
    """Return a server that sends an answer and closes the connection."""
    return lambda connection: connection.sendall(answer)


def body(text: bytes, head: bytes = OK) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n%s" % (len(text), text)


def chunk(text: bytes) -> bytes:
    """Return a chunk of an answer of unknown length."""
    return b"%x\r\n%s\r\n" % (len(text), text)


def test_lines_come_as_they_are_sent(tmp_path: Path) -> None:
    """An event is read before the next is sent, in pieces or together with others."""
    was_read = Event()

    def serve(connection: socket.socket) -> None:
        connection.sendall(LINES + chunk(b'{"event": "resolved"}\n{"ev'))
        assert was_read.wait(GUARD_S)
        connection.sendall(
            chunk(b'ent": "progress"}\n') + chunk(b'{"event": "done"}\n') + chunk(b"")
        )

    with (
        answering(tmp_path / "s", serve) as daemon,
        closing(daemon.warm(["s3://b/a.tar"])) as events,
    ):
        assert next(events) == {"event": "resolved"}
        was_read.set()
        assert [event["event"] for event in events] == ["progress", "done"]


def test_a_caller_that_stops_early_closes_the_connection(tmp_path: Path) -> None:
    """The daemon sees the end of the connection in the middle of its answer."""

    def serve(connection: socket.socket) -> None:
        connection.sendall(LINES + chunk(b'{"event": "resolved"}\n'))
        assert connection.recv(1) == b""

    with answering(tmp_path / "s", serve) as daemon:
        events = daemon.warm(["s3://b/a.tar"])
        next(events)
        events.close()


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"", id="before the answer"),
        pytest.param(LINES + chunk(b'{"url": "a"}\n'), id="between chunks"),
        pytest.param(LINES + chunk(b'{"url": "a"}\n') + b"20\r\n{", id="in a line"),
        pytest.param(LINES + b"20\r\n" + b'{"url": "a"}\n', id="in a chunk, after a line"),
    ],
)
def test_a_connection_that_breaks_is_not_the_end_of_a_list(answer: bytes, tmp_path: Path) -> None:
    """A list that was cut off is not taken for a whole one."""
    with (
        answering(tmp_path / "s", sends(answer)) as daemon,
        pytest.raises(NoDaemonError, match="broke"),
    ):
        list(daemon.shards(""))


def test_work_that_ends_without_its_last_event_failed(tmp_path: Path) -> None:
    """A daemon that stops ends its answers in good order, but has not done the work."""
    answer = LINES + chunk(b'{"event": "resolved"}\n') + chunk(b"")
    with (
        answering(tmp_path / "s", sends(answer)) as daemon,
        pytest.raises(NoDaemonError, match="before it finished the request"),
    ):
        list(daemon.warm(["s3://b/a.tar"]))


def test_an_error_of_the_daemon_is_raised_without_control_characters(tmp_path: Path) -> None:
    """Its class, message and remedy arrive; what a terminal would obey does not."""
    error = b'{"error": {"code": "not_allowed", "message": "no\\u001b[2J", "remedy": "ask"}}'
    answer = body(error, b"HTTP/1.1 403 Forbidden\r\n")
    with (
        answering(tmp_path / "s", sends(answer)) as daemon,
        pytest.raises(NotAllowedError) as caught,
    ):
        daemon.evict(["s3://b/a.tar"])
    assert "\x1b" not in caught.value.message
    assert caught.value.remedy == "ask"


@pytest.mark.parametrize("text", [b"<html>\x1b[2J", b"[]", b'{"error": "nothing"}', b"\xff"])
def test_a_refusal_by_something_else_is_a_protocol_error(text: bytes, tmp_path: Path) -> None:
    """It says what came in place of the daemon's error."""
    answer = body(text, b"HTTP/1.1 502 Bad Gateway\r\n")
    with (
        answering(tmp_path / "s", sends(answer)) as daemon,
        pytest.raises(ProtocolError, match="502 Bad") as caught,
    ):
        daemon.status()
    assert "\x1b" not in str(caught.value)


def test_silence_ends_at_the_callers_limit(tmp_path: Path) -> None:
    """A daemon that takes the connection and says nothing is given up."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/s")
        listener.listen()
        with pytest.raises(NoDaemonError, match=r"does not answer within 0\.05 s"):
            AdminClient(tmp_path / "s", silence_s=0.05).status()


def test_daemon_outside_the_pid_namespace_is_given_up_without_a_pid(tmp_path: Path) -> None:
    """`kill -9 0` would end the user's own processes, so the remedy names only a true pid."""
    namespace = ("unshare", "--map-root-user", "--pid", "--fork")
    if run((*namespace, "true"), capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a PID namespace")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/s")
        listener.listen()
        ask = (
            "import sys\n"
            "from pathlib import Path\n"
            "from shardcache.cli.admin_client import AdminClient\n"
            "AdminClient(Path(sys.argv[1]), silence_s=0.05).status()"
        )
        command = (*namespace, sys.executable, "-c", ask, f"{tmp_path}/s")
        asked = run(command, capture_output=True, text=True, check=False)
    assert "does not answer within" in asked.stderr
    assert "or end its process" in asked.stderr


def test_a_daemon_that_accepts_nothing_differs_from_none(tmp_path: Path) -> None:
    """With its queue of connections full, the advice to start a daemon would be wrong."""
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(f"{tmp_path}/s")
        listener.listen(0)
        first.connect(f"{tmp_path}/s")
        with pytest.raises(NoDaemonError, match="accepts no connections"):
            AdminClient(tmp_path / "s").status()
