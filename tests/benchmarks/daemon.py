"""A real daemon, started as a user starts it."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.programs import daemon


class Daemon(daemon.Daemon):
    """`shardcache serve` in a new process over a cache folder; leaving lets it drain."""

    ready_s: float  # from the start of the process to its first answer; set on entering

    def __init__(self, cache_dir: Path, capacity: str, env: Mapping[str, str] | None = None) -> None:
        # Not below the cache folder: the path of a Unix socket has 107 characters at most.
        self._folder = tempfile.TemporaryDirectory(prefix="shardcache-bench-")
        where = ("--cache-dir", str(cache_dir))
        super().__init__(Path(self._folder.name), *where, capacity=capacity, env=env, spawn=daemon.spawn)
        # An installed package has its bytecode next to it; a checkout is to start like one.
        self._env.pop("PYTHONDONTWRITEBYTECODE", None)

    def start(self) -> None:
        started_s = time.perf_counter()
        super().start()
        self.ready_s = time.perf_counter() - started_s

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._folder.cleanup()

    def get(self, path: str) -> Any:
        """Return the JSON answer of the admin API. Raises OSError while nothing listens."""
        return json.loads(self.request("GET", path))

    def warm(self, url: str) -> None:
        """Fetch shards into the cache, as `shardcache warm` does. Raises RuntimeError if one cannot be fetched."""
        *_, done = self.request("POST", "/v1/warm", {"urls": [url]}).splitlines()
        if json.loads(done).get("failed") != 0:
            raise RuntimeError(f"{url} cannot be fetched: {done.decode()}")
