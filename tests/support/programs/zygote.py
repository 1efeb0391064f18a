"""Starts `shardcache` fast: one process imports everything and forks for each command.

As a program it reads a JSON line for each command to start, and answers with its pid; another for
each that has ended, and answers with its exit status.
"""

import atexit
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import uvloop

from reached import record
from support import TESTS
from support.cluster import network
from support.disks.shim import HAS_CC, library, rule_this_process
from support.programs import forked_helpers
from support.programs.forked_helpers import ForkingLoop
from support.programs.guard import GUARD_S
from support.programs.processes import has_ended

_IMPORTED = (
    "shardcache.daemon.running",
    "shardcache.cli.doctor.runner",
    "shardcache.cli.getting.fetch_into",
    "shardcache.cli.monitoring.top_screen",
    "shardcache.origin.filesystems.local_origin",
    "shardcache.origin.http.web_origin",
    "shardcache.writing.conversion",
    "shardcache.writing.writer",
    "awscrt.checksums",  # and what these import when they need it
    "aiohappyeyeballs",
)
"""Modules that daemons and commands import when they need them."""


class Forked:
    """A child of the zygote, with as much of Popen's interface as its users need."""

    def __init__(self, pid: int, reap: Callable[[int], int]) -> None:
        self.pid = pid
        self._reap = reap
        self._pidfd = os.pidfd_open(pid)  # it is there at least until it is reaped
        self._status: int | None = None

    def __del__(self) -> None:
        os.close(self._pidfd)

    def poll(self) -> int | None:
        """Return its exit status, negative where a signal ended it, or None while it runs."""
        if self._status is None and has_ended(self._pidfd, 0):
            self._status = self._reap(self.pid)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status when it has ended. Raises subprocess.TimeoutExpired."""
        status = self.poll() if has_ended(self._pidfd, timeout) else None
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return status

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)


class Zygote(AbstractContextManager["Zygote"]):
    """A context manager; `Daemon` uses `spawn`, `support.programs.cli` uses `run`."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            with self._process:
                # The end of its input would not do: other forks may hold the other end of that.
                self._process.kill()
            self._process = None

    def spawn(self, args: Sequence[str], env: Mapping[str, str], log: Path) -> Forked:
        """Start `python -m shardcache` with these arguments.

        In `env`, SHIM_CONTROL puts it under a shim, and NETWORK, the path of a namespace, into that
        network.
        """
        return self._start(args, env, log, log)

    def run(self, args: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run `python -m shardcache` like `subprocess.run`. Raises subprocess.TimeoutExpired."""
        with tempfile.TemporaryDirectory(prefix="shardcache-run-") as name:
            out = Path(name, "out")
            err = Path(name, "err")
            command = self._start(args, env, out, err)
            try:
                code = command.wait(GUARD_S)
            except BaseException:
                command.kill()
                command.wait()
                raise
            return subprocess.CompletedProcess(args, code, out.read_text(), err.read_text())

    def _start(self, args: Sequence[str], env: Mapping[str, str], out: Path, err: Path) -> Forked:
        request = {
            "args": list(args),
            "env": dict(env),
            "out": str(out),
            "err": str(err),
            "folder": str(Path.cwd()),
        }
        return Forked(self._ask(request), self._reap)

    def _reap(self, pid: int) -> int:
        return self._ask({"reap": pid})

    def _ask(self, request: Mapping[str, object]) -> int:
        with self._asking:
            self._process = self._process or self._begin()
            assert self._process.stdin
            assert self._process.stdout
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline())

    @staticmethod
    def _begin() -> subprocess.Popen[str]:
        preload = {"LD_PRELOAD": str(library())} if HAS_CC else {}
        # It outlives the test that starts its first daemon, maybe in another network.
        with network.at_home():
            return subprocess.Popen(
                [sys.executable, "-m", "support.programs.zygote"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **preload, "PYTHONPATH": str(TESTS)},
            )


def main() -> None:
    _import_all()
    gc.freeze()  # a child then need not traverse all that was imported when it ends
    for line in sys.stdin:
        request = json.loads(line)
        if "reap" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                _become_command(request)
        print(answer, flush=True)


def _import_all() -> None:
    forked_helpers.set_aside()
    for name in _IMPORTED:
        import_module(name)
    from shardcache.cli.main import app
    from shardcache.cli.starting.settings_options import settings_options
    from shardcache.origin.s3 import s3_origin

    s3_origin.load()
    settings_options()
    assert all(app.commands.values())  # each is imported as it is looked up


def _become_command(request: dict[str, Any]) -> NoReturn:
    """Run the command, and end this process with its status."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for target, path, how in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["out"], flags),
        (2, request["err"], flags),
    ):
        fd = os.open(path, how)
        os.dup2(fd, target)
        os.close(fd)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    if path := request["env"].get("REACHED_FILE"):
        record(Path(path))
    if path := request["env"].get("NETWORK"):
        network.enter(Path(path))
    if control := request["env"].get("SHIM_CONTROL"):
        rule_this_process(Path(control))
    uvloop.new_event_loop = ForkingLoop
    from shardcache.cli.main import app as commands

    status = 0
    try:
        commands(request["args"], prog_name="shardcache")
    except SystemExit as exn:
        if not isinstance(exn.code, int):
            raise
        status = exn.code
    _end(status)


def _end(status: int) -> NoReturn:
    """Do what an interpreter does at its end, except for freeing modules, which is slow."""
    # Wait for threads, as processes of multiprocessing do.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
