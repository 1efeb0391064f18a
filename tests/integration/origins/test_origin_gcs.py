"""Google Cloud Storage: generations, CRC32Cs, token renewal, refusals, and gcsfs."""

import asyncio
import gzip
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcache import errors
from shardcache.config.origin_table import OriginTable
from shardcache.origin.base import Origin
from shardcache.origin.cloud.proofs import Proof, RenewedProof
from shardcache.origin.objects import Checksum
from shardcache.origin.registry import Origins
from shardcache.transport.between.checksums import crc32c
from shardcache.transport.between.flow import nothing
from support.cases import first_quick
from support.stores.buckets import read_range, read_whole
from support.stores.object_servers import GoogleServer

pytest.importorskip("gcsfs", reason="gcsfs is not installed: pip install 'shardcache[gcs]'")

DATA = bytes(range(256)) * 400
URL = "gs://bucket/train/a b+c%20#?.tar"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleServer]:
    """A server with one object."""
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    with GoogleServer() as server:
        server.put("/bucket/train/a b+c%20#?.tar", DATA)
        yield server


@pytest.fixture
async def origins(server: GoogleServer, tmp_path: Path) -> AsyncIterator[Origins]:
    """Origins that reach the server with a service account."""
    origins = origins_of(server, token=server.service_account(tmp_path))
    yield origins
    await origins.close()


def origins_of(server: GoogleServer, **options: Any) -> Origins:
    """Return origins with these `storage_options` for gs://."""
    table = {
        "match": "gs://",
        "endpoint_url": server.endpoint_url,
        "anon": not options,
        "storage_options": options,
    }
    return Origins([OriginTable.model_validate(table)], max_connections=16)


@pytest.fixture
def origin(origins: Origins) -> Origin:
    """The origin of the object."""
    return origins.origin(URL)


async def test_object_is_read_by_generation(server: GoogleServer, origin: Origin) -> None:
    """The bytes of any key come exactly; another generation is a changed shard."""
    obj = await origin.stat(URL)
    assert obj.size_bytes == len(DATA)
    assert obj.checksum == Checksum("crc32c", crc32c(DATA, 0))
    assert obj.has_ranges is True
    assert obj.is_guarded is True
    assert obj.is_joinable is True
    assert await read_range(origin, obj, 1000, 70_000) == DATA[1000:70_000]
    assert b"".join(await read_whole(origin, obj, 30_000)) == DATA
    requests = len(server.requests)
    assert await read_range(origin, await origin.stat(URL, 1000), 0, 1000) == DATA[:1000]
    assert len(server.requests) == requests + 2, "the read was requested with the version"
    server.put("/bucket/train/a b+c%20#?.tar", DATA[::-1])
    with pytest.raises(errors.ShardChangedError, match="412"):
        await read_range(origin, obj, 0, 10)
    assert (await origin.stat(URL)).version != obj.version


@pytest.mark.slow
async def test_object_that_was_stored_compressed_comes_as_it_is_stored(
    server: GoogleServer, origin: Origin
) -> None:
    """Google would inflate it on the way, and ignore the range."""
    stored = gzip.compress(DATA)
    server.put("/bucket/z.tar", stored)
    server.encodings["/bucket/z.tar"] = "gzip"
    obj = await origin.stat("gs://bucket/z.tar")
    assert b"".join(await read_whole(origin, obj, 500)) == stored


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "error", "retried"),
    [
        (304, errors.OriginError, False),
        (308, errors.OriginError, False),
        (403, errors.AccessDeniedError, False),
        (404, errors.NotFoundError, False),
        (412, errors.ShardChangedError, False),
        (429, errors.OriginBusyError, True),
        (500, errors.OriginUnavailableError, True),
        (503, errors.OriginBusyError, True),
    ],
)
async def test_refusals_are_typed(
    status: int,
    error: type[errors.OriginError],
    retried: bool,
    server: GoogleServer,
    origin: Origin,
) -> None:
    """The error carries the time the store asks to wait; a redirect is not followed."""
    obj = await origin.stat(URL)
    elsewhere = {"Location": "http://127.0.0.1:1/", "Retry-After": "7"}
    for request in (origin.stat(URL), read_range(origin, obj, 0, 10)):
        server.refusals = [(status, elsewhere, b"")]
        with pytest.raises(error) as refused:
            await request
        assert type(refused.value) is error
        assert isinstance(refused.value, errors.OriginUnavailableError) == retried
        if isinstance(refused.value, errors.OriginUnavailableError):
            assert refused.value.retry_after_s == 7


