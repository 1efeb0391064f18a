"""The daemon's processes as programs: lines in, lines out, killed, or not to be started."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest

from shardcache.errors import CacheError
from shardcache.shared.wording.remedies import NO_PROCESS_REMEDY
from shardcache.store.indexing.indexer import TokensRequest
from shardcache.transport.between import descriptors
from shardcache.transport.between.messages import (
    Body,
    Message,
    Request,
    decoded,
    encoded,
    request_to_json,
)
from shardcache.transport.between.parts import Parts
from support.cases import first_quick
from support.network.scripted_server import Reply, ScriptedServer, answer
from support.programs.daemon import Daemon, eventually, spawn
from support.programs.guard import GUARD_S
from support.programs.processes import running, wait_until_ended
from support.programs.raw_session import RawSession
from support.shards.tars import make_tar, random_samples
from support.stores.buckets import Bucket
from support.stores.mischief import Ending

FETCHING = "shardcache.transport.worker"
INDEXING = "shardcache.store.indexing.indexer"
IDLE = {FETCHING: 2, INDEXING: 1}
DATA = bytes(range(256)) * 4096
FIRST = 1000
SECOND = 300_000
_PIPE_BYTES = 1024 * 1024


class Program:
    """A worker's process; a context manager. It is killed where it says nothing for too long."""

    def __init__(self) -> None:
        self.files, passed = descriptors.channel()
        with passed:
            command = (sys.executable, "-P", "-m", FETCHING, str(os.getpid()), str(passed.fileno()))
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(passed.fileno(),)
            )
        self._guard = threading.Timer(GUARD_S, self._process.kill)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input = self._process.stdin
        self._output = self._process.stdout

    def __enter__(self) -> "Program":
        self._guard.start()
        assert decoded(self._output.readline()) == {"is": "up"}
        return self

    def __exit__(self, *_exc: object) -> None:
        self._guard.cancel()
        self._process.kill()
        self._process.communicate()
        self.files.close()

    def send(self, *messages: Message) -> None:
        """Send messages. Blocks while the worker takes none."""
        self._input.write(b"".join(map(encoded, messages)))
        self._input.flush()

    def outcome(self) -> Message:
        """Return the end of a request."""
        for line in self._output:
            message = decoded(line)
            if message["is"] != "progress":
                return message
        pytest.fail("no outcome")

    def wait_received(self, number: int, received_bytes: int) -> None:
        """Return once the worker has reported that a request's body has that many bytes."""
        for line in self._output:
            message = decoded(line)
            assert message["is"] == "progress"
            if {each: received for each, received, *_ in message["counts"]}.get(
                number, 0
            ) >= received_bytes:
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
    path = tmp_path / "a.part"
    more = threading.Event()
    path.write_bytes(bytes(len(DATA)))
    whole = answer(DATA)
    first_bytes = len(whole) - len(DATA) + FIRST

    def send_more(plain: socket.socket) -> None:
        more.wait(GUARD_S)
        plain.sendall(whole[first_bytes : first_bytes + SECOND])

    with (
        ScriptedServer(Reply(whole[:first_bytes], Ending.HANG, send_more)) as server,
        Program() as program,
    ):
        body = Body(Parts(str(path), None, len(DATA), 0, len(DATA)), 206, {})
        request = request_to_json(Request("GET", server.url(), {}), body)
        program.send({"do": "ask", "id": 7, "limit_bytes": None, "prompt": False, **request})
        program.wait_received(7, FIRST)
        with program.flooded():
            more.set()
            program.wait_received(7, FIRST + SECOND)


def written(server: ScriptedServer, program: Program, sent_fd: int, named_fd: int) -> Message:
    """Return a request's outcome if the message names another inode than the descriptor's."""
    descriptors.send(program.files, sent_fd)
    request = request_to_json(
        Request("GET", server.url(), {}), Body(Parts("", None, len(DATA), 0, len(DATA)), 206, {})
    )
    file = descriptors.identity(named_fd)
    program.send(
        {"do": "ask", "id": 7, "limit_bytes": None, "prompt": False, "file": file, **request}
    )
    return program.outcome()


@pytest.fixture
def nameless() -> Iterator[tuple[int, int]]:
    """Two files without a name."""
    first_fd = os.memfd_create("first")
    second_fd = os.memfd_create("second")
    yield first_fd, second_fd
    os.close(first_fd)
    os.close(second_fd)


def test_file_without_a_name_is_written_by_its_descriptor(nameless: tuple[int, int]) -> None:
    """No path of it is needed, nor any /proc."""
    fd, _ = nameless
    with ScriptedServer(answer(DATA)) as server, Program() as program:
        assert written(server, program, fd, fd)["is"] == "answer"
    assert os.pread(fd, len(DATA) + 1, 0) == DATA


