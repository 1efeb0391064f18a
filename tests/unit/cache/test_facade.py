"""cache/facade.py: what users ask of a whole cache, of real parts over files on this disk."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shardcache.access.rules import Peer
from shardcache.errors import CapacityError, ConfigError, NotAllowedError
from support.programs.guard import GUARD_S
from support.shards.open_cache import ground
from support.shards.tars import write_shards

ROOT = Peer(0)
ALICE = Peer(1001)
BOB = Peer(1002)
SHARDS = 3
SAMPLES = 4


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with three shards."""
    folder = tmp_path / "data"
    folder.mkdir()
    write_shards(folder, SHARDS, SAMPLES)
    return folder


def url(data: Path, number: int) -> str:
    return f"file://{data}/shard-{number:06d}.tar"


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["event"] for event in events]


async def listed(found: Any) -> list[dict[str, Any]]:
    return [row async for row in found]


async def test_warmed_shards_are_listed_with_their_samples(data: Path, tmp_path: Path) -> None:
    """Each is reported as it arrives; what is cached already is not fetched again."""
    async with ground(tmp_path) as here:
        cache = here.cache()
        await cache.warm([f"file://{data}/"], ROOT, here.send)
        await cache.warm([url(data, 0)], ROOT, here.send)
        rows = await listed(cache.shards("", ROOT))
    assert kinds(here.events) == [
        "resolved",
        *["shard"] * SHARDS,
        "done",
        "resolved",
        "shard",
        "done",
    ]
    done = [event for event in here.events if event["event"] == "done"]
    assert [(each["fetched"], each["cached"], each["failed"]) for each in done] == [
        (SHARDS, 0, 0),
        (0, 1, 0),
    ]
    assert {row["url"]: row["samples"] for row in rows} == {
        url(data, number): SAMPLES for number in range(SHARDS)
    }


async def test_listed_shards_are_those_below_a_prefix_that_the_user_may_see(
    data: Path, tmp_path: Path
) -> None:
    """A prefix may end within a name; local files are hidden from users whom no rule names."""
    async with ground(tmp_path) as here:
        cache = here.cache()
        await cache.warm([f"file://{data}/"], ROOT, here.send)
        below = await listed(cache.shards(f"file://{data}/shard-000001", ROOT))
        alices = await listed(cache.shards("", ALICE))
    assert [row["url"] for row in below] == [url(data, 1)]
    assert alices == []


async def test_files_without_a_rule_are_refused_before_anything_is_read(
    data: Path, tmp_path: Path
) -> None:
    """Another user may not have the daemon read local files for it, and hears of no shard."""
    async with ground(tmp_path) as here:
        with pytest.raises(NotAllowedError):
            await here.cache().warm([f"file://{data}/"], ALICE, here.send)
    assert here.events == []


async def test_evicted_shards_are_named_and_leased_ones_stay(data: Path, tmp_path: Path) -> None:
    """The answer says why a shard has stayed, and how much space the others gave back."""
    async with ground(tmp_path) as here:
        cache = here.cache()
        await cache.warm([f"file://{data}/"], ROOT, here.send)
        sizes = {
            shard.facts.url: shard.kept_bytes for shard in here.store.shards.values() if shard.facts
        }
        reader = cache.readers.add("job", 0)
        reader.declare(await cache.manifests.resolve([url(data, 1)], ROOT), 1)
        await reader.extend([0])
        await reader.lease(1, 0, partial=False)
        reader.need(1)
        answer = await cache.evict([f"file://{data}/**"], ROOT)
        await reader.close()
    assert sorted(answer["evicted"]) == [url(data, 0), url(data, 2)]
    assert answer["kept"] == [{"url": url(data, 1), "reason": "in use by 1 reader(s)"}]
    assert answer["freed_bytes"] == sizes[url(data, 0)] + sizes[url(data, 2)]


async def test_pins_are_counted_by_user_and_end_with_the_last(data: Path, tmp_path: Path) -> None:
    """Two users pin a shard: it stays until both have unpinned it; eviction names who holds it."""
    allow = [f"file://{data}/"]
    async with ground(tmp_path, allow=allow) as here:
        cache = here.cache()
        for user in (ALICE, BOB):
            await cache.pin([url(data, 0)], user, here.send)
        (pin,) = await listed(cache.pins(ALICE))
        kept = (await cache.evict([url(data, 0)], ROOT))["kept"]
        first = await cache.unpin([url(data, 0)], ALICE)
        second = await cache.unpin([url(data, 0)], BOB)
        evicted: list[str] = []
        async with asyncio.timeout(GUARD_S):
            # An indexer that is being started has every open file for a moment, and its shard
            # stays.
            while not evicted:
                evicted = (await cache.evict([url(data, 0)], ROOT))["evicted"]
    assert pin["url"] == url(data, 0)
    assert pin["cached"] is True
    assert pin["uids"] == [ALICE.uid, BOB.uid]
    assert "pinned by" in kept[0]["reason"]
    assert [row["url"] for row in first["kept"]] == [url(data, 0)]
    assert second["unpinned"] == [url(data, 0)]
    assert evicted == [url(data, 0)]


async def test_verifying_counts_what_is_read_and_what_is_damaged(
    data: Path, tmp_path: Path
) -> None:
    """A damaged shard is named, and no longer served; the others are left alone."""
    async with ground(tmp_path) as here:
        cache = here.cache()
        await cache.warm([f"file://{data}/"], ROOT, here.send)
        damaged = next(
            shard
            for shard in here.store.shards.values()
            if shard.facts and shard.facts.url == url(data, 2)
        )
        path = here.store.layout.tar(damaged.key)
        path.chmod(0o644)
        with path.open("r+b") as file:
            file.seek(600)
            file.write(b"damage")
        events = await listed(cache.verify("", ROOT))
        left = await listed(cache.shards("", ROOT))
    bad = [event for event in events if event["event"] == "shard" and not event["ok"]]
    assert [event["url"] for event in bad] == [url(data, 2)]
    assert events[-1]["shards"] == SHARDS
    assert events[-1]["corrupt"] == 1
    assert sorted(row["url"] for row in left) == [url(data, 0), url(data, 1)]


async def test_patterns_of_an_unknown_protocol_are_refused_by_every_request(tmp_path: Path) -> None:
    """A misspelt scheme is no prefix that merely nothing matches."""
    odd = "nosuch://bucket/"
    async with ground(tmp_path) as here:
        cache = here.cache()
        for request in (cache.evict([odd], ROOT), cache.unpin([odd], ROOT)):
            with pytest.raises(ConfigError):
                await request
        for rows in (cache.shards(odd, ROOT), cache.verify(odd, ROOT)):
            with pytest.raises(ConfigError):
                await listed(rows)


async def test_pins_beyond_their_limit_are_refused_as_a_whole(data: Path, tmp_path: Path) -> None:
    """None of the shards of such a request is pinned or fetched."""
    async with ground(tmp_path, max_pinned="1kB") as here:
        cache = here.cache()
        with pytest.raises(CapacityError):
            await cache.pin([f"file://{data}/"], ROOT, here.send)
        pins = await listed(cache.pins(ROOT))
    assert pins == []
    assert here.store.shards == {}
