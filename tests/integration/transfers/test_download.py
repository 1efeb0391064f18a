"""Downloads through real connections into a real partial file, whatever the server does."""

import asyncio
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shardcache.access.urls import store_of
from shardcache.errors import (
    AccessDeniedError,
    CorruptShardError,
    OriginBusyError,
    OriginUnavailableError,
    OutdatedError,
    ShardChangedError,
)
from shardcache.fetch.limits.slot_claims import WAITING, Priority
from shardcache.fetch.reads import UnfinishedParts
from shardcache.origin.base import Origin
from shardcache.origin.objects import RemoteObject
from shardcache.store.keys import shard_key
from shardcache.store.partial import Partial, discard
from shardcache.telemetry.metrics import Counters
from shardcache.transport.between.flow import Commit, Flow
from shardcache.transport.between.parts import Parts, PartSums, write_parts
from support.cases import first_quick
from support.programs.downloads import PART, PLANNED, Rig
from support.stores.buckets import Bucket
from support.stores.faulty_proxy import FaultyProxy
from support.stores.faulty_s3 import FaultyS3
from support.stores.mischief import Mischief

DATA = random.Random(7).randbytes(10 * PART + 1234)


async def test_every_byte_arrives(rig: Rig, faulty: FaultyS3) -> None:
    """File, journal and counters are exact; an empty object needs no request."""
    obj = await rig.stat(faulty.put("a.tar", DATA))
    partial = await rig.download(obj)
    assert partial.path.read_bytes() == DATA
    assert partial.missing() == []
    assert rig.counters == Counters(origin_bytes=len(DATA), origin_requests=1 + 11)
    assert rig.progress[0] == 0
    assert rig.progress[-1] == len(DATA)
    assert rig.progress == sorted(rig.progress)
    empty = await rig.download(await rig.stat(faulty.put("empty.tar", b"")))
    assert empty.path.read_bytes() == b""
    assert [method for method, key, *_ in faulty.seen if key == "empty.tar"] == ["HEAD"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        Mischief.RESET,
        Mischief.TRUNCATE,
        Mischief.SLOW_DOWN,
        Mischief.INTERNAL_ERROR,
        Mischief.RANGE_SHIFTED,
        Mischief.WHOLE,
        Mischief.EXPIRED,
    ],
)
async def test_faults_that_a_retry_mends_do_no_harm(
    fault: Mischief, rig: Rig, faulty: FaultyS3
) -> None:
    """The part is asked for again, alone, and nothing of the bad answer stays."""
    obj = await rig.stat(faulty.put("a.tar", DATA))
    # A refused part is asked for once more in the SDK's own way, which knows what the refusal
    # means.
    faulty.fail(fault, key="a.tar", times=4 if fault is Mischief.EXPIRED else 2, start=3 * PART)
    partial = await rig.download(obj)
    assert partial.path.read_bytes() == DATA
    assert rig.counters.retries == 2
    assert rig.counters.origin_requests == 1 + 11 + 2
    assert rig.counters.origin_bytes >= len(DATA)


async def fast(rig: Rig, faulty: FaultyS3) -> None:
    """Let a downloader with two connections per shard see that the store answers at once."""
    rig.downloader = rig.make(shard_connections=2)
    obj = await rig.stat(faulty.put("seen.tar", DATA))
    while not any(len(run) > 1 for run in asked(faulty)):
        faulty.seen.clear()
        discard(rig.layout, shard_key(obj.url, obj.version))
        await rig.download(obj)
    faulty.seen.clear()


