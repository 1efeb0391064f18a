"""Remains and requirements of `shardcache demo`. That its checks pass is what `make demo` shows."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.programs.cli import clean_environment


def processes_that_name(text: str) -> list[str]:
    """Return the command lines of this machine's processes that contain `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        if text in command:
            found.append(command)
    return found


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: pytest's own may be too long for the demo's socket."""
    with tempfile.TemporaryDirectory(prefix="shardcache-") as name:
        yield Path(name)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_interrupted_demo_leaves_nothing(number: signal.Signals, folder: Path) -> None:
    """Stopped while its jobs run, the demo ends them and its daemon, removes its files, and exits 130."""
    command = [sys.executable, "-m", "shardcache", "demo"]
    env = clean_environment({"TMPDIR": str(folder)})
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        assert any(line.startswith("training") for line in demo.stdout)
        assert processes_that_name(str(folder))  # the daemon at least
        demo.send_signal(number)
        assert demo.wait() == 130
    assert processes_that_name(str(folder)) == []
    assert list(folder.iterdir()) == []


def test_missing_packages_are_named() -> None:
    """Without the extra, the demo says what to install."""
    code = "import sys; sys.modules['moto'] = None; from shardcache.cli.main import app; app(['demo'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "moto" in done.stderr and "pip install 'shardcache[demo]'" in done.stderr
