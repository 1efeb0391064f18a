"""A tier before an origin: asked first, trusted in nothing, and backed by the origin."""

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shardcache.config.origin_table import OriginTable
from shardcache.errors import CorruptShardError, OriginBusyError, ShardChangedError
from shardcache.origin.objects import RemoteObject
from shardcache.origin.tier.tier_state import TierState
from shardcache.telemetry.metrics import Counters
from support.cases import first_quick
from support.network.other_user import OtherUser, needs_root, open_folder
from support.programs.daemon import eventually
from support.programs.downloads import PART, Rig
from support.stores.faulty_s3 import FaultyS3
from support.stores.mischief import Mischief

DATA = random.Random(5).randbytes(6 * PART + 99)
PARTS = 7


class TieredRig(Rig):
    """A downloader whose parts come from a tier, `near`, in front of the origin, `far`."""

    def __init__(self, root: Path, far: FaultyS3, near: FaultyS3, **options: object) -> None:
        address = str(near.front)
        tables = (
            OriginTable(match=match, tier=address, storage_options=options)
            for match in ("s3://", "http://")
        )
        super().__init__(root, *tables)
        self.far = far
        self.near = near
        self.tier: TierState = self.origins.tiers[address]

    async def put(self, key: str = "a.tar", *, web: bool = False) -> RemoteObject:
        """Store the data in both; return the object of the origin."""
        url = self.far.put(key, DATA)
        self.near.put(key, DATA)
        return await self.stat(self.far.http_url(key) if web else url)

    def forget(self) -> None:
        """Remove what was downloaded."""
        for path in self.layout.partial.iterdir():
            path.unlink()

    def gets(self, server: FaultyS3) -> int:
        """Return the number of parts that a server was asked for."""
        return sum(method == "GET" and asked != "bytes=0-0" for method, _, asked, _ in server.seen)


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket in it."""
    with tempfile.TemporaryDirectory(prefix="sc-") as name:
        yield Path(name)


@pytest.fixture
async def tiered(faulty: FaultyS3, tmp_path: Path, socket_folder: Path) -> AsyncIterator[TieredRig]:
    """A downloader with a tier."""
    async with FaultyS3(front=socket_folder / "front.sock") as near:
        rig = TieredRig(tmp_path / "cache", faulty, near)
        yield rig
        await rig.origins.close()


@pytest.mark.parametrize("web", first_quick([False, True]), ids=["s3", "http"])
async def test_parts_come_from_the_tier(tiered: TieredRig, *, web: bool) -> None:
    """With the origin's Host and If-Match; the origin is asked for the version alone."""
    obj = await tiered.put(web=web)
    partial = await tiered.download(obj)
    assert partial.path.read_bytes() == DATA
    assert tiered.gets(tiered.near) == PARTS
    assert tiered.gets(tiered.far) == 0
    assert set(tiered.near.hosts) == {tiered.far.endpoint_url.removeprefix("http://")}
    assert all(condition for *_, condition in tiered.near.seen)
    assert tiered.counters == Counters(tier_bytes=len(DATA), tier_requests=PARTS, origin_requests=1)


@pytest.mark.parametrize(
    ("arguments", "asked"), [("X-Amz-Signature=a&X-Amz-Security-Token=b", PARTS), ("sig=a", 0)]
)
async def test_secrets_that_the_tier_would_keep_on_disk_bypass_it(
    arguments: str, asked: int, tiered: TieredRig
) -> None:
    """The names of its cached parts omit AWS's signatures alone."""
    await tiered.put()
    await tiered.download(await tiered.stat(f"{tiered.far.http_url('a.tar')}?{arguments}"))
    assert tiered.gets(tiered.near) == asked


async def test_a_busy_store_is_asked_again_by_way_of_the_tier(tiered: TieredRig) -> None:
    """Its 503 is no failure of the tier, and a request past that would burden the store."""
    obj = await tiered.put()
    tiered.near.refusal_headers = {"X-Shardcache-Tier": "MISS"}  # it passes the store's answer on
    tiered.near.fail(Mischief.SLOW_DOWN, key="a.tar", times=1, start=2 * PART)
    assert (await tiered.download(obj)).path.read_bytes() == DATA
    assert tiered.gets(tiered.far) == 0
    assert tiered.counters.tier_failures == 0
    assert tiered.counters.retries == 1


