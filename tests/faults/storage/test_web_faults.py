"""A web server that misbehaves: a right file or a typed error, as with S3."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from shardcache.errors import OriginError
from support.programs.daemon import eventually
from support.programs.downloads import PART, Rig
from support.programs.guard import GUARD_S
from support.stores.faulty_proxy import FaultyProxy
from support.stores.faulty_s3 import BUCKET, FaultyS3
from support.stores.mischief import Mischief

DATA = random.Random(9).randbytes(3 * PART + 999)

# A web server has no checksum that would tell.
_BEYOND_NOTICE = {Mischief.FLIP, Mischief.OTHER_BYTES}
_NOTICED = [mischief for mischief in Mischief if mischief.method == "GET" and mischief not in _BEYOND_NOTICE]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """A downloader that soon gives up."""
    rig = Rig(tmp_path / "cache")
    rig.downloader = rig.make(attempts=4, stall_timeout_s=0.5)
    yield rig
    await rig.origins.close()


@pytest.mark.parametrize("mischief", _NOTICED, ids=lambda mischief: mischief.name.lower())
async def test_a_right_file_or_a_typed_error(mischief: Mischief, rig: Rig, faulty: FaultyS3) -> None:
    """Half of the answers are spoiled, those that tell the size among them; then the server is healed."""
    faulty.put("a.tar", DATA)
    other = random.Random(10).randbytes(len(DATA))
    with FaultyProxy(faulty.endpoint_url, objects={"a.tar": DATA}, other=other, late_s=0.1, drip_s=0.05) as proxy:
        url = f"{proxy.endpoint_url}/{BUCKET}/a.tar"
        proxy.fail(mischief, share=0.5)
        async with asyncio.timeout(GUARD_S):
            while not proxy.done[mischief]:
                await right_or_typed(rig, url)
            proxy.heal()
            while not await right_or_typed(rig, url):  # a busy machine may be as late as any mischief
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


async def test_no_request_overtakes_what_the_proxy_does_before_it(faulty: FaultyS3) -> None:
    """An object that is replaced before a part is asked for comes in its new edition, also at a hedged request."""
    faulty.put("a.tar", b"former")
    with FaultyProxy(faulty.endpoint_url) as proxy:

        def replace() -> None:
            eventually(lambda: proxy.requests == 4)
            faulty.put("a.tar", b"new")

        proxy.before(replace, key="a.tar")
        reads = (asyncio.to_thread(read, f"{proxy.endpoint_url}/{BUCKET}/a.tar") for _ in range(4))
        assert await asyncio.gather(*reads) == [b"new"] * 4


def read(url: str) -> bytes:
    """Return what is at a url."""
    with urlopen(url) as answer:
        body: bytes = answer.read()
    return body
