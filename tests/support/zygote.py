"""Starts daemons in milliseconds: one process imports everything, and forks a child for each daemon.

As a program it reads a JSON line for each daemon to start, and answers with its pid.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from support.shim import HAS_CC, library, rule_this_process


class Forked:
    """A child of the zygote, with as much of Popen's interface as `Daemon` needs. Its exit status is not known."""

    returncode = -1

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._pidfd: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pidfd = None

    def __del__(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)

    def poll(self) -> int | None:
        """Return None while it runs."""
        return self.returncode if self._ended(0) else None

    def wait(self, timeout: float | None = None) -> int:
        """Return when it has ended. Raises subprocess.TimeoutExpired."""
        if not self._ended(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return self.returncode

    def kill(self) -> None:
        """Send SIGKILL."""
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _ended(self, timeout_s: float | None) -> bool:
        return self._pidfd is None or bool(select.select([self._pidfd], [], [], timeout_s)[0])


class Zygote:
    """A context manager; `spawn` is what `Daemon` takes to start its process by."""

    def __init__(self) -> None:
        self._asking = threading.Lock()

    def __enter__(self) -> Self:
        preload = {"LD_PRELOAD": str(library())} if HAS_CC else {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **preload, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def spawn(self, args: Sequence[str], env: Mapping[str, str], log: Path) -> Forked:
        """Start `python -m shardcache` with these arguments; in `env`, SHIM_CONTROL puts it under a shim."""
        with self._asking:
            assert self._process.stdin and self._process.stdout
            request = {"args": list(args), "env": dict(env), "log": str(log)}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return Forked(int(self._process.stdout.readline()))


def main() -> None:
    """Answer requests until there are no more."""
    _import_all()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children: they leave no zombies
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _become_daemon(json.loads(line))
        print(pid, flush=True)


def _import_all() -> None:
    from shardcache import daemon
    from shardcache.cli.app import app as commands
    from shardcache.origin import fsspec, http, s3, s3_session

    assert all((daemon, commands, fsspec, http, s3))
    s3_session.descriptions()


def _become_daemon(request: dict[str, Any]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    status = 1
    try:
        log_fd = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for fd, target in ((os.open(os.devnull, os.O_RDWR), 0), (log_fd, 1), (log_fd, 2)):
            os.dup2(fd, target)
        os.environ.clear()
        os.environ.update(request["env"])
        if control := request["env"].get("SHIM_CONTROL"):
            rule_this_process(Path(control))
        from shardcache.cli.app import app as commands

        commands(request["args"], standalone_mode=False)
        status = 0
    except BaseException:  # noqa: BLE001  # nothing of a child may go on in the zygote's place
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
