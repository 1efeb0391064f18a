"""Remains of `shardcache demo`. That its checks pass is what `make demo` shows."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from support.programs.cli import clean_environment
from support.programs.processes import children, wait_until_ended


@pytest.mark.slow
def test_interrupted_demo_leaves_nothing() -> None:
    """Stopped while its jobs run, the demo ends them and its daemon, removes its files, and exits 130."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own path may be too long for the demo's socket
        command = [sys.executable, "-m", "shardcache", "demo"]
        env = clean_environment({"TMPDIR": folder})
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as demo:
            assert demo.stdout is not None
            assert any(line.startswith("training") for line in demo.stdout)
            started = children(demo.pid)
            assert started  # the daemon at least
            demo.send_signal(signal.SIGTERM)
            assert demo.wait() == 130
        for pid in started:
            wait_until_ended(pid)
        assert list(Path(folder).iterdir()) == []
