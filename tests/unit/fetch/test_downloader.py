"""Downloads: errors that allow a new attempt, checksums from parts, ETags as MD5s."""

import asyncio
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from awscrt import checksums
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import (
    AccessDeniedError,
    CorruptShardError,
    NotFoundError,
    OriginBusyError,
    OriginUnavailableError,
    ShardcacheError,
    ShardChangedError,
)
from shardcache.fetch.etags import Etags
from shardcache.fetch.retry import Backoff, Retry, refetch
from shardcache.origin.objects import MD5, Checksum, RemoteObject
from shardcache.telemetry.metrics import Counters
from shardcache.transport.between.checksums import checksum_function, combined
from support.programs.guard import GUARD_S

URL = "s3://b/a.tar"
BUSY = OriginUnavailableError("busy", url=URL, remedy="wait")
REPLACED = ShardChangedError("replaced")
CORRUPT = CorruptShardError("corrupt")
MISSING = NotFoundError("missing")


class Script:
    """Raises what it is given, one after the other, then returns "done"."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.calls = 0

    async def __call__(self) -> str:
        """Take the next step."""
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        return "done"


@pytest.mark.parametrize(
    ("failures", "calls", "error"),
    [
        ([BUSY, BUSY], 3, None),
        ([BUSY] * 5, 3, "busy.*after 3 attempts"),
        *(
            ([permanent], 1, permanent.message)
            for permanent in (AccessDeniedError("no"), MISSING, REPLACED)
        ),
    ],
)
async def test_unavailable_origins_are_requested_again(
    failures: list[ShardcacheError], calls: int, error: str | None
) -> None:
    """Fewer failures than attempts are only counted; the last error says how many there were.

    Denied, missing and replaced objects are requested once.
    """
    script = Script(*failures)
    counters = Counters()
    attempts = Retry(3, counters, Backoff(base_s=0, cap_s=0)).call(URL, script)
    if error is None:
        assert await attempts == "done"
    else:
        with pytest.raises(type(failures[0]), match=error) as failed:
            await attempts
        assert failed.value.url == failures[0].url
        assert failed.value.remedy == failures[0].remedy
    assert script.calls == calls
    assert counters.retries == calls - 1


async def test_time_that_the_store_asks_for_passes_before_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pause is at least that of Retry-After, and a minute at most."""
    pauses: list[float] = []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    asked = [OriginBusyError("busy", url=URL) for _ in range(3)]
    asked[0].retry_after_s = 7
    asked[1].retry_after_s = 86400
    answer = await Retry(4, Counters(), Backoff(base_s=0, cap_s=0)).call(URL, Script(*asked))
    assert answer == "done"
    assert pauses == [7, 60, 0]


async def test_url_that_failed_last_is_the_last_of_the_failing_ones() -> None:
    """Also if another request for it had failed before."""
    retry = Retry(3, Counters(), Backoff(100.0, 100.0))

    requests = []
    for url in ("https://a", "https://b", "https://a"):
        requests.append(asyncio.create_task(retry.call(url, Script(BUSY))))
        await asyncio.sleep(0)
    assert list(retry.failing) == ["https://b", "https://a"]
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    assert not retry.failing


async def test_a_failing_part_is_reported_while_other_parts_of_its_url_arrive() -> None:
    """Its report ends with its own request, not with that of another part."""
    retry = Retry(3, Counters(), Backoff(base_s=0, cap_s=0))
    script = Script(BUSY)
    repeated = asyncio.Event()
    gate = asyncio.Event()

    async def fails_once() -> str:
        if script.calls:
            repeated.set()
            await gate.wait()
        return await script()

    failing = asyncio.create_task(retry.call(URL, fails_once))
    async with asyncio.timeout(GUARD_S):
        await repeated.wait()
        assert await retry.call(URL, Script()) == "done"
        assert await retry.call(URL, Script(BUSY)) == "done"
        assert [str(failed) for failed in retry.failing[URL]] == ["attempt 1 of 3: busy"]
        gate.set()
        assert await failing == "done"
    assert not retry.failing


@given(
    st.integers(1, 10_000),
    st.floats(0, 1, exclude_max=True),
    st.floats(0.001, 10),
    st.floats(0.001, 100),
)
def test_pauses_lie_below_a_bound_that_doubles_up_to_the_cap(
    failures: int, uniform: float, base_s: float, cap_s: float
) -> None:
    """Full jitter: anything from nothing to min(cap, base x 2^(failures - 1))."""
    backoff = Backoff(base_s, cap_s)
    bound_s = backoff.pause_s(failures, 1.0)
    assert (
        0
        == backoff.pause_s(failures, 0.0)
        <= backoff.pause_s(failures, uniform)
        <= bound_s
        <= cap_s
    )
    assert backoff.pause_s(failures + 1, 1.0) in (bound_s, 2 * bound_s, cap_s)
    assert backoff.pause_s(1, 1.0) == min(base_s, cap_s)


