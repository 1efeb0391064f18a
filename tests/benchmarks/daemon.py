"""A real daemon, started as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from support.programs.daemon import UnixConnection

_START_LIMIT_S = 120.0
_STOP_LIMIT_S = 30.0


class Daemon:
    """`shardcache serve` over a cache folder; entering returns once it answers.

    Attributes:
        ready_s: from the start of the process to its first answer; set on entering.
        socket: where it listens; set on entering.
        pid: of the daemon; set on entering.
    """

    ready_s: float
    socket: Path
    pid: int

    def __init__(self, cache_dir: Path, capacity: str, env: Mapping[str, str] | None = None) -> None:
        self._cache_dir = cache_dir
        self._capacity = capacity
        self._env = {**os.environ, **(env or {})}
        # An installed package has its bytecode beside it; a checkout is to start like one.
        self._env.pop("PYTHONDONTWRITEBYTECODE", None)
        self._stack = ExitStack()

    def __repr__(self) -> str:
        return f"<Daemon {self._cache_dir}>"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            # Not below the cache folder: the path of a Unix socket has 107 characters at most.
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardcache-bench-")))
            self.socket = folder / "socket"
            started_s = time.perf_counter()
            process = self._start(folder / "log")
            stack.callback(_stop, process)
            self._wait_until_it_answers(process, folder / "log", started_s + _START_LIMIT_S)
            self.ready_s = time.perf_counter() - started_s
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()

    def get(self, path: str) -> Any:
        """Return the JSON answer of the admin API. Raises OSError while nothing listens."""
        return json.loads(self._request("GET", path))

    def warm(self, url: str) -> None:
        """Fetch shards into the cache, as `shardcache warm` does. Raises RuntimeError if one cannot be fetched."""
        *_, done = self._request("POST", "/v1/warm", json.dumps({"urls": [url]})).splitlines()
        if json.loads(done).get("failed") != 0:
            raise RuntimeError(f"{url} cannot be fetched: {done.decode()}")

    def _request(self, method: str, path: str, body: str | None = None) -> bytes:
        connection = UnixConnection(self.socket)
        try:
            connection.request(method, path, body)
            return connection.getresponse().read()
        finally:
            connection.close()

    def _start(self, log: Path) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "shardcache", "serve", "--cache-dir", str(self._cache_dir)),
            *("--capacity", self._capacity, "--min-free", "0", "--socket", str(self.socket)),
        ]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A Ctrl-C in the terminal is for the benchmark alone, which then stops the daemon.
                process_group=0,
            )
        self.pid = process.pid
        return process

    def _wait_until_it_answers(self, process: subprocess.Popen[bytes], log: Path, deadline_s: float) -> None:
        while True:
            try:
                self.get("/v1/health")
                return
            except (FileNotFoundError, ConnectionRefusedError):
                if process.poll() is not None or time.perf_counter() > deadline_s:
                    raise RuntimeError(f"the daemon did not start; its log:\n{log.read_text()[-4000:]}") from None
            time.sleep(0.005)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
