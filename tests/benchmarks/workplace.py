"""Folders, the S3 server, daemons and datasets, made on first use and removed at the end."""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.data import (
    KINDS,
    Dataset,
    Kind,
    make_lancedb,
    make_litdata,
    make_mosaicml,
    make_tars,
)
from support.network.certificates import Authority
from support.programs import daemon
from support.stores.seaweedfs import SeaweedFS
from support.stores.throttled_s3 import ThrottledS3

BUCKET = "benchmark"
# At one time there are: the tars, their copy in the S3 server, litdata's chunks, a cache and a copy
# by a peer.
_COPIES = 5
_SLACK_BYTES = 2_000_000_000


PREPARED_S = 8.0
"""Time after its start by which a daemon has all of its processes and the SDK."""


class Daemon(daemon.Daemon):
    """`shardcache serve` in a new process over a cache folder; leaving lets it drain."""

    ready_s: float  # from the start of the process to its first answer; set on entering

    def __init__(
        self,
        cache_dir: Path,
        capacity: str,
        env: Mapping[str, str] | None = None,
        spawn: daemon.Spawn = daemon.spawn,
    ) -> None:
        # Not below the cache folder: the path of a Unix socket has 107 characters at most.
        self._folder = tempfile.TemporaryDirectory(prefix="shardcache-bench-")
        where = ("--cache-dir", str(cache_dir))
        super().__init__(Path(self._folder.name), *where, capacity=capacity, env=env, spawn=spawn)
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
        """Fetch shards as `shardcache warm` does. Raises RuntimeError if one cannot be fetched."""
        *_, done = self.request("POST", "/v1/warm", {"urls": [url]}).splitlines()
        if json.loads(done).get("failed") != 0:
            raise RuntimeError(f"{url} cannot be fetched: {done.decode()}")


class Workplace:
    """Folders, stores and rounds of one run of the benchmark; a context manager."""

    def __init__(self, root: Path, scale: float, rounds: int, console: Console) -> None:
        self.root = root  # folder for everything that is large
        self.scale = scale  # share of the full amount of data
        self.rounds = rounds  # interleaved measurements of each contender
        self._console = console
        self._stack = ExitStack()
        self._started_s = time.monotonic()
        self._urls: dict[str, str] = {}

    def __enter__(self) -> "Workplace":
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()

    def say(self, text: str) -> None:
        self._console.print(
            f"[dim]{time.monotonic() - self._started_s:5.0f} s[/]  {text}", highlight=False
        )

    def check_space(self) -> None:
        data_bytes = sum(kind.shard_count(self.scale) * kind.shard_bytes for kind in KINDS)
        wanted_bytes = _COPIES * data_bytes + _SLACK_BYTES
        free_bytes = shutil.disk_usage(self.root).free
        if free_bytes < wanted_bytes:
            raise RuntimeError(
                f"{self.root} has {free_bytes / 1e9:.1f} GB free, "
                f"the benchmark needs {wanted_bytes / 1e9:.1f} GB: "
                "give another --root or a smaller --scale"
            )

    @cached_property
    def authority(self) -> Authority:
        return Authority(
            Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="shardcache-tls-")))
        )

    @cached_property
    def store(self) -> SeaweedFS:
        """The S3 server over http and https, with an empty bucket."""
        self.say("starting SeaweedFS")
        server = self._stack.enter_context(SeaweedFS(self.root, self.authority))
        server.make_bucket(BUCKET)
        return server

    def dataset(self, kind: Kind) -> Dataset:
        return make_tars(kind, self.scale, self.root, self.say)

    def litdata(self, kind: Kind) -> Path:
        return make_litdata(self.dataset(kind), self.say)

    def mosaicml(self, kind: Kind) -> Path:
        return make_mosaicml(self.dataset(kind), self.say)

    def lancedb(self, kind: Kind) -> Path:
        return make_lancedb(self.dataset(kind), self.say)

    def url(self, kind: Kind) -> str:
        """Return the url of the kind's shards in the S3 server, as a prefix that ends in "/"."""
        if kind.name not in self._urls:
            dataset = self.dataset(kind)
            store = self.store
            self.say(f"uploading {len(dataset.shards)} shards")
            for path in dataset.shards:
                store.put(BUCKET, f"{kind.name}/{path.name}", path)
            self._urls[kind.name] = f"s3://{BUCKET}/{kind.name}/"
        return self._urls[kind.name]

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """A folder below the root for one try, whose files leave the disk when this returns."""
        settle()
        with tempfile.TemporaryDirectory(prefix="try-", dir=self.root) as name:
            yield Path(name)
        settle()

    @contextmanager
    def daemon(
        self,
        capacity: str = "100GB",
        store: SeaweedFS | ThrottledS3 | None = None,
        **settings: object,
    ) -> Iterator[Daemon]:
        """A daemon with an empty cache, able to reach a store (by default the S3 server).

        Args:
            settings: options of the daemon, by their names in its configuration.
        """
        env = (store or self.store).env()
        for name, value in settings.items():
            env[f"SHARDCACHE_{name.upper()}"] = str(value)
        with self.folder() as cache_dir, Daemon(cache_dir, capacity, env) as started:
            yield started

    @contextmanager
    def warmed(self, url: str) -> Iterator[Daemon]:
        with self.daemon() as started:
            started.warm(url)
            yield started

    @contextmanager
    def far_store(self, dataset: Dataset, **far: float) -> Iterator[ThrottledS3]:
        """A store that is far away, with the dataset's folder as a bucket and its shards in memory.

        A far store has disks of its own; here they would be those that are measured.

        Args:
            far: fields of `Far` that are to have other values.
        """
        for path in dataset.shards:
            path.read_bytes()
        with ThrottledS3(self.root, **far) as store:
            yield store


def settle() -> float:
    """Write all dirty pages to disk, so that the next does not pay; return the seconds it took."""
    started_s = time.perf_counter()
    os.sync()
    return time.perf_counter() - started_s


def forget(paths: Iterable[Path]) -> None:
    """Let go of the files' pages, so that whoever reads them next reads from the disk."""
    settle()  # a page that is not on disk yet stays
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
