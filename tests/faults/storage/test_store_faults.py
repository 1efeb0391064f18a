"""A store or a web server that misbehaves a little, as in `make faults` thousands of times."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from campaign import store
from campaign.harness import QUICK, Result, Row, rows
from campaign.store_place import StorePlace
from shardcache.errors import CorruptShardError, OriginError, OriginUnavailableError
from support.programs.downloads import PART, Rig
from support.programs.guard import GUARD_S
from support.stores.faulty_proxy import FaultyProxy
from support.stores.faulty_s3 import BUCKET, FaultyS3
from support.stores.mischief import Mischief


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StorePlace]:
    """A store, a proxy before it and a daemon, for the module."""
    with store.ground(tmp_path_factory.mktemp("p"), QUICK) as place:
        yield place


@pytest.fixture
def result(place: StorePlace) -> Iterator[Result]:
    """The result of a test that begins with an empty cache, and leaves a store that works."""
    place.evict()
    result = Result("one test's")
    yield result
    place.proxy.heal()
    assert not result.first_failure


@pytest.mark.slow
@rows(store.ROWS)
def test_misbehaving_store_gives_right_shards_or_typed_errors(row: Row, place: StorePlace) -> None:
    """Whatever is wrong with its answers; and every shard comes once the store is healed."""
    row.check(place)


@pytest.mark.parametrize(
    "mischief", [Mischief.CHUNKED, Mischief.ENCODED], ids=lambda mischief: mischief.name.lower()
)
def test_rare_answers_that_http_allows_are_read(
    mischief: Mischief, place: StorePlace, result: Result
) -> None:
    """They cost no shard and no second try."""
    place.proxy.fail(mischief)
    assert place.read(result) == []
    assert place.proxy.done[mischief]


@pytest.mark.slow
def test_another_objects_bytes_under_the_right_headers_are_noticed(
    place: StorePlace, result: Result
) -> None:
    """The store's checksum or an MD5 ETag tells, and none of the bytes are served."""
    place.proxy.fail(Mischief.OTHER_BYTES)
    failures = place.read(result)
    assert {failure.number for failure in failures} == set(range(len(place.urls)))
    assert {type(failure.error) for failure in failures} == {CorruptShardError}
    assert {"MD5" if "MD5" in str(failure.error) else "crc32" for failure in failures} == {
        "MD5",
        "crc32",
    }
    place.recover(result, failures)


@pytest.mark.slow
def test_dripping_store_is_an_error_in_the_end(place: StorePlace, result: Result) -> None:
    """Bytes that come one by one, for hours if allowed to, do not keep a reader waiting."""
    place.proxy.fail(Mischief.DRIP)
    failures = place.read(result, [0])
    assert isinstance(failures[0].error, OriginUnavailableError)
    place.recover(result, failures)


DATA = random.Random(9).randbytes(3 * PART + 999)

# A web server has no checksum that would tell.
_BEYOND_NOTICE = {Mischief.FLIP, Mischief.OTHER_BYTES}
_NOTICED = [
    mischief for mischief in Mischief if mischief.method == "GET" and mischief not in _BEYOND_NOTICE
]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """A downloader that soon gives up."""
    rig = Rig(tmp_path / "cache")
    rig.downloader = rig.make(attempts=4, stall_timeout_s=0.5)
    yield rig
    await rig.origins.close()


@pytest.mark.slow
@pytest.mark.parametrize("mischief", _NOTICED, ids=lambda mischief: mischief.name.lower())
async def test_a_right_file_or_a_typed_error(
    mischief: Mischief, rig: Rig, faulty: FaultyS3
) -> None:
    """Half of the answers are spoiled, also those with the size, until the server is healed."""
    faulty.put("a.tar", DATA)
    with FaultyProxy(faulty.endpoint_url) as proxy:
        proxy.objects = {"a.tar": DATA}
        proxy.other = random.Random(10).randbytes(len(DATA))
        proxy.late_s = 0.1
        proxy.drip_s = 0.05
        url = f"{proxy.endpoint_url}/{BUCKET}/a.tar"
        proxy.fail(mischief, share=0.5)
        async with asyncio.timeout(GUARD_S):
            while not proxy.done[mischief]:
                await right_or_typed(rig, url)
            proxy.heal()
            # A busy machine may be as late as any mischief.
            while not await right_or_typed(rig, url):
                pass


async def right_or_typed(rig: Rig, url: str) -> bool:
    """Download again, and return whether the file came."""
    try:
        partial = await rig.download(await rig.stat(url))
    except OriginError as exn:
        assert exn.url == url
        return False
    assert partial.path.read_bytes() == DATA
    partial.path.unlink()
    return True
