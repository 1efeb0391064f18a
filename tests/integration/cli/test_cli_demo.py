"""Remains of `shardcache demo`. That its checks pass is what `make demo` shows."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from support.programs.cli import clean_environment, shardcache
from support.programs.processes import children, wait_until_ended


def contents(folder: Path) -> dict[Path, bytes]:
    """Return each file below a folder, by its path there."""
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.slow
def test_interrupted_demo_leaves_nothing() -> None:
    """It ends its jobs and daemon in mid-run, removes its files, and exits 130."""
    # Pytest's own path may be too long for the demo's socket.
    with tempfile.TemporaryDirectory() as folder:
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


@pytest.mark.slow
def test_data_of_the_pages_is_the_same_each_time(tmp_path: Path) -> None:
    """Keys, labels and numbers of samples are fixed, and a folder with files is left alone."""
    told = shardcache("demo", "--data", str(tmp_path / "data"))
    assert told.code == 0, told.err
    assert told.out.endswith(": captions, lines.txt, photos, train, val\n")
    assert shardcache("demo", "--data", str(tmp_path / "again")).code == 0
    files = contents(tmp_path / "data")
    assert len(files) > 600
    assert contents(tmp_path / "again") == files

    refused = shardcache("demo", "--data", str(tmp_path / "data"))
    assert refused.code == 2
    assert "is not empty" in refused.err
