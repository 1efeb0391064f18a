"""A daemon over a folder that is broken on purpose, and the questions that every fault has to answer."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from shardcache_client import ShardDataset
from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S
from support.shards.tars import random_samples, write_shards

SHARDS = 4
SAMPLES = 6
SIZES = {"bin": 40_000}
PART_BYTES = 64 * 1024
# Whoever waits longer than a reader's patience is stuck.
PATIENCE_S = GUARD_S / 3
LIMIT_S = GUARD_S


class CacheRig:
    """Some shards in a folder, a daemon, and readers of one shard each.

    Attributes:
        urls: of the shards; the first is kept in the cache, the others come and go.
    """

    def __init__(self, root: Path, *flags: str, env: Mapping[str, str] | None = None, capacity: str = "100MB") -> None:
        data = root / "data"
        data.mkdir(parents=True)
        self.urls = [f"file://{path}" for path in write_shards(data, SHARDS, SAMPLES, SIZES)]
        common = ("--part-size", str(PART_BYTES), "--scrub-rate", "0", "--listing-ttl-s", "3600")
        self.daemon = Daemon(root, *common, *flags, env=env, capacity=capacity)
        self._threads = ThreadPoolExecutor(4, "reader")

    def __enter__(self) -> Self:
        self.daemon.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.daemon.kill()
        self._threads.shutdown(cancel_futures=True)

    def read(self, number: int) -> bool:
        """Return whether a shard's samples are those that were written; raise what reading them raises."""
        dataset = ShardDataset(self.urls[number], socket=self.daemon.socket, timeout_s=PATIENCE_S)
        found = {sample["__key__"]: sample["bin"] for sample in dataset}
        wanted = random_samples(SAMPLES, SIZES, first=number * SAMPLES)
        return found == {sample["__key__"]: sample["bin"] for sample in wanted}

    def reading(self, number: int) -> Future[bool]:
        """Do so in a thread."""
        return self._threads.submit(self.read, number)

    def evict(self) -> None:
        self.daemon.request("POST", "/v1/evict", {"urls": self.urls[1:]})

    def disk(self) -> dict[str, Any]:
        told: dict[str, Any] = self.daemon.status()["disk"]
        return told

    def await_state(self, *states: str) -> None:
        """Return once the disk is told to be in one of these states."""
        eventually(lambda: self.disk()["state"] in states)

    def health(self) -> str:
        return str(json.loads(self.daemon.request("GET", "/v1/health"))["status"])

    def accounts(self) -> tuple[int, int]:
        """Return how many bytes the daemon says are used, and how many the files take, once nothing is under way."""
        begun_s = time.monotonic()
        while True:
            status = self.daemon.status()
            told, kept = int(status["cache"]["used_bytes"]), self.kept_bytes()
            if (told == kept and not status["transfers"]) or time.monotonic() - begun_s > LIMIT_S / 4:
                return told, kept
            time.sleep(0.02)

    def kept_bytes(self) -> int:
        """Return what the files of shards take, published, arriving and set aside."""
        folders = [self.daemon.cache_dir / name for name in ("shards", "partial", "quarantine")]
        sizes = []
        for path in (path for folder in folders for path in folder.rglob("*")):
            try:
                sizes.append(path.stat().st_size if path.is_file() else 0)
            except FileNotFoundError:  # it went meanwhile
                continue
        return sum(sizes)
