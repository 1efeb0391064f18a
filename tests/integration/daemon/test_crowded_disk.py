"""A disk that gives the cache less than its capacity, since other files fill it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardcache.errors import CapacityError
from shardcache.shared.exceptions import from_json
from shardcache_client.dataset import ShardDataset
from support.cases import first_quick
from support.disks.mounts import Tmpfs, may_mount
from support.programs.cli import shardcache
from support.programs.daemon import Daemon, eventually
from support.programs.raw_session import RawSession
from support.shards.tars import write_shards

pytestmark = pytest.mark.skipif(not may_mount(), reason="needs root, who may mount")

SHARDS = 5
# The footprint reserved for a shard is larger than the shard.
RESERVE_BYTES = 200_000


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    (tmp_path / "data").mkdir()
    return write_shards(tmp_path / "data", SHARDS, 10, {"bin": 100_000})


@contextmanager
def crowded(folder: Path, leave_bytes: int) -> Iterator[tuple[Daemon, Tmpfs]]:
    """Run a daemon with a large capacity on a disk with little space."""
    with Tmpfs(folder, 32_000_000) as disk:
        disk.fill(leave_bytes)
        with Daemon(folder, capacity="25MB") as daemon:
            yield daemon, disk


@pytest.mark.slow
def test_warming_more_than_the_disk_gives_is_refused(tmp_path: Path, shards: list[Path]) -> None:
    """The error and the status tell of other files, and all shards are fetched without them."""
    size_bytes = shards[0].stat().st_size
    with crowded(tmp_path / "m", 2 * size_bytes + RESERVE_BYTES) as (daemon, disk):
        refused = shardcache("warm", "--socket", daemon.socket, *shards)
        assert refused.code == 1
        assert "other files on the disk limit the cache to 2." in refused.out + refused.err
        assert len(daemon.shards()) <= 2  # fetched before all sizes were known
        eventually(lambda: 21_000_000 < daemon.status()["disk"]["short_bytes"] < 24_000_000)
        reason = "other files on the disk limit the cache"
        assert reason in shardcache("status", "--socket", daemon.socket).out
        disk.relieve()
        assert " 0 failed" in shardcache("warm", "--socket", daemon.socket, *shards).out
        eventually(lambda: daemon.status()["disk"]["short_bytes"] == 0)


@pytest.mark.slow
def test_warming_reports_the_shards_that_are_cached_at_its_end(
    tmp_path: Path, shards: list[Path]
) -> None:
    """A shard that gave way to a later one has failed."""
    total_bytes = sum(path.stat().st_size for path in shards)
    with crowded(tmp_path / "m", total_bytes + 64 * 1024) as (daemon, _):
        done = shardcache("warm", "--socket", daemon.socket, *shards)
        cached = len(daemon.shards())
        assert 0 < cached < SHARDS
        assert f"{cached} fetched, 0 already cached, {SHARDS - cached} failed" in done.out
        assert done.code == 1
        assert "other files on the disk limit the cache" in done.out + done.err


@pytest.mark.parametrize("held", first_quick([0, 1]))
def test_reader_that_the_disk_has_no_space_for_gets_an_error(
    tmp_path: Path, shards: list[Path], held: int
) -> None:
    """It comes at once if the shard cannot fit, and soon if the reader's own keep it out."""
    leave_bytes = shards[0].stat().st_size * (1 + 2 * held) // 2 + RESERVE_BYTES * held
    urls = [f"file://{path}" for path in shards]
    with crowded(tmp_path / "m", leave_bytes) as (daemon, disk), RawSession(daemon) as session:
        session.plan(urls, [0, 1])
        granted = [session.take(position) for position in range(held + 1)]
        assert all(grant["type"] == "leased" for grant in granted[:held])
        error = from_json(granted[held]["error"])
        assert isinstance(error, CapacityError)
        assert "other files on the disk limit the cache to" in error.message
        assert "--min-free" in error.remedy
        session.close()
        disk.relieve()
        assert len(list(ShardDataset(urls, socket=daemon.socket))) == 10 * SHARDS
