"""Secrets of Azure and Google: one private daemon serves all jobs, and reads with a valid one."""

import asyncio
import base64
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardcache.errors import AccessDeniedError, NotFoundError
from shardcache_client.reader import ShardReader
from support.cases import first_quick
from support.network.certificates import Authority
from support.programs.cli import shardcache
from support.programs.daemon import PrivateHome
from support.programs.guard import GUARD_S
from support.shards.tars import make_tar
from support.stores.object_servers import AzureServer, GoogleServer, ObjectServer

pytest.importorskip("adlfs", reason="adlfs is not installed: pip install 'shardcache[azure]'")
pytest.importorskip("gcsfs", reason="gcsfs is not installed: pip install 'shardcache[gcs]'")

Use = Callable[[str], None]
"""Has this process another secret, by its name; `old`, `one` and so on."""


class Store:
    """A store with the buckets `one` and `two`, of two shards each, and the use of its secrets.

    Attributes:
        urls: begin of the urls of its buckets, up to their names.
        use: gives this process a secret: `old` and `new` may read all, `one` and `two` the bucket
            of that name.
        revoke: has the store refuse the secret `old` from now on.
    """

    def __init__(
        self, server: ObjectServer, urls: str, use: Use, revoke: Callable[[], None]
    ) -> None:
        self.server = server
        self.urls = urls
        self.use = use
        self.revoke = revoke
        for bucket in ("one", "two"):
            for name in ("a", "b"):
                server.put(
                    f"/{bucket}/{name}.tar",
                    make_tar([{"__key__": f"{bucket}-{name}", "txt": b"text"}]),
                )

    def url(self, bucket: str, name: str) -> str:
        return f"{self.urls}{bucket}/{name}.tar"

    def fetched(self) -> list[str]:
        """Return the paths of all objects that were sent so far."""
        return [
            target.partition("?")[0]
            for method, target, _ in self.server.requests
            if method == "GET"
        ]


@pytest.fixture
def azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AzureServer]:
    """An account at a server of this node."""
    authority = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca_file))
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    with AzureServer(authority.server()) as server:
        monkeypatch.setenv("FSSPEC_AZ_ACCOUNT_HOST", server.host)
        yield server


def signature(name: str) -> str:
    return AzureServer.SAS.replace("right", f"secret-of-{name}")


def key(name: str) -> str:
    return base64.b64encode(f"secret-of-{name}".encode()).decode()


def signed_store(azure: AzureServer, use: Use) -> Store:
    """Return a store whose secrets are signatures."""
    azure.containers = {signature("one"): "one", signature("two"): "two"}
    azure.signatures |= {signature("old"), signature("new")}
    return Store(azure, "az://", use, lambda: azure.signatures.remove(signature("old")))


@pytest.fixture
def signatures(azure: AzureServer, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Shared access signatures."""
    return signed_store(
        azure, lambda name: monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", signature(name))
    )


@pytest.fixture
def strings(azure: AzureServer, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Connection strings with signatures."""

    def use(name: str) -> None:
        text = f"BlobEndpoint=https://{azure.host}/;SharedAccessSignature={signature(name)}"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)

    return signed_store(azure, use)


@pytest.fixture
def keys(azure: AzureServer, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Connection strings with keys of the account."""
    azure.keys = {key("old"), key("new")}

    def use(name: str) -> None:
        text = f"AccountName=account;AccountKey={key(name)};BlobEndpoint=https://{azure.host}/"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)

    return Store(azure, "az://", use, lambda: azure.keys.remove(key("old")))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Key files of Google, each at a path of its own."""
    with GoogleServer() as server:
        monkeypatch.setenv("NO_GCE_CHECK", "true")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint_url)
        server.buckets = {"one@b": "one", "two@b": "two"}
        paths = {
            name: server.service_account(tmp_path, name) for name in ("old", "new", "one", "two")
        }

        def revoke() -> None:
            server.buckets["old@b"] = "none"

        yield Store(
            server,
            "gs://",
            lambda name: monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", paths[name]),
            revoke,
        )