async def test_known_versions_come_from_the_tier_while_the_store_fails(tiered: TieredRig) -> None:
    """An object whose version was not learned before cannot be read."""
    obj = await tiered.put()
    for key in ("a.tar", "b.tar"):
        tiered.far.fail(Mischief.SLOW_DOWN, key=key, method="HEAD")
    assert await tiered.stat(obj.url) == obj
    assert (await tiered.download(obj)).path.read_bytes() == DATA
    assert tiered.gets(tiered.far) == 0
    with pytest.raises(OriginBusyError):
        await tiered.put("b.tar")


@pytest.mark.parametrize(
    ("fault", "times", "refreshed"),
    [
        (Mischief.SLOW_DOWN, 1, 0),
        pytest.param(Mischief.FORBIDDEN, 1, 0, marks=pytest.mark.slow),
        pytest.param(Mischief.RESET, 1, 1, marks=pytest.mark.slow),
        pytest.param(Mischief.TRUNCATE, 2, 1, marks=pytest.mark.slow),
        pytest.param(Mischief.RANGE_SHIFTED, 2, 1, marks=pytest.mark.slow),
        pytest.param(Mischief.WHOLE, 1, 1, marks=pytest.mark.slow),
        (Mischief.ETAG_OTHER, 1, 1),
    ],
)
async def test_a_part_that_the_tier_fails_to_send_comes_from_the_origin(
    fault: Mischief, times: int, refreshed: int, tiered: TieredRig
) -> None:
    """No pause comes before it, but a damaged part is first asked for past the tier's cache."""
    obj = await tiered.put()
    tiered.near.fail(fault, key="a.tar", start=2 * PART, times=times)
    assert (await tiered.download(obj)).path.read_bytes() == DATA
    assert tiered.near.refreshed == [f"bytes={2 * PART}-{3 * PART - 1}"] * refreshed
    from_origin = times - refreshed
    assert tiered.gets(tiered.far) == from_origin
    assert tiered.counters.tier_failures == times
    assert tiered.counters.retries == 0
    assert tiered.counters.tier_requests == tiered.gets(tiered.near) == PARTS + refreshed


async def test_the_tier_is_asked_for_single_parts(tiered: TieredRig) -> None:
    """Another node's requests would be for other ranges, and not find what it caches."""
    obj = await tiered.put()
    tiered.downloader = tiered.make(shard_connections=1)
    for _ in range(2):
        tiered.forget()
        tiered.near.seen.clear()
        await tiered.download(obj)
    assert tiered.gets(tiered.near) == PARTS


@pytest.mark.parametrize(
    ("silences", "from_origin"), [pytest.param(1, 0, marks=pytest.mark.slow), (2, 1)]
)
async def test_a_part_whose_owner_is_unreachable_is_requested_from_the_tier_again(
    silences: int, from_origin: int, tiered: TieredRig
) -> None:
    """The next owner on the ring fetches it once for all, and only then the store is asked."""
    obj = await tiered.put()
    tiered.near.fail(Mischief.SILENCE, key="a.tar", start=2 * PART, times=silences)
    tiered.near.owner = None
    tiered.downloader = tiered.make(stall_timeout_s=2, attempts=1)
    assert (await tiered.download(obj)).path.read_bytes() == DATA
    assert tiered.gets(tiered.far) == from_origin
    assert tiered.gets(tiered.near) == PARTS + 1
    assert tiered.near.detoured == []


@pytest.mark.slow
async def test_a_part_for_which_its_owner_waits_is_waited_for(tiered: TieredRig) -> None:
    """The owner answers that it lives, so nothing comes from the origin, however late."""
    obj = await tiered.put()
    tiered.near.hold("a.tar", times=1, start=2 * PART)
    tiered.downloader = tiered.make(stall_timeout_s=0.5, attempts=1)
    download = asyncio.create_task(tiered.download(obj))
    # Twice the stall time-out.
    await asyncio.to_thread(eventually, lambda: tiered.near.questions["alive"] >= 8)
    tiered.near.answer_late()
    assert (await download).path.read_bytes() == DATA
    assert tiered.gets(tiered.far) == 0
    assert tiered.counters.tier_failures == 0


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Mischief.SILENCE, Mischief.STALL])
async def test_a_request_that_its_owner_has_lost_is_sent_again(
    fault: Mischief, tiered: TieredRig
) -> None:
    """An owner that knows no such request is not waited for, and the store is not asked."""
    obj = await tiered.put()
    tiered.near.owner_has_parts = False
    tiered.near.fail(fault, key="a.tar", times=1, start=2 * PART)
    tiered.downloader = tiered.make(stall_timeout_s=8, attempts=1)
    assert (await tiered.download(obj)).path.read_bytes() == DATA
    assert tiered.gets(tiered.near) == PARTS + 1
    assert tiered.gets(tiered.far) == 0
    assert tiered.near.refreshed == []


