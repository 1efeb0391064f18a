"""cache/fetching/fetcher.py: from a url to a file per version, and what failures leave."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shardcache.cache.fetching import reserving
from shardcache.cache.fetching.leasing import Published
from shardcache.cache.fetching.reserving import WholeSpace
from shardcache.cache.listings.shard_listing import Listing, name_of
from shardcache.cache.space.residency import Residency
from shardcache.cache.waiting.claims import KeyClaim
from shardcache.cache.waiting.transfer import Transfer
from shardcache.cache.waiting.waits import PriorityClass, Wait
from shardcache.errors import CapacityError, NotFoundError, ShardError
from shardcache.shared.lists.shard_columns import Shards
from shardcache.shared.protocol import ShardRef
from shardcache.store.keys import stored_url
from shardcache.store.shard import Shard
from shardcache.store.space import Reservation
from support.programs.guard import GUARD_S
from support.shards.open_cache import Ground, ground
from support.shards.stores import publish
from support.shards.tars import make_tar, random_samples


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    """A shard of five samples."""
    path = tmp_path / "a.tar"
    path.write_bytes(make_tar(random_samples(5)))
    return path


async def fetched(here: Ground, *refs: ShardRef) -> list[Shard]:
    """Have readers wait for shards, all at once."""
    parts = here.parts()
    waits = [
        parts.fetching.transfers.wait(f"name {number}", ref, PriorityClass.PLANNED, Wait())
        for number, ref in enumerate(refs)
    ]
    found = await asyncio.gather(*waits)
    assert all(isinstance(shard, Shard) for shard in found)
    return [shard for shard in found if isinstance(shard, Shard)]


async def test_names_that_lead_to_one_version_are_fetched_once(tar: Path, tmp_path: Path) -> None:
    """One plan knows its version, another only its url: both get the same published shard."""
    ref = ShardRef(f"file://{tar}")
    async with ground(tmp_path) as here:
        (first,) = await fetched(here, ref)
        assert first.facts is not None
        version = first.facts.version
    async with ground(tmp_path / "other") as here:
        both = await fetched(here, ref, ref._replace(version=version))
        origin_bytes = here.counters.origin_bytes
    assert both[0] is both[1]
    assert origin_bytes == tar.stat().st_size


async def test_published_shard_has_the_bytes_of_its_object(tar: Path, tmp_path: Path) -> None:
    """With its samples counted, and nothing left of the download."""
    async with ground(tmp_path) as here:
        (shard,) = await fetched(here, ShardRef(f"file://{tar}"))
        assert here.store.layout.tar(shard.key).read_bytes() == tar.read_bytes()
        left = list(here.store.layout.partial.iterdir())
        reserved = here.store.space.used_bytes
    assert shard.facts is not None
    assert shard.facts.samples == 5
    assert left == []
    assert reserved == shard.kept_bytes


async def test_file_is_indexed_without_a_second_fetch_when_samples_are_wanted(
    tar: Path, tmp_path: Path
) -> None:
    """As long as the object is the same: its bytes are there."""
    ref = ShardRef(f"file://{tar}", is_file=True)
    async with ground(tmp_path) as here:
        (file,) = await fetched(here, ref)
        assert file.facts is not None
        assert file.facts.samples is None
        (shard,) = await fetched(here, ref._replace(is_file=False))
        origin_bytes = here.counters.origin_bytes
    assert shard.facts is not None
    assert shard.facts.samples == 5
    assert origin_bytes == tar.stat().st_size


@pytest.mark.parametrize(
    ("data", "error"),
    [(None, NotFoundError), (b"no tar at all" * 1000, ShardError)],
    ids=["missing object", "no tar"],
)
async def test_shard_that_cannot_be_fetched_leaves_nothing(
    data: bytes | None, error: type[Exception], tmp_path: Path
) -> None:
    """Neither files nor reserved space; a later try begins anew."""
    path = tmp_path / "bad.tar"
    if data is not None:
        path.write_bytes(data)
    async with ground(tmp_path) as here:
        with pytest.raises(error, match=str(path)):
            await fetched(here, ShardRef(f"file://{path}"))
        assert here.store.shards == {}
        assert here.store.space.used_bytes == 0
        assert list(here.store.layout.partial.iterdir()) == []


async def test_shard_larger_than_the_cache_names_both_sizes(tmp_path: Path) -> None:
    """It is known from the object's size, before any of it is fetched."""
    path = tmp_path / "large.tar"
    with path.open("wb") as file:
        os.truncate(file.fileno(), 50_000_000)
    async with ground(tmp_path, capacity="10MB") as here:
        with pytest.raises(CapacityError, match=r"takes 51\.6 MB; .* 10\.0 MB") as caught:
            await fetched(here, ShardRef(f"file://{path}"))
        assert here.counters.origin_bytes == 0
    assert "--capacity" in caught.value.remedy


