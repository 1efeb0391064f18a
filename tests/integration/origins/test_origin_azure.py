"""Azure Blob Storage: ETags, MD5s, signatures and renewed tokens, and uploads to Azurite."""

import asyncio
import hashlib
import os
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardcache.config.origin_table import OriginTable
from shardcache.errors import (
    AccessDeniedError,
    ConfigError,
    NotFoundError,
    OriginBusyError,
    OriginError,
    OriginUnavailableError,
    ShardChangedError,
)
from shardcache.origin.objects import Checksum
from shardcache.origin.registry import Origins
from shardcache.transport.between.flow import nothing
from support.network.certificates import Authority
from support.network.ports import free_port
from support.programs.daemon import eventually
from support.stores.buckets import read_range, read_whole
from support.stores.object_servers import AzureServer

pytest.importorskip("adlfs", reason="adlfs is not installed: pip install 'shardcache[azure]'")

from adlfs import AzureBlobFileSystem
from azure.core.exceptions import AzureError
from azure.storage.blob import BlobServiceClient

# The program of `npm install azurite`, and the key of its one account.
AZURITE = os.environ.get("AZURITE") or shutil.which("azurite-blob")
AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
DATA = bytes(range(256)) * 400
URL = "az://bucket/train/ü b+c%20#?.tar"
MD5 = int(hashlib.md5(DATA, usedforsecurity=False).hexdigest(), 16)


@pytest.fixture
def identities(monkeypatch: pytest.MonkeyPatch) -> Iterator[AzureServer]:
    """The server that issues tokens to this process, as a managed identity."""
    with AzureServer() as identities:
        monkeypatch.setenv("IDENTITY_ENDPOINT", f"{identities.endpoint_url}/identity")
        monkeypatch.setenv("IDENTITY_HEADER", "h")
        yield identities


@pytest.fixture
def server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, identities: AzureServer
) -> Iterator[AzureServer]:
    """A server with one object."""
    authority = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca_file))
    with AzureServer(authority.server()) as server:
        server.valid = identities.valid
        server.put("/bucket/train/ü b+c%20#?.tar", DATA)
        yield server


@asynccontextmanager
async def origins_of(
    server: AzureServer, match: str = "az://", **options: Any
) -> AsyncIterator[Origins]:
    """Yield origins with these `storage_options`, in addition to the account."""
    options = {"account_name": "account", "account_host": server.host, **options}
    origins = Origins(
        [OriginTable.model_validate({"match": match, "storage_options": options})],
        max_connections=16,
    )
    yield origins
    await origins.close()


async def test_object_is_read_by_etag(server: AzureServer) -> None:
    """The bytes of any key come exactly, with the stored MD5; a new ETag is a change."""
    for options in ({}, {"sas_token": server.SAS}, {"sas_token": f"?{server.SAS}"}):
        async with origins_of(server, **options) as origins:
            origin = origins.origin(URL)
            obj = await origin.stat(URL)
            assert obj.size_bytes == len(DATA)
            assert obj.checksum == Checksum("md5", MD5)
            assert obj.has_ranges is True
            assert obj.is_guarded is True
            assert obj.is_joinable is True
            assert await read_range(origin, obj, 1000, 70_000) == DATA[1000:70_000]
            assert b"".join(await read_whole(origin, obj, 30_000)) == DATA
            requests = len(server.requests)
            assert await read_range(origin, await origin.stat(URL, 1000), 0, 1000) == DATA[:1000]
            assert len(server.requests) == requests + 2, "the read was requested with the version"
            with pytest.raises(ShardChangedError, match="412"):
                await read_range(origin, replace(obj, version="0x0"), 0, 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "error"),
    [
        (302, OriginError),
        (403, AccessDeniedError),
        (404, NotFoundError),
        (429, OriginBusyError),
        (500, OriginUnavailableError),
        (503, OriginBusyError),
    ],
)
async def test_refusals_are_typed(
    status: int, error: type[OriginError], server: AzureServer
) -> None:
    """The error has Azure's own reason, and redirects take no signature elsewhere."""
    headers = {"Location": "http://127.0.0.1:1/", "x-ms-error-code": "TheReason"}
    async with origins_of(server, sas_token=server.SAS) as origins:
        origin = origins.origin(URL)
        obj = await origin.stat(URL)
        for request in (origin.stat(URL), read_range(origin, obj, 0, 10)):
            server.refusals = [(status, headers, b"")]
            with pytest.raises(error, match="TheReason") as refused:
                await request
            assert type(refused.value) is error
        for url in ("az://bucket", "az://bucket/", "az://bucket/no.tar"):
            with pytest.raises(NotFoundError):
                await origin.stat(url)


async def test_token_of_a_managed_identity_is_requested_once_for_all(
    server: AzureServer, identities: AzureServer
) -> None:
    """Sixty-four requests need one token, and one that it does not open gets another."""
    async with origins_of(server) as origins:
        await asyncio.gather(*(origins.origin(URL).stat(URL) for _ in range(64)))
        assert identities.issued == 1
        server.valid.clear()  # the token is revoked
        await origins.origin(URL).stat(URL)
        assert identities.issued == 2
        server.refusals = [(401, {}, b"")] * 2
        with pytest.raises(AccessDeniedError, match="401"):
            await origins.origin(URL).stat(URL)