def test_end_of_a_short_body_states_when_its_first_byte_came(nameless: tuple[int, int]) -> None:
    """So that the first bytes need no message of their own."""
    fd, _ = nameless
    asked_s = time.monotonic()
    with ScriptedServer(answer(DATA)) as server, Program() as program:
        outcome = written(server, program, fd, fd)
    assert outcome["received_bytes"] == len(DATA)
    assert asked_s <= outcome["first_byte_s"] <= time.monotonic()


def test_descriptor_of_another_file_than_the_request_names_is_not_written(
    nameless: tuple[int, int],
) -> None:
    """The request fails as one whose file cannot be written, and requests nothing."""
    wrong_fd, fd = nameless
    with ScriptedServer(answer(DATA)) as server, Program() as program:
        outcome = written(server, program, wrong_fd, fd)
    assert outcome["is"] == "disk"
    assert outcome["reason"] == "the descriptor of another file has arrived"
    assert os.fstat(wrong_fd).st_size == 0


def test_request_whose_descriptor_is_missing_fails(nameless: tuple[int, int]) -> None:
    """Rather than wait for it, which would keep all other requests waiting."""
    fd, _ = nameless
    request = request_to_json(
        Request("GET", "http://127.0.0.1:1/", {}), Body(Parts("", None, 1, 0, 1), 206, {})
    )
    with Program() as program:
        file = descriptors.identity(fd)
        program.send(
            {"do": "ask", "id": 7, "limit_bytes": None, "prompt": False, "file": file, **request}
        )
        assert program.outcome()["is"] == "disk"


@pytest.mark.parametrize("module", first_quick([FETCHING, INDEXING]))
def test_worker_of_a_killed_daemon_exits_silently(module: str, tmp_path: Path) -> None:
    """The pipe may close before the kernel kills the worker, but no traceback is logged."""
    reading, writing = os.pipe()
    os.close(reading)
    missing = TokensRequest(
        str(tmp_path / "a.tar"), str(tmp_path / "a.idx"), "s3://bucket/a.tar", "npy"
    )
    asked = json.dumps(asdict(missing)).encode() + b"\n" if module.endswith("indexer") else b""
    files, passed = descriptors.channel()
    with files, passed:
        command = (sys.executable, "-P", "-m", module, str(os.getpid()), str(passed.fileno()))
        ran = subprocess.run(
            command,
            input=asked,
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=GUARD_S,
            check=False,
            pass_fds=(passed.fileno(),),
        )
    os.close(writing)
    assert ran.stderr == b""


def kill(daemon: Daemon, *modules: str) -> None:
    """Kill the daemon's idle processes that run these modules."""
    for pid in {pid for module in modules for pid in running(daemon.pid, module)}:
        os.kill(pid, signal.SIGKILL)
        wait_until_ended(pid)


def refused(session: RawSession, url: str) -> str:
    """Return the message of the error that refuses a shard, naming it and the remedy."""
    session.plan([url], [0])
    error = session.ask("lease", position=0)["error"]
    assert error["code"] == CacheError.code
    assert error["url"] == url
    assert error["remedy"] == NO_PROCESS_REMEDY
    return str(error["message"])


@pytest.mark.slow
def test_killed_processes_are_replaced_or_named(moto: Bucket, tmp_path: Path) -> None:
    """Killed while they are idle, as the kernel does when memory is short: others take their place.

    Where none can be started, an error says so; once it is possible again, shards come without a
    restart.
    """
    python = tmp_path / "python"
    real = Path(sys.executable).resolve()
    python.symlink_to(real)
    body = make_tar(random_samples(2))
    urls = [moto.put(f"{number}.tar", body) for number in range(3)]
    env = moto.env() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with (
        Daemon(tmp_path, env=env, spawn=partial(spawn, python=str(python))) as daemon,
        RawSession(daemon) as session,
    ):

        def read(url: str) -> bytes:
            session.plan([url], [0])
            return Path(session.take(0)["path"]).read_bytes()

        eventually(
            lambda: all(len(running(daemon.pid, each)) == count for each, count in IDLE.items())
        )
        kill(daemon, FETCHING, INDEXING)
        assert read(urls[0]) == body
        python.unlink()
        kill(daemon, FETCHING)
        for url in (urls[1], "http://127.0.0.1:1/b.tar"):
            assert "cannot start a transport worker" in refused(session, url)
        python.symlink_to(real)
        assert read(urls[1]) == body
        python.unlink()
        kill(daemon, INDEXING)
        assert "cannot start a process" in refused(session, urls[2])
        python.symlink_to(real)
        assert read(urls[2]) == body
