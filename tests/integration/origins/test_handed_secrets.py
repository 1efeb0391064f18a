"""Secrets that sessions have handed over: Azure's and Google's objects get a fitting one."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcache.config.origin_table import OriginTable
from shardcache.errors import AccessDeniedError, ConfigError, NotFoundError
from shardcache.origin.registry import Origins
from shardcache.transport.between.flow import nothing
from support.stores.buckets import hand_over, read_range
from support.stores.object_servers import AzureServer, GoogleServer, ObjectServer

pytest.importorskip("adlfs", reason="adlfs is not installed: pip install 'shardcache[azure]'")
pytest.importorskip("gcsfs", reason="gcsfs is not installed: pip install 'shardcache[gcs]'")

DATA = bytes(range(256)) * 400
CONNECTION = "AZURE_STORAGE_CONNECTION_STRING"


def signature(name: str) -> str:
    return AzureServer.SAS.replace("right", name)


def connection(server: AzureServer, name: str) -> dict[str, str]:
    """Return the variable of a signature."""
    return {
        CONNECTION: f"BlobEndpoint={server.endpoint_url}/;SharedAccessSignature={signature(name)}"
    }


@pytest.fixture
def azure() -> Iterator[AzureServer]:
    """An account with two containers, and a signature for each."""
    with AzureServer() as server:
        server.containers = {signature("one"): "one", signature("two"): "two"}
        for container in ("one", "two"):
            server.put(f"/{container}/a.tar", DATA)
        yield server


async def origins_of(match: str, **table: Any) -> AsyncIterator[Origins]:
    origins = Origins(
        [OriginTable.model_validate({"match": match, **table})], max_connections=4, is_private=True
    )
    yield origins
    await origins.close()


@pytest.fixture
async def of_azure(azure: AzureServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Origins]:
    """Origins of a private daemon with an expired signature, and two that were handed over."""
    (value,) = connection(azure, "expired").values()
    monkeypatch.setenv(CONNECTION, value)
    async for origins in origins_of("az://"):
        for name in ("one", "two"):
            hand_over(origins, connection(azure, name))
        yield origins


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleServer]:
    """Two buckets, and an account for each."""
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    with GoogleServer() as server:
        server.buckets = {"one@b": "one", "two@b": "two", "none@b": "none"}
        for bucket in ("one", "two"):
            server.put(f"/{bucket}/a.tar", DATA)
        yield server


@pytest.fixture
async def of_google(
    google: GoogleServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Origins]:
    """Origins of a private daemon whose account may read nothing, and two handed over."""
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", google.service_account(tmp_path, "none"))
    async for origins in origins_of("gs://", endpoint_url=google.endpoint_url):
        for name in ("one", "two"):
            hand_over(
                origins, {"GOOGLE_APPLICATION_CREDENTIALS": google.service_account(tmp_path, name)}
            )
        yield origins


async def test_each_bucket_is_read_with_the_secret_that_may_read_it(
    azure: AzureServer, google: GoogleServer, of_azure: Origins, of_google: Origins
) -> None:
    """It is the only one tried once known, whichever was last, even for missing objects."""
    server: ObjectServer
    for server, origins, protocol in ((azure, of_azure, "az"), (google, of_google, "gs")):
        for bucket in ("one", "two", "one"):
            url = f"{protocol}://{bucket}/a.tar"
            origin = origins.origin(url)
            obj = await origin.stat(url)
            server.requests.clear()
            assert await read_range(origin, obj, 100, 70_000) == DATA[100:70_000]
            with pytest.raises(NotFoundError):
                await origin.stat(url.replace("a.tar", "missing.tar"))
            assert len(server.requests) == 2


@pytest.mark.slow
@pytest.mark.skipif(not GoogleServer.HAS_EMULATOR, reason="gcp-storage-emulator is not installed")
async def test_listing_is_made_with_the_key_that_may(
    google: GoogleServer, of_google: Origins
) -> None:
    """gcsfs raises a refusal without its status: it is one all the same."""
    origin = of_google.origin("gs://one/")
    with pytest.raises(AccessDeniedError, match="Forbidden"):
        await origin.list_prefix("gs://three/", nothing)
    # `bucket` is the emulator's own.
    google.buckets = {"two@b": "bucket", "none@b": "none", "one@b": "none"}
    assert await origin.list_prefix("gs://bucket/", nothing) == []


async def test_revoked_signature_is_replaced_by_another(
    azure: AzureServer, of_azure: Origins
) -> None:
    """While an object is fetched that was described with the revoked one."""
    url = "az://one/a.tar"
    origin = of_azure.origin(url)
    obj = await origin.stat(url)
    del azure.containers[signature("one")]
    with pytest.raises(AccessDeniedError):
        await read_range(origin, obj, 0, 500)
    azure.containers[signature("new")] = "one"
    hand_over(of_azure, connection(azure, "new"))
    assert await read_range(origin, obj, 0, 500) == DATA[:500]
    azure.requests.clear()
    assert await read_range(origin, obj, 0, 500) == DATA[:500]
    assert len(azure.requests) == 1


@pytest.mark.slow
async def test_secret_of_a_table_is_the_only_one(azure: AzureServer) -> None:
    """A session's secret does not go where the config names another, or none."""
    options: dict[str, Any] = {"account_name": "account", "sas_token": signature("wrong")}
    for table in (
        {"storage_options": options},
        {"storage_options": {"account_name": "account"}, "anon": True},
    ):
        async for origins in origins_of("az://", endpoint_url=azure.endpoint_url, **table):
            hand_over(origins, connection(azure, "one"))
            with pytest.raises((AccessDeniedError, NotFoundError)):
                await origins.origin("az://one/a.tar").stat("az://one/a.tar")
    assert not [target for _, target, _ in azure.requests if signature("one") in target]