async def test_filesystem_is_opened_in_a_thread_for_a_new_token_as_well(
    server: AzureServer, identities: AzureServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening it builds the SDK's clients, for which the event loop must not wait."""
    opened_by: list[int] = []
    connect = AzureBlobFileSystem.do_connect

    def connect_noted(filesystem: AzureBlobFileSystem) -> None:
        opened_by.append(threading.get_ident())
        connect(filesystem)

    monkeypatch.setattr(AzureBlobFileSystem, "do_connect", connect_noted)
    async with origins_of(server) as origins:
        for opened in (1, 2):
            assert (await origins.origin(URL).stat(URL)).size_bytes == len(DATA)
            assert len(opened_by) == identities.issued == opened
            server.valid.clear()  # the token is revoked
    assert threading.get_ident() not in opened_by


@pytest.mark.slow
async def test_endpoint_of_the_table_is_used(server: AzureServer, identities: AzureServer) -> None:
    """The account may be its path; the SDK shows tokens to no server without TLS."""
    for place, options in (
        (server, {}),
        (server, {"sas_token": server.SAS}),
        (identities, {"sas_token": server.SAS}),
    ):
        place.put("/account/bucket/a.tar", DATA)
        table: dict[str, Any] = {"match": "az://", "endpoint_url": f"{place.endpoint_url}/account"}
        table["storage_options"] = {"account_name": "account", **options}
        origins = Origins([OriginTable.model_validate(table)], max_connections=16)
        obj = await origins.origin("az://bucket/a.tar").stat("az://bucket/a.tar")
        assert obj.size_bytes == len(DATA)
        await origins.close()
    table["storage_options"] = {"account_name": "account"}
    with pytest.raises(ConfigError, match="HTTPS"):
        await Origins([OriginTable.model_validate(table)], max_connections=16).origin(URL).stat(URL)


async def test_credentials_that_nothing_provides_are_denied(
    server: AzureServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the chain's links; a wrong signature is denied as well."""
    monkeypatch.delenv("IDENTITY_ENDPOINT")
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "WorkloadIdentityCredential")
    for options in ({}, {"sas_token": "sv=1&sig=wrong"}):
        async with origins_of(server, **options) as origins:
            with pytest.raises(AccessDeniedError):
                await origins.origin(URL).stat(URL)


async def test_url_of_another_account_is_refused(server: AzureServer) -> None:
    """A rule for that account's urls must not give access to this one's blobs."""
    async with origins_of(server, "abfss://", sas_token=server.SAS) as origins:
        right, wrong = (
            f"abfss://bucket@{name}.dfs.core.windows.net/train/" for name in ("account", "other")
        )
        origin = origins.origin(right)
        assert (await origin.stat(right + URL.rpartition("/")[2])).size_bytes == len(DATA)
        with pytest.raises(OriginError, match="another storage account"):
            await origin.stat(wrong + URL.rpartition("/")[2])
        with pytest.raises(OriginError, match="another storage account"):
            await origin.list_prefix(wrong, nothing)


@contextmanager
def azurite(folder: Path) -> Iterator[str]:
    """Run Azurite, in memory with a container `bucket`; yield its connection string."""
    assert AZURITE is not None
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}/devstoreaccount1"
    account = f"AccountName=devstoreaccount1;AccountKey={AZURITE_KEY};BlobEndpoint={endpoint};"
    connection_string = f"DefaultEndpointsProtocol=http;{account}"
    options = ("--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--disableTelemetry")
    command = ["node", os.path.realpath(AZURITE), "--blobPort", str(port), *options]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:

        def has_container() -> bool:
            assert process.poll() is None
            with (
                suppress(AzureError),
                BlobServiceClient.from_connection_string(
                    connection_string, retry_total=0
                ) as client,
            ):
                client.create_container("bucket")
                return True
            return False

        try:
            eventually(has_container, pause_s=0.1)
            yield connection_string
        finally:
            process.kill()


@pytest.mark.skipif(AZURITE is None, reason="Azurite is not installed: npm install -g azurite")
@pytest.mark.parametrize("by_endpoint", [False, True], ids=["connection string", "endpoint"])
async def test_azurite_takes_what_is_sent(by_endpoint: bool, tmp_path: Path) -> None:
    """It takes uploads, listings with versions of `stat`, signed reads and a change."""
    file = tmp_path / "a.tar"
    file.write_bytes(DATA)
    with azurite(tmp_path) as connection_string:
        table: dict[str, Any] = {
            "match": "az://",
            "storage_options": {"connection_string": connection_string},
        }
        if by_endpoint:
            account = dict(each.split("=", 1) for each in connection_string.split(";") if each)
            table["endpoint_url"] = account["BlobEndpoint"]
            table["storage_options"] = {
                "account_name": account["AccountName"],
                "account_key": account["AccountKey"],
            }
        origins = Origins([OriginTable.model_validate(table)], max_connections=16)
        origin = origins.origin(URL)
        obj = await origin.upload(file, URL)
        assert await origin.list_prefix("az://bucket/train/", nothing) == [obj]
        assert b"".join(await read_whole(origin, obj, 30_000)) == DATA
        await origin.upload(file, URL)
        with pytest.raises(ShardChangedError, match="ConditionNotMet"):
            await read_range(origin, obj, 0, 10)
        with pytest.raises(NotFoundError):
            await origin.stat("az://bucket/no.tar")
        await origins.close()
