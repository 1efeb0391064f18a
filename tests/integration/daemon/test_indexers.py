"""Indexing processes: replaced when they die, gone when the daemon is."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shardcache.errors import NotATarError
from shardcache.store.indexers import Indexers
from shardcache.store.indexing import IndexRequest
from support.programs.daemon import Daemon, eventually
from support.programs.processes import children
from support.shards.tars import make_tar, random_samples, write_shards


@pytest.fixture
async def indexers() -> AsyncIterator[Indexers]:
    """One process at a time."""
    running = Indexers(1)
    yield running
    await running.close()


def request_for(tar: Path, allowed_bytes: int = 10**6) -> IndexRequest:
    """Return the request to index a file."""
    header = {"size_bytes": tar.stat().st_size}
    return IndexRequest(str(tar), str(tar.with_suffix(".idx")), header, f"file://{tar}", True, allowed_bytes)


async def test_a_sidecar_that_is_too_large_is_not_written(indexers: Indexers, tmp_path: Path) -> None:
    """Space is asked for before it is taken."""
    tar = tmp_path / "a.tar"
    tar.write_bytes(make_tar(random_samples(7)))
    indexed = await indexers.index(request_for(tar, allowed_bytes=100))
    assert indexed.sidecar_bytes > 100 and not indexed.written
    assert not tar.with_suffix(".idx").exists()


async def test_error_keeps_its_type_and_the_process_continues(indexers: Indexers, tmp_path: Path) -> None:
    """A fault of one shard is no reason to start another process."""
    tar = tmp_path / "a.tar"
    tar.write_bytes(b"no tar at all" * 100)
    with pytest.raises(NotATarError) as caught:
        await indexers.index(request_for(tar))
    assert caught.value.url == f"file://{tar}"
    before = children(os.getpid())
    tar.write_bytes(make_tar(random_samples(3)))
    assert (await indexers.index(request_for(tar))).samples == 3
    assert children(os.getpid()) == before


async def test_a_killed_process_is_replaced(indexers: Indexers, tmp_path: Path) -> None:
    """The kernel's out-of-memory killer costs one shard a second walk."""
    tar = tmp_path / "a.tar"
    tar.write_bytes(make_tar(random_samples(3)))
    already = set(children(os.getpid()))
    await indexers.index(request_for(tar))
    (process,) = set(children(os.getpid())) - already
    os.kill(process, signal.SIGKILL)
    assert (await indexers.index(request_for(tar))).samples == 3


async def test_a_cancelled_request_spoils_no_later_one(indexers: Indexers, tmp_path: Path) -> None:
    """The answer that nobody waits for any more is never taken for another shard's."""
    large, small = tmp_path / "large.tar", tmp_path / "small.tar"
    large.write_bytes(make_tar(random_samples(3000, {"cls": 1})))
    small.write_bytes(make_tar(random_samples(3)))
    asking = asyncio.create_task(indexers.index(request_for(large)))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (await indexers.index(request_for(small))).samples == 3


def test_indexers_end_with_a_daemon_that_is_killed(tmp_path: Path) -> None:
    """kill -9 leaves no process behind."""
    write_shards(tmp_path, 1, 3)
    with Daemon(tmp_path) as daemon:
        daemon.request("POST", "/v1/warm", {"urls": [f"file://{tmp_path}/shard-*.tar"]})
        processes = children(daemon.pid)
        assert processes
        daemon.kill()
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))