async def test_damage_that_no_reader_sees_is_not_reported_as_in_use(
    tar: Path, tmp_path: Path
) -> None:
    """The check before indexing keeps the shard for itself, which does not count as a reader."""
    ref = ShardRef(f"file://{tar}")
    async with ground(tmp_path) as here:
        parts = here.parts()
        monitor = asyncio.create_task(parts.core.health.run())
        transfers = parts.fetching.transfers
        damaged = await transfers.wait(
            "name", ref._replace(is_file=True), PriorityClass.PLANNED, Wait()
        )
        assert isinstance(damaged, Shard)
        path = here.store.layout.tar(damaged.key)
        path.chmod(0o640)
        path.write_bytes(bytes(tar.stat().st_size))
        with capture_logs() as logs:
            sound = await transfers.wait("name", ref, PriorityClass.PLANNED, Wait())
        monitor.cancel()
        assert isinstance(sound, Shard)
        assert sound is not damaged
        assert here.store.layout.tar(sound.key).read_bytes() == tar.read_bytes()
    events = [log["event"] for log in logs]
    assert "cached shard is damaged; quarantined" in events
    assert "corrupt shard is in use" not in events


@asynccontextmanager
async def two_that_do_not_fit(tmp_path: Path) -> AsyncIterator[tuple[Residency, Shard, WholeSpace]]:
    """A cache with a leased shard whose place another shard needs."""
    size_bytes = 6_000_000
    path = tmp_path / "first"
    path.write_bytes(bytes(size_bytes))
    async with ground(tmp_path, capacity="10MB") as here:
        (first,) = await fetched(here, ShardRef(f"file://{path}", is_file=True))
        residency = here.parts().core.residency
        residency.retain(first)
        transfer = Transfer("second", ShardRef("file:///second"), PriorityClass.PLANNED)
        transfer.waits.add(Wait())
        claim = KeyClaim(transfers=[transfer], reservation=Reservation(here.store.space))
        yield residency, first, WholeSpace(residency, claim, "second", size_bytes)


async def test_space_for_a_whole_object_is_tried_again_only_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a change, the wait for it lasts as long as that for any shard."""
    look_again_s = 10 * reserving._TRY_AGAIN_S
    monkeypatch.setattr(reserving, "LOOK_AGAIN_S", look_again_s)
    async with two_that_do_not_fit(tmp_path) as (residency, first, whole):
        assert not await whole.try_reserve()
        begun_s = time.monotonic()
        await whole.wait("file:///second")
        assert time.monotonic() - begun_s > look_again_s / 2

        residency.release(first)
        while not await whole.try_reserve():
            await whole.wait("file:///second")
        assert first not in residency.leased


async def test_change_between_two_attempts_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Space that is freed while ranges are requested is tried for without another change."""
    monkeypatch.setattr(reserving, "LOOK_AGAIN_S", 10 * GUARD_S)
    async with two_that_do_not_fit(tmp_path) as (residency, first, whole):
        assert not await whole.try_reserve()
        residency.release(first)
        async with asyncio.timeout(GUARD_S):
            await whole.wait("file:///second")
            while not await whole.try_reserve():
                await whole.wait("file:///second")


async def test_attempt_without_need_does_not_put_off_one_that_is_needed(tmp_path: Path) -> None:
    """An object whose parts would do is given up only if there is no space for it."""
    async with two_that_do_not_fit(tmp_path) as (residency, first, whole):
        with residency.parts.in_line(KeyClaim()):
            assert not await whole.reserve_at_once()
        residency.release(first)
        assert await whole.try_reserve()


async def test_suspect_shard_is_checked_once_for_all_that_ask_for_it(
    tar: Path, tmp_path: Path
) -> None:
    """The check keeps the shard for itself, and so does nobody who waits for the check."""
    ref = ShardRef(f"file://{tar}")
    async with ground(tmp_path) as here:
        parts = here.parts()
        monitor = asyncio.create_task(parts.core.health.run())
        leasing = parts.fetching.leasing

        async def acquired() -> Shard:
            published = await leasing.acquire(ref, PriorityClass.PLANNED, Wait())
            assert isinstance(published, Published)
            return published.shard

        damaged = await acquired()
        path = here.store.layout.tar(damaged.key)
        path.chmod(0o640)
        path.write_bytes(bytes(tar.stat().st_size))
        damaged.suspicion = "a sample is unreadable"
        with capture_logs() as logs:
            found = await asyncio.gather(*(acquired() for _ in range(4)))
        monitor.cancel()
        assert len(set(found)) == 1
        assert damaged not in found
    events = [log["event"] for log in logs]
    assert events.count("checking a shard that a reader found damaged") == 1
    assert "corrupt shard is in use" not in events


SIGNED = "https://host/a.tar?X-Amz-Credential=K&X-Amz-Date=20300101T000000Z&X-Amz-Signature=first"


@pytest.mark.parametrize(
    "ref",
    [
        ShardRef("https://host/a.tar"),
        ShardRef("https://host/a.tar.gz", is_file=True),
        ShardRef(SIGNED),
    ],
    ids=["shard", "compressed file", "signed"],
)
async def test_cached_versions_are_known_after_a_restart(ref: ShardRef, tmp_path: Path) -> None:
    """A plan whose refs name none counts them as cached, before the origin is asked."""
    async with ground(tmp_path) as here:
        shard = await publish(here.store, ref.url, is_file=ref.is_file)
        assert shard.facts is not None
        await here.parts().core.history.remember(replace(shard.facts, url=stored_url(ref.url)))
    async with ground(tmp_path) as here:
        parts = here.parts()
        reader = parts.requesting.readers.add("job", 0)
        listing = Listing(Shards.of([ref._replace(is_file=False)]))
        reader.declare(listing.read_as("files") if ref.is_file else listing, 1)
        await reader.extend([0])
        assert parts.core.planner.key(name_of(ref)) == shard.key