@pytest.mark.slow
async def test_a_request_that_is_lost_twice_goes_to_the_store(tiered: TieredRig) -> None:
    """No part waits for a third worker that may hang as well."""
    obj = await tiered.put()
    tiered.near.owner_has_parts = False
    tiered.near.fail(Mischief.SILENCE, key="a.tar", start=2 * PART, times=2)
    tiered.downloader = tiered.make(stall_timeout_s=4, attempts=1)
    assert (await tiered.download(obj)).path.read_bytes() == DATA
    assert tiered.gets(tiered.near) == PARTS + 1
    assert tiered.gets(tiered.far) == 1


@pytest.mark.slow
async def test_an_owner_that_is_slow_twice_is_left_out(tiered: TieredRig) -> None:
    """Its slow parts come from the origin, and then everything from another owner."""
    obj = await tiered.put()
    tiered.downloader = tiered.make(hedged_share=0.03, stall_timeout_s=10)
    await tiered.download(obj)
    tiered.near.owner_is_slow = True
    for number in (2, 4):
        tiered.forget()
        tiered.near.fail(Mischief.DRIP, key="a.tar", times=1, start=number * PART)
        assert (await tiered.download(obj)).path.read_bytes() == DATA
    assert tiered.gets(tiered.far) == 2
    assert tiered.counters.hedges == 2
    assert tiered.counters.tier_failures == 0
    before = len(tiered.near.detoured)
    tiered.forget()
    await tiered.download(obj)
    assert len(tiered.near.detoured) - before == PARTS
    assert tiered.gets(tiered.far) == 2


@pytest.mark.slow
async def test_an_owner_is_learnt_to_be_slow_from_its_own_rate(tiered: TieredRig) -> None:
    """It answers promptly that it waits for nothing: what it sends slowly, it sends from its disk.

    After two such parts, all of them come by way of another owner, and nothing comes from the store
    directly.
    """
    obj = await tiered.put()
    tiered.downloader = tiered.make(stall_timeout_s=10)
    await tiered.download(obj)
    tiered.forget()
    tiered.near.owner_has_parts = False
    for number in (1, 2, 3):
        tiered.near.fail(Mischief.DRIP, key="a.tar", times=1, start=number * PART)
    assert (await tiered.download(obj)).path.read_bytes() == DATA
    assert len(tiered.near.detoured) > 0
    assert tiered.gets(tiered.far) == 0
    tiered.near.detoured.clear()
    tiered.forget()
    await tiered.download(obj)
    assert len(tiered.near.detoured) == PARTS


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "from_origin"), [(Mischief.SILENCE, 2), (Mischief.STALL, 0)])
async def test_a_silent_owner_is_not_called_slow(
    fault: Mischief, from_origin: int, tiered: TieredRig
) -> None:
    """It is dead, and nginx has the next one for all nodes, so a detour would fetch parts again.

    That it had sent the beginning of a part makes no difference: that part, too, comes by way of
    the next owner.
    """
    obj = await tiered.put()
    tiered.downloader = tiered.make(hedged_share=0.03, stall_timeout_s=10)
    await tiered.download(obj)
    tiered.near.owner_is_slow = True
    for number in (2, 4):
        tiered.forget()
        tiered.near.fail(fault, key="a.tar", times=1, start=number * PART)
        assert (await tiered.download(obj)).path.read_bytes() == DATA
    assert tiered.gets(tiered.far) == from_origin
    tiered.forget()
    await tiered.download(obj)
    assert tiered.near.detoured == []


@pytest.mark.slow
async def test_a_part_on_which_the_tier_stalled_is_fetched_past_its_cache_next_time(
    tiered: TieredRig,
) -> None:
    """Only the part that stalls, and once; one that was refused, from the cache."""
    obj = await tiered.put()
    tiered.downloader = tiered.make(stall_timeout_s=2)
    tiered.near.fail(Mischief.STALL, key="a.tar", times=1, start=2 * PART)
    tiered.near.fail(Mischief.INTERNAL_ERROR, key="a.tar", times=1, start=3 * PART)
    for _ in range(3):
        await tiered.download(obj)
        tiered.forget()
    assert tiered.near.refreshed == [f"bytes={2 * PART}-{3 * PART - 1}"]


