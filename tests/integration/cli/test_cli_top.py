"""`shardcache top` against a real daemon: in a pipe, as JSON lines, and live on a terminal."""

import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from support.programs.cli import clean_environment, shardcache
from support.programs.daemon import Daemon

LEAVE_ALTERNATE_SCREEN = "\x1b[?1049l"
INTERVAL = "0.1"


def command(daemon: Daemon, *flags: str) -> list[str]:
    """Return the command line that watches a daemon."""
    return [
        sys.executable,
        "-m",
        "shardcache",
        "top",
        "--interval",
        INTERVAL,
        "--socket",
        str(daemon.socket),
        *flags,
    ]


@contextlib.contextmanager
def lines_of(daemon: Daemon) -> Iterator[Iterator[dict[str, Any]]]:
    """Run `top --json` and hand out its lines as they come."""
    with subprocess.Popen(
        command(daemon, "--json"), env=clean_environment({}), stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        try:
            yield map(json.loads, process.stdout)
        finally:
            process.kill()


def test_once_prints_a_frame_with_rates(daemon: Daemon) -> None:
    """The frame has rates and no terminal codes, and --json prints the whole status page."""
    ran = shardcache("top", "--once", "--interval", INTERVAL, socket=daemon.socket)
    assert ran.code == 0
    assert ran.out.startswith("shardcache ")
    assert f"pid {daemon.pid}" in ran.out
    assert str(daemon.cache_dir) in ran.out
    assert "requests/s" in ran.out
    assert "\x1b" not in ran.out
    page = shardcache("top", "--once", "--json", "--interval", INTERVAL, socket=daemon.socket).json
    assert page["pid"] == daemon.pid
    assert page["cache"]["dir"] == str(daemon.cache_dir)
    assert page["rates"]["interval_s"] > 0
    assert page["rates"]["origin_bytes_per_s"] == 0


@pytest.mark.slow
def test_lines_resume_after_a_restart(daemon: Daemon) -> None:
    """A line is an error while the daemon is away, and shows the new process afterwards."""
    with lines_of(daemon) as lines:
        first = next(lines)
        daemon.kill()
        assert next(line["error"]["code"] for line in lines if "error" in line) == "no_daemon"
        daemon.start()
        back = next(line for line in lines if "error" not in line)
        assert back["pid"] == daemon.pid != first["pid"]


def test_q_ends_top_and_restores_the_terminal(daemon: Daemon) -> None:
    """Live on the alternate screen until q: exit 0."""
    near, far = pty.openpty()
    env = clean_environment({"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "30"})
    with subprocess.Popen(command(daemon), env=env, stdin=far, stdout=far, stderr=far) as process:
        os.close(far)
        seen = ""
        while f"pid {daemon.pid}" not in seen:
            seen += os.read(near, 65536).decode(errors="replace")
        os.write(near, b"q")
        with contextlib.suppress(OSError):  # nobody has the other end open any more
            while piece := os.read(near, 65536):
                seen += piece.decode(errors="replace")
        assert process.wait() == 0
        assert LEAVE_ALTERNATE_SCREEN in seen
        assert "Traceback" not in seen
    os.close(near)
