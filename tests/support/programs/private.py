"""Private daemons of a test: their sockets and caches lie in a folder of the test, and they end with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardcache.private import PrivatePlace
from shardcache.unix_socket import connected, credentials
from support.programs.daemon import eventually
from support.programs.guard import GUARD_S


@dataclass(frozen=True, slots=True)
class PrivateHome:
    """The folders in which the private daemons of a test keep what they have."""

    root: Path

    @property
    def runtime(self) -> Path:
        return self.root / "run"

    @property
    def caches(self) -> Path:
        """Folder of the caches."""
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
        """Return the sockets of the daemons that run."""
        return PrivatePlace(self.runtime / "shardcache-private", "").running()

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
        return credentials(sock)[0]


@contextmanager
def private_home(root: Path, more: Mapping[str, str] | None = None) -> Iterator[PrivateHome]:
    """Have this process, and those that it starts, find no daemon of the node; kill their private ones at the end."""
    home = PrivateHome(root)
    home.runtime.mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**home.env(), **(more or {})}.items():
            patch.setenv(name, value)
        try:
            yield home
        finally:
            home.kill()