async def test_bytes_that_arrived_damaged_are_fetched_past_the_tiers_cache(
    tiered: TieredRig,
) -> None:
    """The checksum tells; any part may be the damaged one."""
    tiered.near.crc32c = tiered.far.crc32c = True
    obj = await tiered.put()
    tiered.near.fail(Mischief.FLIP, key="a.tar", times=1, start=2 * PART)
    with pytest.raises(CorruptShardError):
        await tiered.download(obj)
    tiered.forget()
    tiered.origins.suspect(obj, PART)
    assert (await tiered.download(obj)).path.read_bytes() == DATA
    assert len(tiered.near.refreshed) == PARTS
    assert tiered.gets(tiered.far) == 0


@pytest.mark.slow
async def test_a_replaced_object_is_noticed_behind_a_tier_that_has_the_old_one(
    tiered: TieredRig,
) -> None:
    """Its parts are the old version's, and missing ones must not come from the new one."""
    obj = await tiered.put()
    tiered.far.put("a.tar", DATA[::-1])
    assert (await tiered.download(obj)).path.read_bytes() == DATA
    del tiered.near.objects["a.tar"]
    tiered.forget()
    with pytest.raises(ShardChangedError):
        await tiered.download(obj)


async def test_a_dead_tier_is_left_alone_but_for_probes(tiered: TieredRig) -> None:
    """After sixteen failures in a row; everything comes from the origin."""
    for number in range(4):
        obj = await tiered.put(f"{number}.tar")
        tiered.near.fail(Mischief.INTERNAL_ERROR, key=f"{number}.tar")
        assert (await tiered.download(obj)).path.read_bytes() == DATA
    assert tiered.gets(tiered.far) == 4 * PARTS
    assert 16 <= tiered.gets(tiered.near) < 16 + 4  # three parts at a time
    assert tiered.tier.to_json()["failing"]


@pytest.mark.slow
@needs_root
async def test_a_front_of_another_user_gets_no_signed_url(faulty: FaultyS3, tmp_path: Path) -> None:
    """An impostor at the socket while nginx is down is sent nothing, and the origin is used."""
    with open_folder() as folder:
        folder.chmod(0o777)
        front = folder / "front.sock"
        with OtherUser(4321).listening(front) as seen:
            rig = Rig(tmp_path / "cache", OriginTable(match="s3://", tier=str(front)))
            obj = await rig.stat(faulty.put("a.tar", DATA))
            partial = await rig.download(obj)
            await rig.origins.close()
        assert partial.path.read_bytes() == DATA
        assert rig.counters.tier_bytes == 0
        assert rig.counters.tier_failures == PARTS
        assert seen == [""] * PARTS


@pytest.mark.slow
async def test_a_tier_that_stalls_is_left_alone_after_two_stalls(tiered: TieredRig) -> None:
    """A failure counts by the time it took, as many stalls would hold up a shard for minutes."""
    obj = await tiered.put()
    tiered.near.fail(Mischief.STALL, key="a.tar")
    tiered.downloader = tiered.make(stall_timeout_s=1, shard_connections=2)
    assert (await tiered.download(obj)).path.read_bytes() == DATA
    assert tiered.gets(tiered.near) in (2, 3), "a third part may begin between two stalls"
    assert tiered.gets(tiered.far) == PARTS
    assert tiered.tier.to_json()["failing"]


@pytest.mark.parametrize("web", first_quick([False, True]), ids=["s3", "http"])
async def test_requests_that_tell_no_version_or_need_the_sdk_bypass_the_tier(
    faulty: FaultyS3, tmp_path: Path, socket_folder: Path, *, web: bool
) -> None:
    """Dates tell too little, and presigned urls lack the SDK's options, so it is no failure."""
    faulty.validators = ("Last-Modified",) if web else ("ETag",)
    options = {} if web else {"config_kwargs": {"s3": {"addressing_style": "path"}}}
    async with FaultyS3(front=socket_folder / "front.sock") as near:
        rig = TieredRig(tmp_path / "cache", faulty, near, **options)
        obj = await rig.put(web=web)
        assert (await rig.download(obj)).path.read_bytes() == DATA
        assert near.seen == []
        assert rig.gets(faulty) == PARTS
        assert rig.counters.tier_failures == 0
        await rig.origins.close()


@pytest.mark.slow
async def test_a_cancelled_download_ends_its_requests_to_the_tier(tiered: TieredRig) -> None:
    """And is no failure of the tier."""
    obj = await tiered.put()
    tiered.near.fail(Mischief.SILENCE, key="a.tar")
    task = asyncio.create_task(tiered.download(obj))
    await asyncio.to_thread(eventually, lambda: bool(tiered.near.seen))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tiered.counters.tier_failures == 0
