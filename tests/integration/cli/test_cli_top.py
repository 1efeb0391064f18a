"""`shardcache top` against a real daemon: in a pipe, as JSON lines, and live on a terminal."""

from __future__ import annotations

import getpass
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from support.programs.cli import clean_environment, shardcache
from support.programs.daemon import Daemon, eventually
from support.programs.raw_session import RawSession
from support.shards.tars import write_shards

LEAVE_ALTERNATE_SCREEN = "\x1b[?1049l"


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, command: Sequence[str], *, columns: int = 120) -> None:
        self._near, far = pty.openpty()
        env = clean_environment({"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "30"})
        self._process = subprocess.Popen(command, env=env, stdin=far, stdout=far, stderr=far)
        os.close(far)
        self.seen = ""

    def read_until(self, text: str) -> None:
        """Take what is shown until `text` has been."""
        while text not in self.seen:
            self.seen += os.read(self._near, 65536).decode(errors="replace")

    def press(self, key: str) -> None:
        """Type a key."""
        os.write(self._near, key.encode())

    def interrupt(self) -> None:
        """Send what Ctrl-C sends."""
        self._process.send_signal(signal.SIGINT)

    def wait(self) -> int:
        """Return the exit code once all that was shown is read."""
        try:
            self.read_until("never shown")
        except OSError:  # nobody has the other end open any more
            return self._process.wait()
        raise AssertionError("a terminal has no other end")

    def close(self) -> None:
        """End it, if it still runs."""
        self._process.kill()
        self._process.wait()
        os.close(self._near)


INTERVAL = "0.1"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """Run a daemon."""
    with Daemon(tmp_path) as daemon:
        yield daemon


def command(daemon: Daemon, *flags: str) -> list[str]:
    """Return the command line that watches a daemon."""
    return [sys.executable, "-m", "shardcache", "top", "--interval", INTERVAL, "--socket", str(daemon.socket), *flags]


@contextmanager
def lines_of(daemon: Daemon) -> Iterator[Iterator[dict[str, Any]]]:
    """Run `top --json` and hand out its lines as they come."""
    with subprocess.Popen(command(daemon, "--json"), env=clean_environment({}), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield map(json.loads, process.stdout)
        finally:
            process.kill()


@pytest.fixture
def terminal(daemon: Daemon) -> Iterator[Terminal]:
    """Watch the daemon on a terminal."""
    terminal = Terminal(command(daemon))
    yield terminal
    terminal.close()


def test_once_prints_a_frame_with_rates(daemon: Daemon) -> None:
    """One frame without any terminal's codes, the daemon's folder in it, rates over an interval, exit 0."""
    ran = shardcache("top", "--once", "--interval", INTERVAL, socket=daemon.socket)
    assert ran.code == 0 and ran.out.startswith("shardcache ") and f"pid {daemon.pid}" in ran.out
    assert str(daemon.cache_dir) in ran.out and "requests/s" in ran.out and "\x1b" not in ran.out


def test_without_a_terminal_one_frame_is_printed(daemon: Daemon) -> None:
    """In a pipe, `top` ends by itself."""
    ran = shardcache("top", "--interval", INTERVAL, socket=daemon.socket)
    assert ran.code == 0 and ran.out.count("pid ") == 1


def test_once_as_json_is_one_page_with_its_rates(daemon: Daemon) -> None:
    """A script gets the whole status page and the rates of one interval."""
    page = shardcache("top", "--once", "--json", "--interval", INTERVAL, socket=daemon.socket).json
    assert page["pid"] == daemon.pid and page["cache"]["dir"] == str(daemon.cache_dir)
    assert page["rates"]["interval_s"] > 0 and page["rates"]["origin_bytes_per_s"] == 0


def test_lines_of_top_add_up_to_what_a_warm_fetches(daemon: Daemon, tmp_path: Path) -> None:
    """The rates of all lines, times their intervals, are the bytes that came."""
    (tmp_path / "store").mkdir()
    shards = write_shards(tmp_path / "store", 3, samples_per_shard=10)
    size_bytes = sum(path.stat().st_size for path in shards)
    with lines_of(daemon) as lines:
        next(lines)
        assert shardcache("warm", *(f"file://{path}" for path in shards), socket=daemon.socket).code == 0
        came_bytes = 0.0
        for line in lines:
            rates = line["rates"]
            came_bytes += rates["origin_bytes_per_s"] * rates["interval_s"]
            if came_bytes > size_bytes * 0.9:
                break
    assert came_bytes == pytest.approx(size_bytes, rel=0.01)


def test_lines_resume_after_a_restart(daemon: Daemon) -> None:
    """While the daemon is away a line is an error; when it is back, pages come again, of the new process."""
    with lines_of(daemon) as lines:
        first = next(lines)
        daemon.kill()
        assert next(line["error"]["code"] for line in lines if "error" in line) == "no_daemon"
        daemon.start()
        back = next(line for line in lines if "error" not in line)
        assert back["pid"] == daemon.pid != first["pid"]


def test_top_without_a_daemon_exits_3(tmp_path: Path) -> None:
    """Where none is there to begin with, it ends as every command does."""
    path = tmp_path / "none.sock"
    ran = shardcache("top", socket=path)
    assert (ran.code, ran.out) == (3, "") and f"shardcache serve --socket {path}" in ran.err


def test_an_interval_of_zero_is_a_usage_error() -> None:
    """A daemon is not to be asked without a pause: exit 2."""
    assert shardcache("top", "--interval", "0").code == 2


def test_q_ends_top_and_restores_the_terminal(terminal: Terminal, daemon: Daemon) -> None:
    """Live on the alternate screen until q: exit 0."""
    terminal.read_until(f"pid {daemon.pid}")
    terminal.press("q")
    assert terminal.wait() == 0 and LEAVE_ALTERNATE_SCREEN in terminal.seen
    assert "Traceback" not in terminal.seen


def test_ctrl_c_ends_top_without_a_traceback(terminal: Terminal, daemon: Daemon) -> None:
    """Ctrl-C leaves the alternate screen too, and exits as an interrupted command does."""
    terminal.read_until(f"pid {daemon.pid}")
    terminal.interrupt()
    assert terminal.wait() == 128 + signal.SIGINT and LEAVE_ALTERNATE_SCREEN in terminal.seen
    assert "Traceback" not in terminal.seen


def test_top_reports_a_lost_daemon_and_finds_the_next(terminal: Terminal, daemon: Daemon) -> None:
    """The frame says that nobody answers, goes on trying, and shows the daemon that was started anew."""
    terminal.read_until(f"pid {daemon.pid}")
    daemon.kill()
    terminal.read_until("retrying")
    daemon.start()
    terminal.read_until(f"pid {daemon.pid}")
    terminal.press("q")
    assert terminal.wait() == 0


def test_80_columns_hold_whole_names(daemon: Daemon, tmp_path: Path) -> None:
    """On such a terminal no line is longer; jobs have their names and users, those that ended are one line."""
    (tmp_path / "store").mkdir()
    [shard] = write_shards(tmp_path / "store", 1, samples_per_shard=10)
    name = "resnet50-imagenet21k-482113"
    for ended in ("prepare", "evaluate"):
        RawSession(daemon, job=ended).close()
    eventually(lambda: daemon.sessions() == 0)
    with RawSession(daemon, job=name) as session:
        session.plan([f"file://{shard}"], [0])
        session.take(0)
        terminal = Terminal(command(daemon, "--once"), columns=80)
        try:
            assert terminal.wait() == 0
        finally:
            terminal.close()
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in terminal.seen.splitlines()]
    assert all(cell_len(row) <= 80 for row in rows)
    [row] = [row for row in rows if row.startswith(f"{name}  ")]
    assert row.split()[1] == getpass.getuser()
    assert "2 jobs without readers: evaluate, prepare" in rows, rows
