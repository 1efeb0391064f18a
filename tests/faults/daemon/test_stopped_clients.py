"""A client that was stopped beyond its time limit, as by a debugger, goes on where it was."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cases import first_quick
from support.programs.daemon import Daemon

LIMIT_S = 0.2
DATA = bytes(range(256)) * 100

# Reads two bytes of a file again and again; the n-th time, it stops itself before it sends its n-th
# message.
CLIENT = """
import os, signal, sys

from shardcache_client.files.filesystem import ShardcacheFileSystem

sent = 0
stops_at = 0

def watch(frame, event, called):
    global sent
    if event == "c_call" and called.__name__ == "send":
        sent += 1
        if sent == stops_at:
            os.kill(os.getpid(), signal.SIGSTOP)

def read():
    timeout_s = float(sys.argv[3])
    files = ShardcacheFileSystem(
        "file", socket=sys.argv[1], timeout_s=timeout_s, skip_instance_cache=True
    )
    with files.open(sys.argv[2]) as file:
        file.seek(10)
        return file.read(2)

read()
sys.setprofile(watch)
while sent >= stops_at:
    sent = 0
    stops_at += 1
    sys.stdout.buffer.write(read())
"""


@pytest.fixture
def node() -> Iterator[Daemon]:
    with (
        tempfile.TemporaryDirectory(prefix="shardcache-stop-") as folder,
        Daemon(Path(folder)) as running,
    ):
        yield running


@pytest.mark.parametrize("restarts", first_quick([False, True]))
def test_client_that_was_stopped_beyond_its_limit_reads_on(
    node: Daemon, tmp_path: Path, restarts: bool
) -> None:
    """Any of its messages may be next, and its connection may be lost meanwhile."""
    path = tmp_path / "data"
    path.write_bytes(DATA)
    arguments = [sys.executable, "-c", CLIENT, str(node.socket), str(path), str(LIMIT_S)]
    stops = 0
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as client:
        while True:
            _, status = os.waitpid(client.pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                break
            stops += 1
            time.sleep(LIMIT_S)
            if restarts:
                node.restart()
            client.send_signal(signal.SIGCONT)
        client.returncode = os.waitstatus_to_exitcode(status)
        assert client.stdout is not None
        assert client.stdout.read() == DATA[10:12] * (stops + 1)
    assert client.returncode == 0
    assert stops > 5, "a handshake, a greeting and a question, and then as much for the range"
