"""cache/bulk/warming.py: lists are fetched once within the space, and losses are told."""

from pathlib import Path
from typing import Any

import pytest

from shardcache.errors import CapacityError
from shardcache.shared.protocol import ShardRef
from shardcache.store.shard import Shard
from support.shards.open_cache import ground
from support.shards.tars import write_shards

SHARDS = 3
SAMPLES = 4


@pytest.fixture
def refs(tmp_path: Path) -> list[ShardRef]:
    """Three local shards of which only the urls are known."""
    folder = tmp_path / "data"
    folder.mkdir()
    return [ShardRef(f"file://{path}") for path in write_shards(folder, SHARDS, SAMPLES)]


def url_of(shard: Shard) -> str:
    assert shard.facts is not None
    return shard.facts.url


def error_codes(events: list[dict[str, Any]]) -> list[str]:
    return [event["error"]["code"] for event in events if event["event"] == "error"]


async def test_shards_that_are_named_twice_are_fetched_once(
    refs: list[ShardRef], tmp_path: Path
) -> None:
    """The totals count each of them once."""
    async with ground(tmp_path) as here:
        parts = here.parts()
        await parts.requesting.warming.warm(refs + refs, here.send)
        cached = len(here.store.shards)
        transfers = parts.fetching.transfers.all()
    done = here.events[-1]
    assert done["shards"] == SHARDS
    assert done["fetched"] == SHARDS
    assert done["cached"] == 0
    assert done["failed"] == 0
    assert done["origin_bytes"] == sum(
        Path(ref.url.removeprefix("file://")).stat().st_size for ref in refs
    )
    assert cached == SHARDS
    assert transfers == []


async def test_missing_shard_fails_alone(refs: list[ShardRef], tmp_path: Path) -> None:
    """Its error is among the events; the others arrive."""
    missing = ShardRef(f"file://{tmp_path}/data/none.tar")
    async with ground(tmp_path) as here:
        await here.parts().requesting.warming.warm([missing, *refs], here.send)
    assert error_codes(here.events) == ["not_found"]
    assert here.events[-1]["fetched"] == SHARDS
    assert here.events[-1]["failed"] == 1


async def test_list_that_is_known_to_exceed_the_cache_is_refused_before_any_fetch(
    refs: list[ShardRef], tmp_path: Path
) -> None:
    """Both sizes are in the error."""
    large = [ref._replace(size_bytes=400_000_000) for ref in refs]
    async with ground(tmp_path, capacity="1GB") as here:
        with pytest.raises(CapacityError, match=r"the shards total 1\.2 GB; .*1\.0 GB") as caught:
            await here.parts().requesting.warming.warm(large, here.send)
    assert "warm fewer shards" in caught.value.remedy
    assert here.events == []
    assert here.store.shards == {}


async def test_shard_evicted_by_the_end_counts_as_failed(
    refs: list[ShardRef], tmp_path: Path
) -> None:
    """The user is told that it is missing, although it had arrived."""
    async with ground(tmp_path, max_transfers=1) as here:
        parts = here.parts()
        arrived: list[str] = []

        async def evict_the_first(event: dict[str, Any]) -> None:
            await here.send(event)
            # The progress comes by the clock, also during the eviction.
            if event["event"] != "shard":
                return
            arrived.append(event["url"])
            if len(arrived) == 2:
                (first,) = [
                    shard for shard in here.store.shards.values() if url_of(shard) == arrived[0]
                ]
                assert await parts.core.residency.evict(first)

        await parts.requesting.warming.warm(refs[:2], evict_the_first)
    assert error_codes(here.events) == ["capacity"]
    assert here.events[-1]["fetched"] == 1
    assert here.events[-1]["failed"] == 1


async def test_sizes_and_versions_are_asked_for_where_they_are_not_known(
    refs: list[ShardRef], tmp_path: Path
) -> None:
    """Each once, in the order of the list; what is known is kept as it is."""
    known = refs[0]._replace(size_bytes=7, version="v")
    async with ground(tmp_path) as here:
        warming = here.parts().requesting.warming
        sizes = await warming.with_sizes([known, *refs[1:], known])
        versions = await warming.with_sizes(refs[1:], versions=True)
    assert [ref.url for ref in sizes] == [ref.url for ref in refs]
    assert sizes[0] == known
    assert [ref.size_bytes for ref in sizes[1:]] == [
        Path(ref.url.removeprefix("file://")).stat().st_size for ref in refs[1:]
    ]
    assert [ref.version for ref in sizes[1:]] == [None, None]
    assert all(ref.version for ref in versions)
