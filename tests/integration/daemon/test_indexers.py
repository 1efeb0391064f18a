"""Indexing processes: replaced when they die, gone when the daemon is."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shardcache.errors import NotATarError
from shardcache.store.indexers import Indexers
from shardcache.store.indexing import IndexRequest
from support.programs.processes import children
from support.shards.tars import make_tar, random_samples


@pytest.fixture
async def indexers() -> AsyncIterator[Indexers]:
    running = Indexers(1)
    yield running
    await running.close()


def request_for(tar: Path, allowed_bytes: int = 10**6) -> IndexRequest:
    header = {"size_bytes": tar.stat().st_size}
    return IndexRequest(str(tar), str(tar.with_suffix(".idx")), header, f"file://{tar}", True, allowed_bytes)


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
