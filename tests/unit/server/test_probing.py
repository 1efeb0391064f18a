"""Health probes: what each of them takes for well, and what they say otherwise."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from shardcache.cli.monitoring import probe as probing
from shardcache.errors import DaemonError, NoDaemonError
from shardcache.server.process import service_notifier
from shardcache.shared.socket_paths import SOCKET_ENV
from support.programs.cli import shardcache


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(SOCKET_ENV, str(tmp_path / "s"))
    return tmp_path / "s"


@contextmanager
def answering(path: Path, *texts: str) -> Iterator[None]:
    """Answer as many requests at a socket as there are texts."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            for text in texts:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + text.encode())

        thread = Thread(target=answer)
        thread.start()
        yield
        thread.join()


@pytest.mark.parametrize(
    ("status", "passed"),
    [
        ("ok", {"startup", "ready", "live"}),
        ("degraded", {"startup", "live"}),
        ("draining", {"live"}),
    ],
)
def test_each_probe_passes_what_it_is_for(path: Path, status: str, passed: set[str]) -> None:
    """A bad disk or a good end restarts no daemon, and only a well one is ready."""
    with answering(path, *[json.dumps({"status": status})] * 3):
        outcomes = {what: shardcache("probe", what) for what in probing.PASSING_STATES}
    assert {what for what, outcome in outcomes.items() if outcome.code == 0} == passed
    assert {outcome.out.strip() for outcome in outcomes.values()} == {status}


def test_the_command_asks_the_same_and_waits_if_told_to(path: Path) -> None:
    """`shardcache probe` prints what the daemon says; --wait-s asks until it passes."""
    degraded = '{"status": "degraded", "disk": {"error": "read-only"}}'
    with answering(path, degraded, degraded, '{"status": "ok"}'):
        ready = shardcache("probe", "ready", "--json")
        assert ready.code == 1
        assert ready.json["disk"]["error"] == "read-only"
        waited = shardcache("probe", "ready", "--wait-s", "60")
        assert waited.code == 0
        assert waited.out.strip() == "ok"


@pytest.mark.parametrize(
    ("silent_s", "alive"), [(0.0, True), (probing.HUNG_S, True), (probing.HUNG_S + 1, False)]
)
def test_a_disk_that_hangs_ends_a_daemon(silent_s: float, alive: bool) -> None:
    """The liveness probe gives a daemon up by the rule of its own watchdog."""
    assert probing.passes("live", {"status": "degraded", "disk": {"silent_s": silent_s}}) is alive
    assert service_notifier._HUNG_S == probing.HUNG_S


@pytest.mark.usefixtures("path")
def test_probes_fail_without_a_daemon() -> None:
    """Each failure has its exit code: no daemon, or a misspelt probe, which never passes."""
    lost = shardcache("probe", "live")
    assert lost.code == 3
    assert "shardcache serve" in lost.err
    assert shardcache("probe", "alive").code == 2


def test_an_answer_of_no_daemon_is_an_error(path: Path) -> None:
    """A silent connection is found out in time, and so is another program."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(NoDaemonError, match="no answer within"):
            probing.ask_health(limit_s=0.05)
    path.unlink()
    with answering(path, "hello"), pytest.raises(DaemonError, match="not a shardcache daemon"):
        probing.ask_health()