def asked(faulty: FaultyS3) -> list[range]:
    """Return the parts that each request was for, in order."""
    ends = [
        [int(end) for end in (header or "").removeprefix("bytes=").split("-")]
        for method, _, header, _ in faulty.seen
        if method == "GET"
    ]
    return [range(first // PART, last // PART + 1) for first, last in sorted(ends)]


async def test_a_fast_store_is_asked_for_several_parts_at_once(rig: Rig, faulty: FaultyS3) -> None:
    """As many as leave no connection idle; a part that is there already is left out."""
    await fast(rig, faulty)
    obj = await rig.stat(faulty.put("a.tar", DATA))
    write_parts(Partial.open(rig.layout, obj, PART).parts(4, 1), DATA[4 * PART : 5 * PART])
    partial = await rig.download(obj)
    assert partial.path.read_bytes() == DATA
    assert partial.missing() == []
    assert asked(faulty) == [range(0, 4), range(5, 9), range(9, 11)]
    assert rig.progress[-1] == len(DATA)


async def test_slow_connections_do_not_make_requests_smaller_than_a_mebibyte(
    rig: Rig, faulty: FaultyS3
) -> None:
    """Most of a small request's time is latency: more requests would only make it longer."""
    rig.downloader = rig.make(shard_connections=2)
    url = faulty.put("a.tar", DATA)
    rig.downloader.scheduler.origin(store_of(url)).link.record_time(PART, 10.0, 2)
    await rig.download(await rig.stat(url))
    assert asked(faulty) == [range(0, 4), range(4, 8), range(8, 11)]


@pytest.mark.parametrize("fault", first_quick([Mischief.TRUNCATE, Mischief.SLOW_DOWN]))
async def test_parts_are_requested_one_by_one_after_a_failure(
    fault: Mischief, rig: Rig, faulty: FaultyS3
) -> None:
    """Only those of the request that failed; nothing of its answer stays."""
    await fast(rig, faulty)
    obj = await rig.stat(faulty.put("a.tar", DATA))
    faulty.fail(fault, key="a.tar", times=1, start=4 * PART)
    assert (await rig.download(obj)).path.read_bytes() == DATA
    assert rig.counters.retries == 1
    assert asked(faulty) == [
        range(0, 4), range(4, 5), range(4, 8), range(5, 6), range(6, 7), range(7, 8), range(8, 11)
    ]  # fmt: skip


async def test_a_waiting_reader_gets_part_by_part(rig: Rig, faulty: FaultyS3) -> None:
    """However fast the store is: what is asked for together is recorded together."""
    await fast(rig, faulty)
    obj = await rig.stat(faulty.put("a.tar", DATA))
    partial = await rig.download(obj, Priority(WAITING))
    assert partial.missing() == []
    assert len(asked(faulty)) == 11


async def test_an_answer_given_ahead_saves_one_request(rig: Rig, faulty: FaultyS3) -> None:
    """An answer serves one download; the next asks, as it does if the answer was outdated."""
    rig.downloader = rig.make(listing_ttl_s=60.0)
    url = faulty.put("a.tar", DATA)
    ahead = await rig.downloader.stat_ahead(rig.origins.origin(url), url)
    faulty.put("a.tar", DATA[::-1])
    assert await rig.stat(url) is ahead, (
        "its time is that of the answer, from which the cache counts"
    )
    with pytest.raises(ShardChangedError):
        await rig.download(ahead)
    partial = await rig.download(await rig.stat(url))
    assert partial.path.read_bytes() == DATA[::-1]
    assert [method for method, *_ in faulty.seen].count("HEAD") == 2


@pytest.mark.parametrize(("ttl_s", "version"), [(60.0, "another"), (0.0, None)])
async def test_an_answer_about_another_version_or_too_old_is_not_used(
    ttl_s: float, version: str | None, rig: Rig, faulty: FaultyS3
) -> None:
    """The origin is asked, as without one."""
    url = faulty.put("a.tar", DATA)
    origin = rig.origins.origin(url)
    rig.downloader = rig.make(listing_ttl_s=ttl_s)
    await rig.downloader.stat_ahead(origin, url)
    with pytest.raises(OutdatedError) if version else nullcontext():
        await rig.downloader.stat(origin, url, version)
    assert [method for method, *_ in faulty.seen] == ["HEAD", "HEAD"]


async def test_a_refusal_is_not_retried_and_ends_the_other_parts(
    rig: Rig, faulty: FaultyS3
) -> None:
    """403 comes at once as one typed error, while another part hangs that would hang for good."""
    obj = await rig.stat(faulty.put("a.tar", DATA))
    faulty.fail(Mischief.SILENCE, key="a.tar", times=1, start=0)
    faulty.fail(Mischief.FORBIDDEN, key="a.tar", times=2, start=2 * PART)
    rig.downloader = rig.make(stall_timeout_s=100)
    with pytest.raises(AccessDeniedError) as denied:
        await rig.download(obj)
    assert denied.value.url == obj.url
    assert rig.counters.retries == 0


@pytest.mark.parametrize("replaced", first_quick([True, False]))
async def test_an_object_replaced_between_two_ranges_is_never_stitched(
    replaced: bool, rig: Rig, faulty: FaultyS3
) -> None:
    """The download of the old version ends at once, and the new version can be fetched whole."""
    obj = await rig.stat(faulty.put("a.tar", DATA))
    if replaced:
        faulty.before(lambda: faulty.put("a.tar", DATA[::-1]), key="a.tar", start=4 * PART)
    else:
        faulty.fail(Mischief.ETAG_OTHER, key="a.tar", times=1, start=4 * PART)
    with pytest.raises(ShardChangedError):
        await rig.download(obj)
    assert rig.counters.retries == 0
    if replaced:
        assert (await rig.download(await rig.stat(obj.url))).path.read_bytes() == DATA[::-1]


async def test_a_file_replaced_while_it_is_read_is_noticed_without_conditional_reads(
    rig: Rig, tmp_path: Path
) -> None:
    """A filesystem that has no If-Match is asked for the version once more at the end."""
    file = tmp_path / "a.tar"
    file.write_bytes(DATA)
    obj = await rig.stat(str(file))
    partial = Partial.open(rig.layout, obj, PART)

    def replace(done_bytes: int) -> None:
        other = tmp_path / "other.tar"
        other.write_bytes(DATA[::-1])
        # In one step: a file that is being written again is short for a moment, which is another
        # error.
        other.replace(file)

    with pytest.raises(ShardChangedError):
        await rig.downloader.download(
            rig.origins.origin(obj.url), partial, priority=lambda: PLANNED, progress=replace
        )
    assert (await rig.download(await rig.stat(str(file)))).path.read_bytes() == DATA[::-1]


@pytest.mark.parametrize("first", first_quick([None, Mischief.RESET]), ids=["whole", "resumed"])
async def test_object_without_any_version_is_read_in_one_request(
    first: Mischief | None, rig: Rig, faulty: FaultyS3
) -> None:
    """A file replaced during or between downloads is of one version."""
    faulty.validators = ()
    faulty.put("a.tar", DATA)
    rig.downloader = rig.make(attempts=1)
    if first is not None:
        obj = await rig.stat(faulty.http_url("a.tar"))
        faulty.fail(first, key="a.tar", times=1)
        with pytest.raises(OriginUnavailableError):
            await rig.download(obj)
        faulty.put("a.tar", DATA[::-1])
    faulty.before(
        lambda: faulty.put("a.tar", faulty.objects["a.tar"][::-1]), key="a.tar", start=4 * PART
    )
    found = (await rig.download(await rig.stat(faulty.http_url("a.tar")))).path.read_bytes()
    assert found == (DATA if first is None else DATA[::-1])


async def test_file_without_any_version_is_read_at_once(rig: Rig) -> None:
    """The same through fsspec, where nothing but the size is known of a file."""

    class Undated(MemoryFileSystem):  # type: ignore[misc]
        """Files without dates, each replaced after a read that does not reach its end."""

        protocol = "undated"

        def info(self, path: str, **options: Any) -> Any:
            return {
                name: value
                for name, value in super().info(path, **options).items()
                if name != "created"
            }

        def cat_file(
            self, path: str, start: int | None = None, end: int | None = None, **options: Any
        ) -> Any:
            found = super().cat_file(path, start, end)
            self.pipe_file(path, super().cat_file(path)[::-1])
            return found

    fsspec.register_implementation("undated", Undated, clobber=True)
    Undated().pipe_file("undated://a.tar", DATA)
    assert (await rig.download(await rig.stat("undated://a.tar"))).path.read_bytes() == DATA
    Undated().rm("undated://a.tar")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["CRC32C", "CRC32", "CRC64NVME"])
async def test_a_bit_that_flips_on_the_way_is_caught(
    algorithm: str, rig: Rig, moto: Bucket
) -> None:
    """The whole, resumed parts included, is compared with the store's own checksum."""
    obj = await rig.stat(moto.put("a.tar", DATA, ChecksumAlgorithm=algorithm))
    assert obj.checksum is not None
    assert obj.checksum.algorithm == algorithm.lower()
    write_parts(Partial.open(rig.layout, obj, PART).parts(1, 1), DATA[PART : 2 * PART])
    assert (await rig.download(obj)).path.read_bytes() == DATA
    assert rig.counters.origin_bytes == len(DATA) - PART
    flipped = bytes([DATA[0] ^ 1]) + DATA[1:PART]
    other = RemoteObject(obj.url + "?", obj.version, obj.size_bytes, obj.checksum)
    partial = Partial.open(rig.layout, other, PART)
    write_parts(partial.parts(0, 1), flipped)
    write_parts(partial.parts(1, partial.part_count - 1), DATA[PART:])
    with pytest.raises(CorruptShardError, match=algorithm.lower()):
        await rig.download(other)


async def test_a_server_without_ranges_is_read_in_one_go(rig: Rig, faulty: FaultyS3) -> None:
    """One request for all parts; after a cut the whole is read again."""
    faulty.ranges = False
    faulty.put("a.tar", DATA)
    obj = await rig.stat(faulty.http_url("a.tar"))
    faulty.fail(Mischief.TRUNCATE, key="a.tar", times=1)
    assert (await rig.download(obj)).path.read_bytes() == DATA
    assert rig.counters.retries == 1
    assert [asked for _, _, asked, _ in faulty.seen] == ["bytes=0-0", None, None]


class HalfwayOrigin(Origin):
    """A store that sends half of each range, and the rest when it is let."""

    def __init__(self) -> None:
        self.open = 0
        self.halves = asyncio.Semaphore(0)
        self.let = asyncio.Event()

    async def fetch(
        self, obj: RemoteObject, parts: Parts, flow: Flow, commit: Commit | None = None
    ) -> list[PartSums]:
        """Write zeros."""
        self.open += 1
        flow.received(parts.size_bytes // 2)
        self.halves.release()
        await self.let.wait()
        flow.received(parts.size_bytes - parts.size_bytes // 2)
        return write_parts(parts, bytes(parts.size_bytes))


async def halfway(
    rig: Rig,
    origin: HalfwayOrigin,
    parts: int,
    number: int = 0,
    unfinished: UnfinishedParts | None = None,
) -> None:
    """Download an object of that store."""
    sink = Partial.open(rig.layout, RemoteObject(f"held://{number}", "1", parts * PART), PART)
    held = cast(Origin, origin)
    await rig.downloader.download(
        held, sink, priority=lambda: PLANNED, progress=rig.progress.append, unfinished=unfinished
    )


@pytest.mark.parametrize(("shards", "requests"), [(1, 3), (2, 4)])
async def test_connections_are_bounded_for_a_shard_and_for_all(
    shards: int, requests: int, rig: Rig
) -> None:
    """One shard has its three requests under way, two have the four of all together."""
    origin = HalfwayOrigin()
    async with asyncio.TaskGroup() as group:
        for number in range(shards):
            group.create_task(halfway(rig, origin, 10, number))
        for _ in range(20):
            await asyncio.sleep(0)
        assert origin.open == requests
        origin.let.set()
    assert origin.open == shards * 10


async def test_bytes_count_as_they_come(rig: Rig) -> None:
    """Half of each part is told before any is whole, and nothing is told twice."""
    origin = HalfwayOrigin()
    unfinished = UnfinishedParts()
    async with asyncio.TaskGroup() as group:
        group.create_task(halfway(rig, origin, 3, unfinished=unfinished))
        for _ in range(3):
            await origin.halves.acquire()
        assert rig.progress == [0]
        assert unfinished.received_bytes == 3 * (PART // 2)
        origin.let.set()
    assert rig.progress[-1] == 3 * PART
    assert unfinished.received_bytes == 0


class StatOrigin(Origin):
    """A store that describes objects once let, and keeps the first-byte counts asked for."""

    def __init__(self) -> None:
        self.first_bytes: list[int] = []
        self.asked = asyncio.Semaphore(0)
        self.let = asyncio.Event()

    async def stat(self, url: str, first_bytes: int = 0) -> RemoteObject:
        """Describe any object."""
        self.first_bytes.append(first_bytes)
        self.asked.release()
        await self.let.wait()
        return RemoteObject(url, "1", PART)


async def test_first_parts_requested_from_one_store_do_not_keep_another_busy(rig: Rig) -> None:
    """Each store has connections of its own: a quarter of them may carry first parts."""
    slow = StatOrigin()
    idle = StatOrigin()
    idle.let.set()
    async with asyncio.TaskGroup() as group:
        group.create_task(rig.downloader.stat(slow, "slow://store/a", first_bytes=PART))
        await slow.asked.acquire()
        group.create_task(rig.downloader.stat(slow, "slow://store/b", first_bytes=PART))
        await slow.asked.acquire()
        await rig.downloader.stat(idle, "idle://store/a", first_bytes=PART)
        slow.let.set()
    assert slow.first_bytes == [PART, 0]
    assert idle.first_bytes == [PART]


class ThrottlingOrigin(HalfwayOrigin):
    """A store that throttles its first request once it is let, and answers all others."""

    async def fetch(
        self, obj: RemoteObject, parts: Parts, flow: Flow, commit: Commit | None = None
    ) -> list[PartSums]:
        """Write zeros, or refuse."""
        self.open += 1
        if self.open > 1:
            return write_parts(parts, bytes(parts.size_bytes))
        self.halves.release()
        await self.let.wait()
        raise OriginBusyError("slow down", url=obj.url)


async def test_a_throttled_request_counts_as_an_attempt_though_it_was_paused(rig: Rig) -> None:
    """The pause does not make the store throttle: the store's Retry-After has to pass."""
    rig.downloader = rig.make(max_connections=1)
    origin = ThrottlingOrigin()
    async with asyncio.TaskGroup() as group:
        group.create_task(halfway(rig, origin, 1, number=0))
        await origin.halves.acquire()
        urgent = Partial.open(rig.layout, RemoteObject("held://1", "1", PART), PART)
        await rig.downloader.download(
            cast(Origin, origin),
            urgent,
            priority=lambda: Priority(WAITING),
            progress=rig.progress.append,
        )
        assert rig.downloader.scheduler.pauses == 1
        origin.let.set()
    assert rig.counters.retries == 1


MANY_PARTS = random.Random(5).randbytes(120 * PART)


@pytest.fixture
def patient(rig: Rig) -> Rig:
    """A downloader that would wait for minutes."""
    rig.downloader = rig.make(stall_timeout_s=100, hedged_share=0.5)
    return rig


@pytest.mark.parametrize("fault", first_quick([Mischief.STALL, Mischief.SILENCE]))
async def test_a_part_that_hangs_is_fetched_on_a_second_connection(
    fault: Mischief, patient: Rig, faulty: FaultyS3
) -> None:
    """Long before its time is over, and without a retry; the file is right."""
    await patient.download(await patient.stat(faulty.put("seen.tar", MANY_PARTS)))
    obj = await patient.stat(faulty.put("late.tar", MANY_PARTS[::-1]))
    faulty.fail(fault, key="late.tar", times=1, start=60 * PART)
    assert (await patient.download(obj)).path.read_bytes() == MANY_PARTS[::-1]
    first_byte = f"bytes={60 * PART}-"
    requests = sum(
        key == "late.tar" and first_byte in (asked or "") for _, key, asked, _ in faulty.seen
    )
    assert requests == 2
    assert patient.counters.retries == 0
    assert patient.counters.hedges >= 1
    assert patient.counters.hedged_bytes >= (PART // 2 if fault is Mischief.STALL else 0)
    assert patient.counters.origin_bytes == 2 * len(MANY_PARTS) + patient.counters.hedged_bytes


@pytest.mark.slow
async def test_bytes_that_drip_are_no_progress(
    patient: Rig, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of which a few bytes a second come is given up like one of which nothing comes."""
    url = faulty.put("a.tar", MANY_PARTS[:PART])
    with FaultyProxy(faulty.endpoint_url) as proxy:
        proxy.drip_s = 0.02
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint_url)
        obj = await patient.stat(url)
        downloader = patient.downloader
        patient.downloader = patient.make(stall_timeout_s=0.5, attempts=2)
        proxy.fail(Mischief.DRIP, times=2)
        with pytest.raises(OriginUnavailableError, match=r"only .* bytes were received for 0.5 s"):
            await patient.download(obj)
        patient.downloader = downloader
        assert (await patient.download(obj)).path.read_bytes() == MANY_PARTS[:PART]