@pytest.mark.parametrize(
    ("failures", "calls", "error"),
    [
        ([REPLACED, REPLACED], 3, None),
        ([REPLACED, CORRUPT], 3, None),
        ([REPLACED, REPLACED, REPLACED, REPLACED], 3, REPLACED),
        ([CORRUPT], 2, None),
        ([CORRUPT, CORRUPT], 2, CORRUPT),
        ([MISSING], 1, MISSING),
    ],
)
async def test_a_replaced_object_is_fetched_three_times_and_a_corrupt_one_twice(
    failures: list[ShardcacheError], calls: int, error: ShardcacheError | None
) -> None:
    """At most; any other error is raised at once."""
    script = Script(*failures)
    if error is None:
        assert await refetch(script)() == "done"
    else:
        with pytest.raises(type(error), match=error.message):
            await refetch(script)()
    assert script.calls == calls


WHOLE = {"crc32c": checksums.crc32c, "crc32": zlib.crc32, "crc64nvme": checksums.crc64nvme}


@pytest.mark.parametrize("algorithm", WHOLE)
@given(data=st.binary(max_size=200), part_bytes=st.integers(1, 64))
def test_the_whole_follows_from_its_parts(algorithm: str, data: bytes, part_bytes: int) -> None:
    """However the bytes are cut into parts, the checksum is that of all of them in one."""
    parts = [data[start : start + part_bytes] for start in range(0, len(data), part_bytes)]
    sums = [checksum_function(algorithm)(part, 0) for part in parts]
    assert combined(algorithm, sums, part_bytes, len(data)) == WHOLE[algorithm](data)


DATA = b"some shard"
DIGEST = 0xE7B9F083B0A5CFD1BF090A8654A00825


def obj(name: str = "a.tar", *, etag: int = 5, bucket: str = "bucket") -> RemoteObject:
    """Return an object of which the ETag is all that is known."""
    return RemoteObject(f"s3://{bucket}/{name}", f"{etag:032x}", len(DATA), Checksum(MD5, etag))


def test_a_differing_etag_is_damage_where_another_was_an_md5() -> None:
    """Every time, however often the same bytes come."""
    etags = Etags()
    etags.judge(obj(), 5, 5)
    for _ in range(3):
        with pytest.raises(CorruptShardError, match="MD5"):
            etags.judge(obj("b.tar"), 5, 6)


def test_other_bytes_the_second_time_are_damage() -> None:
    """Bytes change on the way, whatever the ETag; versions say nothing of each other."""
    etags = Etags()
    for etag, found in ((5, 6), (5, 7), (5, 8), (6, 8)):
        with pytest.raises(CorruptShardError):
            etags.judge(obj(etag=etag), etag, found)


def test_a_training_process_gets_log_lines_by_logging_alone() -> None:
    """Nothing goes to stdout, which a program may pipe to another one."""
    script = (
        "from shardcache.fetch import etags\n"
        "etags.log.warning('no longer compared', origin='s3://bucket')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=GUARD_S, check=True
    )
    assert ran.stdout == ""
    assert ran.stderr == "no longer compared (origin=s3://bucket)\n"


async def test_a_store_whose_etags_are_something_else_costs_no_reading(tmp_path: Path) -> None:
    """Once that is known, files there are not read again, and those of other stores are."""
    etags = Etags()
    with pytest.raises(CorruptShardError, match="verify_etag = false"):
        etags.judge(obj(), 5, 6)
    etags.judge(obj(), 5, 6)
    await etags.verify(obj("b.tar"), tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        await etags.verify(obj(bucket="other"), tmp_path / "missing")


async def test_the_bytes_of_the_file_are_what_counts(tmp_path: Path) -> None:
    """The digest is of the whole file; an object with a real checksum, or none, stays."""
    etags = Etags()
    path = tmp_path / "a.part"
    path.write_bytes(DATA)
    with pytest.raises(CorruptShardError, match=f"{DIGEST:032x}"):
        await etags.verify(obj(), path)
    await etags.verify(obj(etag=DIGEST), path)
    path.write_bytes(DATA[::-1])
    for checksum in (None, Checksum("crc32", DIGEST)):
        await etags.verify(RemoteObject("s3://bucket/a.tar", "1", len(DATA), checksum), path)
    with pytest.raises(CorruptShardError):
        await etags.verify(obj(etag=DIGEST), path)
