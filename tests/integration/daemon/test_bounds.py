"""The cache never holds more than it may, whoever asks for however much."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardcache.errors import CapacityError
from shardcache_client.dataset import ShardDataset
from support.programs.daemon import Daemon, eventually
from support.shards.tars import write_shards

SAMPLES = 10
SIZES = {"bin": 40_000}
SHARD_BYTES = 500_000  # one shard, and what is set aside for its sidecar


def kept_bytes(daemon: Daemon) -> int:
    """Return what the files of the cache's shards take, published and arriving, at one moment."""
    folders = [daemon.cache_dir / name for name in ("shards", "partial", "quarantine")]
    daemon.pause()
    try:
        return sum(
            path.stat().st_size
            for folder in folders
            for path in folder.rglob("*")
            if path.is_file()
        )
    finally:
        daemon.go_on()


@contextmanager
def watched(daemon: Daemon, seen_bytes: list[int]) -> Iterator[None]:
    """Note how much lies on disk, again and again, while the block runs."""
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.03):
            seen_bytes.append(kept_bytes(daemon))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(
    ("shards", "room", "window"), [(4, 1, 0), pytest.param(12, 8, 3, marks=pytest.mark.slow)]
)
def test_a_cache_smaller_than_the_dataset_feeds_two_jobs(
    tmp_path: Path, shards: int, room: int, window: int
) -> None:
    """Two readers in different orders get every sample, and the cache's bound holds."""
    (tmp_path / "data").mkdir()
    write_shards(tmp_path / "data", shards, SAMPLES, SIZES)
    capacity_bytes = room * SHARD_BYTES
    keys: dict[str, list[str]] = {"a": [], "b": []}
    seen_bytes: list[int] = []
    with Daemon(tmp_path, capacity=str(capacity_bytes)) as daemon:

        def read(job: str, seed: int) -> None:
            urls = f"file://{tmp_path}/data/"
            dataset = ShardDataset(
                urls, shuffle=True, shuffle_window=window, seed=seed, job=job, socket=daemon.socket
            )
            keys[job] += [sample["__key__"] for sample in dataset]

        threads = [threading.Thread(target=read, args=(job, seed)) for seed, job in enumerate(keys)]
        with watched(daemon, seen_bytes):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        status = daemon.status()
    wanted = [f"{number:06d}" for number in range(shards * SAMPLES)]
    assert sorted(keys["a"]) == sorted(keys["b"]) == wanted
    assert status["cache"]["used_bytes"] <= capacity_bytes
    assert max(seen_bytes) <= capacity_bytes
    assert status["counters"]["evictions"] >= shards - room


@pytest.mark.slow
def test_open_file_is_removed_once_it_is_closed(tmp_path: Path) -> None:
    """A busy cache looks again at what kept a shard, and serves the waiting reader."""
    (tmp_path / "data").mkdir()
    paths = write_shards(tmp_path / "data", 2, SAMPLES, SIZES)
    with Daemon(tmp_path, capacity=str(SHARD_BYTES)) as daemon:
        list(ShardDataset(f"file://{paths[0]}", socket=daemon.socket))
        daemon.await_publication()
        (cached,) = (daemon.cache_dir / "shards").rglob("*.tar")
        with cached.open("rb"):
            thread = threading.Thread(
                target=lambda: list(ShardDataset(f"file://{paths[1]}", socket=daemon.socket))
            )
            thread.start()
            eventually(
                lambda: any(
                    row["stage"].startswith("waiting for space")
                    for row in daemon.status()["transfers"]
                )
            )
        thread.join()
        daemon.await_publication()
        assert [shard["url"] for shard in daemon.shards()] == [f"file://{paths[1]}"]


def test_requests_that_cannot_fit_are_refused_at_once(tmp_path: Path) -> None:
    """The user learns both sizes and the remedy, and nothing is fetched or evicted for it."""
    (tmp_path / "small").mkdir()
    (tmp_path / "large").mkdir()
    small = write_shards(tmp_path / "small", 1, 1, {"bin": 1000})[0]
    write_shards(tmp_path / "large", 2, SAMPLES, SIZES)
    with Daemon(tmp_path, capacity="500kB") as daemon:
        assert len(list(ShardDataset(f"file://{small}", socket=daemon.socket))) == 1
        daemon.await_publication()
        before = daemon.status()["counters"]["origin_bytes"]
        answer = json.loads(
            daemon.request("POST", "/v1/warm", {"urls": [f"file://{tmp_path}/large/"]})
        )
        assert answer["error"]["code"] == "capacity"
        assert "the shards total 8" in answer["error"]["message"]
        assert "500.0 kB" in answer["error"]["message"]
        assert daemon.status()["counters"]["origin_bytes"] == before
        assert daemon.status()["cache"]["shards"] == 1
    with Daemon(tmp_path, capacity="200kB") as daemon:
        with pytest.raises(CapacityError, match=r"takes 4.*; the cache's capacity is 200\.0 kB"):
            list(ShardDataset(f"file://{tmp_path}/large/", socket=daemon.socket))
        assert daemon.status()["counters"]["origin_bytes"] == 0
        assert daemon.status()["cache"]["shards"] == 1
