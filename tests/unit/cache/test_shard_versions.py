"""versions.py: counts of samples outlive their shards."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shardcache.cache.planner import History
from shardcache.protocol import ShardRef
from shardcache.store.catalogue import Catalogue
from shardcache.store.shard import Facts


@pytest.fixture
async def known(tmp_path: Path) -> AsyncIterator[History]:
    """A memory in which one shard was seen."""
    catalogue = Catalogue.open(tmp_path)
    found = History(catalogue)
    await found.remember(Facts("s3://b/a.tar", "v1", 2048, 2048, 1024, (1, 2), samples=10))
    yield found
    catalogue.close()


async def test_a_count_belongs_to_its_version(known: History) -> None:
    """It fills in what has that version or none, and never another; a count that is there stays."""
    refs = [
        ShardRef("s3://b/a.tar", "v1", 2048),
        ShardRef("s3://b/a.tar"),
        ShardRef("s3://b/a.tar", "v2"),
        ShardRef("s3://b/a.tar", "v1", 2048, 7),
        ShardRef("s3://b/b.tar", "v1"),
    ]
    assert [ref.samples for ref in await known.fill(refs)] == [10, 10, None, 7, None]


async def test_a_manifest_of_any_length_is_one_question(known: History) -> None:
    """More shards than a statement takes parameters by default (32,766): the known one is found among them."""
    refs = [ShardRef(f"s3://b/{number}.tar") for number in range(40_000)]
    filled = await known.fill([*refs, ShardRef("s3://b/a.tar")])
    assert len(filled) == 40_001 and filled[-1].samples == 10 and filled[0].samples is None
