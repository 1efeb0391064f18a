"""A part that hangs does not hold up its shard: it is asked for on a second connection."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shardcache.errors import OriginUnavailableError
from support.programs.downloads import PART, Rig
from support.stores.faulty_proxy import FaultyProxy
from support.stores.faulty_s3 import Fault, FaultyS3
from support.stores.mischief import Mischief

PARTS = 120
DATA = random.Random(5).randbytes(PARTS * PART)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """A downloader that would wait for minutes."""
    rig = Rig(tmp_path / "cache")
    rig.downloader = rig.make(stall_timeout_s=100, hedged_share=0.5)
    yield rig
    await rig.origins.close()


@pytest.mark.parametrize("fault", [Fault.STALL, Fault.SILENCE])
async def test_a_part_that_hangs_is_fetched_on_a_second_connection(fault: Fault, rig: Rig, faulty: FaultyS3) -> None:
    """Long before its time is over, and without a retry; the file is right."""
    await rig.download(await rig.stat(faulty.put("seen.tar", DATA)))
    obj = await rig.stat(faulty.put("late.tar", DATA[::-1]))
    faulty.fail("late.tar", fault, start=60 * PART)
    assert (await rig.download(obj)).path.read_bytes() == DATA[::-1]
    first_byte = f"bytes={60 * PART}-"
    assert sum(key == "late.tar" and first_byte in (asked or "") for _, key, asked, _ in faulty.seen) == 2
    assert rig.counters.retries == 0
    assert rig.counters.hedges >= 1
    assert rig.counters.hedged_bytes >= (PART // 2 if fault is Fault.STALL else 0)
    assert rig.counters.origin_bytes == 2 * len(DATA) + rig.counters.hedged_bytes


async def test_bytes_that_drip_are_no_progress(rig: Rig, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of which a few bytes a second come is given up like one of which nothing comes."""
    url = faulty.put("a.tar", DATA[:PART])
    with FaultyProxy(faulty.endpoint_url, drip_s=0.02) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint_url)
        obj = await rig.stat(url)
        patient, rig.downloader = rig.downloader, rig.make(stall_timeout_s=0.5, attempts=2)
        proxy.fail(Mischief.DRIP, times=2)
        with pytest.raises(OriginUnavailableError, match=r"only .* bytes were received for 0.5 s"):
            await rig.download(obj)
        rig.downloader = patient
        assert (await rig.download(obj)).path.read_bytes() == DATA[:PART]