async def read(url: str) -> list[str]:
    """Return the keys of all samples, read through this user's private daemon."""

    def names() -> list[str]:
        return [sample["__key__"] for sample in ShardReader(url, timeout_s=GUARD_S)]

    return await asyncio.to_thread(names)


def caches(home: PrivateHome) -> list[Path]:
    """Return the folders of this user's private caches."""
    return [folder for folder in home.caches.iterdir() if folder.is_dir()]


@pytest.mark.parametrize("kind", first_quick(["signatures", "strings", "keys", "files"]))
async def test_renewed_secret_reaches_the_daemon_that_is_there(
    kind: str, home: PrivateHome, request: pytest.FixtureRequest
) -> None:
    """One daemon and cache fetch nothing again, though the former secret is refused by then."""
    store: Store = request.getfixturevalue(kind)
    store.use("old")
    assert await read(store.url("one", "a")) == ["one-a"]
    before = home.pids()
    store.revoke()
    store.use("new")
    assert await read(store.url("one", "b")) == ["one-b"]
    assert await read(store.url("one", "a")) == ["one-a"]
    assert home.pids() == before
    assert len(caches(home)) == 1
    assert store.fetched().count("/one/a.tar") == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["signatures", "strings", "files"])
async def test_jobs_with_secrets_for_different_buckets_share_a_daemon(
    kind: str, home: PrivateHome, request: pytest.FixtureRequest
) -> None:
    """Each reads on with its own, whichever came last. A missing object is missing for both."""
    store: Store = request.getfixturevalue(kind)
    for name in ("a", "b"):
        for bucket in ("one", "two"):
            store.use(bucket)
            assert await read(store.url(bucket, name)) == [f"{bucket}-{name}"]
            with pytest.raises(NotFoundError):
                await read(store.url(bucket, "missing"))
    with pytest.raises(AccessDeniedError):
        await read(f"{store.urls}three/a.tar")
    assert len(home.running()) == 1


@pytest.mark.slow
async def test_commands_hand_over_secrets(home: PrivateHome, files: Store) -> None:
    """As readers do, and a listing is made with the key that may."""
    files.use("one")
    assert await read(files.url("one", "a")) == ["one-a"]
    files.use("two")
    warmed = await asyncio.to_thread(shardcache, "warm", files.url("two", "a"))
    assert warmed.code == 0, warmed.err
    assert len(home.running()) == 1


@pytest.mark.slow
async def test_another_account_has_another_daemon(
    home: PrivateHome, strings: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container of the same name is another there, and is not read from this one's cache."""
    strings.use("one")
    assert await read(strings.url("one", "a")) == ["one-a"]
    with AzureServer() as other:
        other.put("/one/a.tar", make_tar([{"__key__": "other", "txt": b"text"}]))
        text = f"BlobEndpoint={other.endpoint_url}/;SharedAccessSignature={other.SAS}"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
        assert await read(strings.url("one", "a")) == ["other"]
    assert len(home.running()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["signatures", "strings", "keys", "files"])
async def test_secrets_are_written_to_no_file(
    kind: str, home: PrivateHome, request: pytest.FixtureRequest
) -> None:
    """Neither names, nor the log, nor the cache."""
    store: Store = request.getfixturevalue(kind)
    for name in ("old", "new"):
        store.use(name)
        await read(store.url("one", "a"))
        with pytest.raises(NotFoundError):
            await read(store.url("one", "missing"))
    home.kill()
    files = [
        path
        for folder in (home.runtime, home.caches)
        for path in folder.rglob("*")
        if path.is_file()
    ]
    assert files
    texts = (b"secret-of-", key("old").encode(), key("new").encode(), b"PRIVATE KEY")
    assert not [path for path in files if any(text in path.read_bytes() for text in texts)]
