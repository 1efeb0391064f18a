"""Plain web servers: with ranges and without, with ETags and without."""

from __future__ import annotations

import pytest

from shardcache.config import OriginTable
from shardcache.errors import (
    AccessDeniedError,
    ConfigError,
    NotFoundError,
    OriginBusyError,
    OriginError,
    OriginUnavailableError,
    ShardChangedError,
)
from shardcache.origin.base import RemoteObject
from shardcache.origin.registry import Origins
from shardcache.transport.workers import nothing
from support.network.scripted_server import ScriptedServer, answer
from support.stores.buckets import read_range, read_whole
from support.stores.faulty_s3 import Fault, FaultyS3

DATA = bytes(range(256)) * 400


async def stat(origins: Origins, server: FaultyS3, key: str = "a.tar") -> RemoteObject:
    """Put the data on the server and return its present version."""
    server.put(key, DATA)
    return await origins.origin(server.http_url(key)).stat(server.http_url(key))


async def read(origins: Origins, obj: RemoteObject, start: int, stop: int) -> bytes:
    """Return a range as one."""
    return await read_range(origins.origin(obj.url), obj, start, stop)


async def parts_of(origins: Origins, obj: RemoteObject) -> list[bytes]:
    """Return the parts of 30,000 bytes."""
    return await read_whole(origins.origin(obj.url), obj, 30_000)


@pytest.mark.parametrize("validators", [("ETag",), ("Last-Modified",), ("ETag", "Last-Modified")])
async def test_ranges_of_one_version(validators: tuple[str, ...], faulty: FaultyS3, origins: Origins) -> None:
    """Ranges come exactly, and a file replaced in between is noticed, by ETag or by date."""
    faulty.validators = validators
    obj = await stat(origins, faulty)
    assert (obj.size_bytes, obj.ranges, obj.guarded) == (len(DATA), True, True)
    assert await read(origins, obj, 1000, 70_000) == DATA[1000:70_000]
    faulty.fail("a.tar", Fault.REPLACED)
    with pytest.raises(ShardChangedError):
        await read(origins, obj, 0, 10)


async def test_object_without_any_version_comes_in_one_answer(faulty: FaultyS3, origins: Origins) -> None:
    """Without ETag and date the size stands in, and ranges are not used; another size is another version."""
    faulty.validators = ()
    obj = await stat(origins, faulty)
    assert (obj.ranges, obj.guarded) == (False, False)
    assert b"".join(await parts_of(origins, obj)) == DATA
    faulty.put("a.tar", DATA[1:])
    with pytest.raises(ShardChangedError):
        await parts_of(origins, obj)


@pytest.mark.parametrize(
    ("modified", "ranges"),
    [
        ("Thu, 01 Jan 2026 00:00:08 GMT", True),
        ("Thu, 01 Jan 2026 00:00:10 GMT", False),
        ("Thu, 01 Jan 99999 00:00:08 GMT", False),
        ("0", False),
    ],
)
async def test_object_modified_just_now_comes_in_one_answer(modified: str, ranges: bool, origins: Origins) -> None:
    """A second version of the same second would have the same date; what is no date is no version."""
    dates = "Date: Thu, 01 Jan 2026 00:00:10 GMT", f"Last-Modified: {modified}"
    with ScriptedServer(answer(b"x", "Content-Range: bytes 0-0/9", *dates)) as server:
        obj = await origins.origin(server.url()).stat(server.url())
    assert (obj.ranges, obj.guarded, obj.version) == (ranges, ranges, "size=9" if modified == "0" else modified)


@pytest.mark.parametrize(("ranges", "validators"), [(False, ("ETag",)), (True, ())], ids=["no ranges", "no version"])
async def test_object_of_unknown_length_is_refused(
    ranges: bool, validators: tuple[str, ...], faulty: FaultyS3, origins: Origins
) -> None:
    """Without a Content-Length a cut could not be told from the end, so it is an error with a remedy."""
    faulty.ranges, faulty.validators, faulty.lengths = ranges, validators, False
    with pytest.raises(OriginError, match="does not state the file's size") as refused:
        await parts_of(origins, await stat(origins, faulty))
    assert "Content-Length" in refused.value.remedy
    assert not refused.value.retryable


@pytest.mark.parametrize("lengths", [True, False], ids=["lengths", "chunks"])
async def test_ranges_in_chunks_and_of_encoded_files(lengths: bool, faulty: FaultyS3, origins: Origins) -> None:
    """A range is one of the stored bytes, in chunks too, and where the server says how they were encoded."""
    faulty.lengths, faulty.encoding = lengths, "gzip" if lengths else None
    obj = await stat(origins, faulty)
    assert await read(origins, obj, 1000, 70_000) == DATA[1000:70_000]


@pytest.mark.parametrize(("ranges", "lengths"), [(True, True), (True, False), (False, False)])
async def test_bytes_that_are_encoded_on_the_way_are_refused(
    ranges: bool, lengths: bool, faulty: FaultyS3, origins: Origins
) -> None:
    """A server that compresses what it was asked to send as it is gets an error with a remedy, and no second try."""
    obj = await stat(origins, faulty)
    faulty.ranges, faulty.lengths = ranges, lengths
    faulty.fail("a.tar", Fault.ENCODED, times=2)
    with pytest.raises(OriginError, match="encodes the file on the fly") as refused:
        await stat(origins, faulty)
    assert "compression" in refused.value.remedy
    assert not refused.value.retryable
    with pytest.raises(OriginError, match="encodes the file on the fly"):
        await (read(origins, obj, 1000, 70_000) if ranges else parts_of(origins, obj))


async def test_refusals_are_typed(faulty: FaultyS3, origins: Origins) -> None:
    """403, 404 and 5xx are three different errors, and only the last may be tried again, as a refused connection may.

    An empty file is none of them, though a server answers 416 to any range of nothing; a listing is refused.
    """
    obj = await stat(origins, faulty)
    faulty.put("empty.tar", b"")
    assert (await origins.origin(obj.url).stat(faulty.http_url("empty.tar"))).size_bytes == 0
    with pytest.raises(OriginError) as refused:
        await origins.origin(obj.url).list_prefix(faulty.http_url(""), nothing)
    assert "{000..099}" in refused.value.remedy
    for url, error in {
        faulty.http_url("no.tar"): NotFoundError,
        "http://127.0.0.1:1/a.tar": OriginUnavailableError,
        "http://": ConfigError,
    }.items():
        with pytest.raises(error):
            await origins.origin(url).stat(url)
    for fault, error in {
        Fault.FORBIDDEN: AccessDeniedError,
        Fault.SLOW_DOWN: OriginBusyError,
        Fault.SERVER_ERROR: OriginUnavailableError,
        Fault.WRONG_RANGE: OriginUnavailableError,
        Fault.RESET: OriginUnavailableError,
        Fault.WRONG_ETAG: ShardChangedError,
    }.items():
        faulty.fail("a.tar", fault)
        with pytest.raises(error):
            await read(origins, obj, 0, 50_000)


async def test_the_tables_headers_are_sent(faulty: FaultyS3) -> None:
    """Headers in storage_options, such as a token, go with each request."""
    faulty.access_key = "secret"
    faulty.put("a.tar", DATA)
    url = faulty.http_url("a.tar")
    options = {"headers": {"Authorization": "AWS Credential=secret/"}}
    origins = Origins(
        [OriginTable.model_validate({"match": faulty.endpoint_url, "storage_options": options})], max_connections=1
    )
    assert (await origins.origin(url).stat(url)).size_bytes == len(DATA)
    await origins.close()
