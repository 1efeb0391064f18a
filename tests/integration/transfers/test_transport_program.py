"""A transport worker as the program that it is: lines of messages in, lines of messages out."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from shardcache.store.indexing import TokensRequest
from shardcache.transport.messages import Body, Message, Request, decoded, encoded, request_to_json
from shardcache.transport.parts import Parts
from support.network.scripted_server import Reply, ScriptedServer, answer
from support.programs.guard import GUARD_S
from support.stores.mischief import Ending

DATA = bytes(range(256)) * 4096
FIRST, SECOND = 1000, 300_000
_PIPE_BYTES = 1024 * 1024


class Program:
    """A worker's process; a context manager. It is killed where it says nothing for too long."""

    def __init__(self) -> None:
        command = (sys.executable, "-P", "-m", "shardcache.transport.worker", str(os.getpid()))
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._guard = threading.Timer(GUARD_S, self._process.kill)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout

    def __enter__(self) -> Program:
        self._guard.start()
        assert decoded(self._output.readline()) == {"is": "up"}
        return self

    def __exit__(self, *_exc: object) -> None:
        self._guard.cancel()
        self._process.kill()
        self._process.communicate()

    def send(self, *messages: Message) -> None:
        """Send messages. Blocks while the worker takes none."""
        self._input.write(b"".join(map(encoded, messages)))
        self._input.flush()

    def wait_received(self, number: int, received_bytes: int) -> None:
        """Return once the worker has reported that a request's body has that many bytes."""
        for line in self._output:
            message = decoded(line)
            assert message["is"] == "progress"
            if {each: received for each, received, _ in message["counts"]}.get(number, 0) >= received_bytes:
                return
        pytest.fail("no report")

    @contextmanager
    def flooded(self) -> Iterator[None]:
        """Have messages wait in its input all the while; nothing can be sent afterwards."""
        fcntl.fcntl(self._input, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        message = encoded({"do": "distrust", "before_s": 0.0}).decode().strip()
        with subprocess.Popen(["yes", message], stdout=self._input) as flood:
            try:
                yield
            finally:
                flood.kill()


def test_progress_is_reported_while_messages_keep_coming(tmp_path: Path) -> None:
    """A daemon that has much to say does not take a download for a stalled one."""
    path, more = tmp_path / "a.part", threading.Event()
    path.write_bytes(bytes(len(DATA)))
    whole = answer(DATA)
    first_bytes = len(whole) - len(DATA) + FIRST

    def send_more(plain: socket.socket) -> None:
        more.wait(GUARD_S)
        plain.sendall(whole[first_bytes : first_bytes + SECOND])

    with ScriptedServer(Reply(whole[:first_bytes], Ending.HANG, send_more)) as server, Program() as program:
        body = Body(Parts(str(path), None, len(DATA), 0, len(DATA)), 206, {})
        request = request_to_json(Request("GET", server.url(), {}), body)
        program.send({"do": "ask", "id": 7, "limit_bytes": None, "prompt": False, **request})
        program.wait_received(7, FIRST)
        with program.flooded():
            more.set()
            program.wait_received(7, FIRST + SECOND)


@pytest.mark.parametrize("module", ["shardcache.transport.worker", "shardcache.store.indexing"])
def test_worker_of_a_killed_daemon_exits_silently(module: str, tmp_path: Path) -> None:
    """The daemon's end of the pipe may close before the kernel kills the program: no traceback in the daemon's log."""
    reading, writing = os.pipe()
    os.close(reading)
    missing = TokensRequest(str(tmp_path / "a.tar"), str(tmp_path / "a.idx"), "s3://bucket/a.tar", "npy")
    asked = json.dumps(asdict(missing)).encode() + b"\n" if module.endswith("indexing") else b""
    command = (sys.executable, "-P", "-m", module, str(os.getpid()))
    ran = subprocess.run(command, input=asked, stdout=writing, stderr=subprocess.PIPE, timeout=GUARD_S, check=False)
    os.close(writing)
    assert ran.stderr == b""