@pytest.mark.parametrize("stated", first_quick(["é", "AAAA=A", "!"]))
async def test_checksum_that_is_no_base64_is_a_typed_error(
    stated: str, server: GoogleServer, origin: Origin
) -> None:
    """Bytes beyond ASCII as well; the error names what the header states."""
    headers = {"Content-Length": "5", "x-goog-generation": "1", "x-goog-hash": f"crc32c={stated}"}
    server.refusals = [(200, headers, b"")]
    with pytest.raises(errors.OriginUnavailableError, match=f"states '{stated}' as crc32c"):
        await origin.stat(URL)


@pytest.mark.slow
async def test_buckets_and_missing_objects_are_not_found(origin: Origin) -> None:
    """A bucket's url is not a shard's, nor read as one."""
    for url in ("gs://bucket", "gs://bucket/", "gs://bucket/no.tar"):
        with pytest.raises(errors.NotFoundError):
            await origin.stat(url)


async def test_token_is_requested_once_for_all_and_again_if_refused(
    server: GoogleServer, origins: Origins
) -> None:
    """Sixty-four requests at once need one token, and one more after it was revoked."""
    origin = origins.origin(URL)
    origin.start_preparing(URL)
    while not server.issued:  # noqa: ASYNC110 - nobody could set an event
        await asyncio.sleep(0)
    for issued in (1, 2):
        await asyncio.gather(*(origin.stat(URL) for _ in range(64)))
        assert server.issued == issued
        server.valid.clear()
    server.lifetime_s = 0
    with pytest.raises(errors.AccessDeniedError):
        server.refusals = [(401, {}, b"")] * 2
        await origin.stat(URL)


async def test_requests_that_wait_for_a_token_fail_together() -> None:
    """Each would wait for the next attempt otherwise, and the last one for minutes."""
    asked = []

    async def prove(*asking: bool) -> Proof:
        asked.append(asking)
        await asyncio.sleep(0.01)
        raise OSError("no metadata service")

    renewed = RenewedProof(prove)
    ended = await asyncio.gather(*(renewed.get(URL) for _ in range(64)), return_exceptions=True)
    assert {type(error) for error in ended} == {errors.OriginUnavailableError}
    assert len(asked) == 1


@pytest.mark.slow
async def test_token_of_a_short_life_is_used_for_half_of_it(
    server: GoogleServer, origin: Origin
) -> None:
    """A token is not requested for each request, even five minutes before its end."""
    server.lifetime_s = 60
    for _ in range(3):
        await origin.stat(URL)
    assert server.issued == 1


@pytest.mark.slow
async def test_public_and_billed_buckets(server: GoogleServer, tmp_path: Path) -> None:
    """No header is sent without credentials; each request names the project that pays."""
    server.public.add("bucket")
    anonymous = origins_of(server)
    assert (await anonymous.origin(URL).stat(URL)).size_bytes == len(DATA)
    server.payers["bucket"] = "payer"
    with pytest.raises(errors.OriginError, match="400"):
        await anonymous.origin(URL).stat(URL)
    paying = origins_of(server, token=server.service_account(tmp_path), requester_pays="payer")
    obj = await paying.origin(URL).stat(URL)
    assert await read_range(paying.origin(URL), obj, 5, 50) == DATA[5:50]
    await anonymous.close()
    await paying.close()


@pytest.mark.slow
@pytest.mark.skipif(not GoogleServer.HAS_EMULATOR, reason="pip install gcp-storage-emulator")
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # by gcsfs
@pytest.mark.parametrize("size_bytes", [1000, 6 * 1024**2], ids=["one request", "resumable"])
async def test_objects_are_uploaded_and_listed_by_gcsfs(
    size_bytes: int, origin: Origin, tmp_path: Path
) -> None:
    """A listing has the versions that `stat` returns, which an index of it needs."""
    file = tmp_path / "a.tar"
    file.write_bytes(DATA * (size_bytes // len(DATA) + 1))
    obj = await origin.upload(file, "gs://bucket/new/x.tar")
    assert obj.size_bytes == file.stat().st_size
    assert await read_range(origin, obj, 0, 2000) == (DATA * 2)[:2000]
    assert await origin.list_prefix("gs://bucket/new/", nothing) == [obj]
