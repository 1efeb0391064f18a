"""`shardcache dashboard`: the page of a daemon that only its socket leads to."""

import json
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests

from support.monitoring.dashboard import LIVE_PATH, Page, events_of
from support.network.ports import free_port
from support.programs.cli import clean_environment, shardcache
from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S

# In place of a browser: it writes down what it is told to open.
BROWSER = """#!/bin/sh
echo "$1" > "{told}"
cp "${{1#file://}}" "{copy}"
stat -c %a "$(dirname "${{1#file://}}")" >> "{told}"
"""


@contextmanager
def dashboard(
    daemon: Daemon, *flags: str, env: dict[str, str] | None = None, through: Path | None = None
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run the command; yield its printed url and its process. `through`: another socket."""
    path = str(through or daemon.socket)
    command = [sys.executable, "-m", "shardcache", "dashboard", "--json", "--socket", path, *flags]
    environment = clean_environment(env or {})
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"], process
        finally:
            process.kill()


@pytest.mark.slow
def test_the_browsers_command_line_holds_no_token(daemon: Daemon, tmp_path: Path) -> None:
    """Command lines are public, so it is given a private file that leads on to the url."""
    told, copy, browser = (tmp_path / name for name in ("told", "copy", "browser"))
    browser.write_text(BROWSER.format(told=told, copy=copy))
    browser.chmod(0o755)
    with dashboard(daemon, env={"BROWSER": str(browser)}) as (url, process):
        eventually(lambda: told.exists() and len(told.read_text().split()) == 2)
        address, mode = told.read_text().split()
        assert url in copy.read_text()
        assert url.partition("#")[2] not in address
        assert int(mode, 8) & (stat.S_IRWXG | stat.S_IRWXO) == 0
        process.send_signal(signal.SIGINT)
        process.wait(GUARD_S)
    assert not Path(address.removeprefix("file://")).exists(), "nothing stays behind"


@contextmanager
def cutting_relay(daemon: Daemon, path: Path) -> Iterator[None]:
    """Pass requests to a daemon, but only 2,000 bytes back of answers with the page's files."""

    def serve(client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as upstream:
            upstream.connect(str(daemon.socket))
            request = client.recv(65536)
            upstream.sendall(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            left = 2000 if b"/static/" in request else 10_000_000
            while left:
                data = upstream.recv(left)
                if not data:
                    break
                client.sendall(data)
                left -= len(data)

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # shut down
                return
            threading.Thread(target=serve, args=[client], daemon=True).start()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def test_file_that_the_daemon_cuts_short_is_not_passed_on_as_whole(
    daemon: Daemon, tmp_path: Path
) -> None:
    """Browsers would keep it for a year."""
    through = tmp_path / "relay.sock"
    with (
        cutting_relay(daemon, through),
        dashboard(daemon, "--no-open", through=through) as (url, _),
    ):
        root = url.partition("#")[0]
        script = re.search(r"dashboard/static/[^\"]+\.js", requests.get(root, timeout=GUARD_S).text)
        assert script
        with pytest.raises(requests.RequestException):
            requests.get(root + script[0], timeout=GUARD_S)


def test_the_url_it_prints_shows_the_page_and_nothing_else(daemon: Daemon) -> None:
    """Anybody on the node gets the page, its contents need the token, and no API is there."""
    port = free_port()
    with (
        dashboard(daemon, "--no-open", "--port", str(port)) as (url, process),
        requests.Session() as http,
    ):
        root, _, token = url.partition("/#token=")
        assert root == f"http://127.0.0.1:{port}"
        assert len(token) >= 32
        page = http.get(root, timeout=GUARD_S)
        assert page.text.startswith("<!doctype html>")
        assert "default-src 'self'" in page.headers["Content-Security-Policy"]
        for brought in ("", "Bearer", f"Bearer {token[:-1]}", token):
            refused = http.get(
                root + LIVE_PATH, headers={"Authorization": brought}, timeout=GUARD_S
            )
            assert refused.status_code == 401
        http.headers["Authorization"] = f"Bearer {token}"
        with http.get(root + LIVE_PATH, stream=True, timeout=GUARD_S) as answer:
            heard = Page(events_of(answer.raw))
            heard.hear()
            assert heard.moment["cache"]["dir"] == str(daemon.cache_dir)
        for path in ("/v1/status", "/v1/session", "/v1/shards"):
            assert http.get(root + path, timeout=GUARD_S).status_code == 404
        assert http.post(root + LIVE_PATH, timeout=GUARD_S).status_code == 405
        taken = shardcache("dashboard", "--no-open", "--port", str(port), socket=daemon.socket)
        assert taken.code == 2
        assert "choose another --port" in taken.err
        daemon.stop()  # this is the last test here
        assert http.get(root + LIVE_PATH, timeout=GUARD_S).status_code == 502
        process.send_signal(signal.SIGINT)
        assert process.wait(GUARD_S) == 130