async def test_unusable_secret_does_no_harm(
    azure: AzureServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects are read with the others, and without any the error is the secret's own."""
    monkeypatch.setenv(CONNECTION, "AccountName")
    async for origins in origins_of("az://"):
        url = "az://one/a.tar"
        with pytest.raises(ConfigError, match="cannot be opened"):
            await origins.origin(url).stat(url)
        for variables in (connection(azure, "one"), {CONNECTION: "neither this"}):
            hand_over(origins, variables)
        assert (await origins.origin(url).stat(url)).size_bytes == len(DATA)


async def test_account_key_that_is_none_is_denied(
    azure: AzureServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can sign nothing. That is final for it, and objects are read with the others."""
    key = f"BlobEndpoint={azure.endpoint_url}/;AccountName=account;AccountKey=abc"
    monkeypatch.setenv(CONNECTION, key)
    async for origins in origins_of("az://"):
        url = "az://one/a.tar"
        with pytest.raises(AccessDeniedError, match="base64"):
            await origins.origin(url).stat(url)
        for variables in (connection(azure, "one"), {CONNECTION: key.replace("abc", "def")}):
            hand_over(origins, variables)
        assert (await origins.origin(url).stat(url)).size_bytes == len(DATA)


@pytest.mark.slow
async def test_malformed_key_file_is_denied(
    google: GoogleServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says so, and shows nothing of the file."""
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "none.json")
    key = {
        "type": "service_account",
        "private_key": "secret",
        "client_email": "a@b",
        "token_uri": "http://127.0.0.1:1",
    }
    async for origins in origins_of("gs://", endpoint_url=google.endpoint_url):
        hand_over(origins, {"GOOGLE_APPLICATION_CREDENTIALS": json.dumps(key)})
        with pytest.raises(AccessDeniedError, match="key file") as denied:
            await origins.origin("gs://one/a.tar").stat("gs://one/a.tar")
        assert "secret" not in str(denied.value)
