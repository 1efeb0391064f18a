"""A real daemon in a process of its own: `python -m shardcache serve`, reached over its socket."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import pytest

from shardcache.shared.private import PrivatePlace, node_has_daemon
from shardcache.shared.socket_paths import DEFAULT_CONFIG, SYSTEM_SOCKET
from shardcache.shared.unix_socket import connected, peer_ids
from support.network.http_requests import answered
from support.programs.guard import GUARD_S
from support.programs.processes import logged


class Process(Protocol):
    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...

    def terminate(self) -> None: ...


Spawn = Callable[[Sequence[str], Mapping[str, str], Path], Process]
"""Runs `shardcache` with arguments and an environment; what it prints goes to the end of a file."""


def spawn(
    args: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    python: str = sys.executable,
    module: str = "shardcache",
) -> Process:
    return logged((python, "-m", module, *args), log, env=env)


class Daemon:
    """A context manager of a daemon over its own folder, ready on entering and then killed.

    Attributes:
        root: folder of the socket, the cache and the log; keep its path short, a socket's has at
            most 107 bytes.
        socket, cache_dir, log: below `root`.
        usual_spawn: starts the daemons that are given no other way.
    """

    usual_spawn: ClassVar[Spawn] = staticmethod(spawn)

    def __init__(
        self,
        root: Path,
        *flags: str,
        capacity: str = "1GB",
        env: Mapping[str, str] | None = None,
        spawn: Spawn | None = None,
    ) -> None:
        """Prepare one; `flags` go to `serve`, `env` comes on top of this process's environment."""
        self.root = root
        self.socket = root / "s.sock"
        self.cache_dir = root / "cache"
        self.log = root / "daemon.log"
        self._flags = ("--capacity", capacity, "--min-free", "0", *flags)
        self._env = {**os.environ, **(env or {})}
        self._spawn = spawn or Daemon.usual_spawn
        self._process: Process | None = None

    def __repr__(self) -> str:
        return f"<Daemon {self.socket} pid={self._process and self._process.pid}>"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._running().pid

    def start(self) -> None:
        """Start it and return when it serves. Raises RuntimeError with its log if it fails."""
        where = ("--socket", str(self.socket), "--cache-dir", str(self.cache_dir))
        self._process = self._spawn(("serve", *where, *self._flags), self._env, self.log)
        try:
            eventually(self._answers)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> int:
        """Ask it to stop (SIGTERM), wait until it has; return its exit status."""
        self.tell_to_stop()
        return self.wait()

    def tell_to_stop(self) -> None:
        self._running().terminate()

    def let_go(self) -> Process:
        """Return its process, which is the caller's from now on; `start` starts another."""
        process = self._running()
        self._process = None
        return process

    def wait(self) -> int:
        """Wait until it has ended; return its exit status, negative where a signal ended it."""
        process = self.let_go()
        try:
            return process.wait(GUARD_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.request("GET", "/v1/status"))
        return answer

    def empty(self, pattern: str = "file:///**") -> None:
        """Evict everything of a pattern, even if it is still on its way for former readers."""

        def emptied() -> bool:
            if self.status()["transfers"]:
                return False
            self.request("POST", "/v1/evict", {"urls": [pattern]})
            return not self.shards()

        eventually(emptied)

    def evict(self, *urls: str) -> None:
        """Evict these once no process has them open, new children of the daemon included."""
        eventually(
            lambda: not json.loads(self.request("POST", "/v1/evict", {"urls": urls}))["kept"]
        )

    def shards(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.request("GET", "/v1/shards").splitlines()]

    def whole(self) -> list[str]:
        """Return the urls of what is cached as a whole, not in parts."""
        return [row["url"] for row in self.shards() if row["cached_bytes"] == row["size_bytes"]]

    def await_publication(self) -> None:
        """Return once nothing is on its way: readers get shards before these are published."""
        eventually(lambda: not self.status()["transfers"])

    def leases(self) -> int:
        """Return how many leases there are on all shards."""
        return sum(int(shard["leases"]) for shard in self.shards())

    def sessions(self) -> int:
        return sum(int(job["sessions"]) for job in self.status()["jobs"])

    def request(self, method: str, path: str, body: object = None) -> bytes:
        """Send a request of the admin API and return the answer's body, whatever its status."""
        return self.answer(method, path, None if body is None else json.dumps(body).encode())[1]

    def answer(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Send one request of the admin API and return the status and the body of its answer."""
        answer = answered(UnixConnection(self.socket), path, method=method, body=body)
        return answer.status, answer.body

    def _answers(self) -> bool:
        if self._running().poll() is not None:
            raise RuntimeError(f"the daemon ended at once; its log ends:\n{self.tail()}")
        try:
            return bool(
                json.loads(self.request("GET", "/v1/health"))["status"] in ("ok", "degraded")
            )
        except (FileNotFoundError, ConnectionError, http.client.HTTPException):
            return False

    def tail(self, lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _running(self) -> Process:
        if self._process is None:
            raise RuntimeError("the daemon does not run")
        return self._process


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("shardcache", timeout=GUARD_S)
        self._path = path

    def connect(self) -> None:
        self.sock = connected(self._path, GUARD_S)


def eventually(
    condition: Callable[[], bool], *, limit_s: float = GUARD_S, pause_s: float = 0.02
) -> None:
    """Return once the condition holds; raise TimeoutError when it does not within the limit.

    For what another process does in its own time and tells nobody.
    """
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{condition!r} did not come true within {limit_s:g} s")
        time.sleep(pause_s)


@dataclass(frozen=True, slots=True)
class PrivateHome:
    """The folders in which the private daemons of a test keep what they have."""

    root: Path

    @property
    def runtime(self) -> Path:
        return self.root / "run"

    @property
    def caches(self) -> Path:
        return self.root / "cache" / "shardcache-private"

    def env(self) -> dict[str, str]:
        """Return the environment of a user of the node, on which nobody set up a daemon."""
        return {
            "XDG_RUNTIME_DIR": str(self.runtime),
            "XDG_CACHE_HOME": str(self.root / "cache"),
            "SHARDCACHE_MIN_FREE": "0",
            "SHARDCACHE_SOCKET": "",
            "SHARDCACHE_CONFIG": "",
        }

    def running(self) -> list[Path]:
        return PrivatePlace(self.runtime / "shardcache-private", "").running_sockets()

    def pids(self) -> list[int]:
        return list(map(pid_at, self.running()))

    def kill(self) -> None:
        """Kill all daemons, and wait until none of them listens."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        eventually(lambda: not self.running())


def pid_at(socket: Path) -> int:
    with connected(socket, GUARD_S) as sock:
        return peer_ids(sock)[0]


@contextmanager
def private_home(root: Path) -> Iterator[PrivateHome]:
    """Hide the node's daemon from this process and its children; kill private ones at the end."""
    home = PrivateHome(root)
    home.runtime.mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in home.env().items():
            patch.setenv(name, value)
        if node_has_daemon():
            pytest.skip(
                f"this machine has a daemon of its own: {SYSTEM_SOCKET.parent} or {DEFAULT_CONFIG}"
            )
        try:
            yield home
        finally:
            home.kill()
