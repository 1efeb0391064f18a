"""Stores behind a proxy that the environment names."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from pathlib import Path
from typing import Self
from urllib.parse import quote, urlsplit

import pytest

from shardcache.config import OriginTable
from shardcache.errors import AccessDeniedError, ConfigError
from shardcache.origin.registry import Origins
from support.network.certificates import Authority
from support.programs.downloads import Rig
from support.stores.buckets import use_aws
from support.stores.faulty_s3 import FaultyS3

_PORTS = {"http": 80, "https": 443}
_READ_BYTES = 64 * 1024


class ForwardProxy:
    """Listens on a free port of 127.0.0.1; use it as `async with`.

    Args:
        user, password: without which nothing is passed on; None for anybody.

    Attributes:
        targets: that a connection was made for, a url or, by CONNECT, host and port.
        denied: number of requests without the right credentials.
    """

    def __init__(self, user: str | None = None, password: str = "") -> None:
        self._user, self._password = user, password
        self._clients: set[asyncio.StreamWriter] = set()
        self.targets: list[str] = []
        self.denied = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in list(self._clients):
            writer.transport.abort()
        await self._server.wait_closed()

    def url(self, password: str | None = None) -> str:
        """Return its url, with the credentials; the right ones by default."""
        port = self._server.sockets[0].getsockname()[1]
        pair = (
            f"{quote(self._user)}:{quote(self._password if password is None else password, '')}@" if self._user else ""
        )
        return f"http://{pair}127.0.0.1:{port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await self._pass_on(reader, writer)
        self._clients.discard(writer)
        writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, *_ = head.decode("latin-1").split()
        if not self._is_allowed(head):
            self.denied += 1
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
            return
        self.targets.append(target)
        tunnel = method == "CONNECT"
        url = urlsplit(f"//{target}" if tunnel else target)
        far_reader, far_writer = await asyncio.open_connection(url.hostname, url.port or _PORTS[url.scheme])
        if tunnel:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            far_writer.write(head)
        async with asyncio.TaskGroup() as group:
            group.create_task(_pump(reader, far_writer))
            group.create_task(_pump(far_reader, writer))

    def _is_allowed(self, head: bytes) -> bool:
        if self._user is None:
            return True
        pair = base64.b64encode(f"{self._user}:{self._password}".encode())
        return b"\r\nproxy-authorization: basic " + pair.lower() + b"\r\n" in head.lower()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_READ_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()


DATA = bytes(range(256)) * 1000
USER, PASSWORD = "me", "p@ss:w/rd"
KINDS = ["s3 over http", "s3 over https", "http", "https"]


def server_for(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyS3:
    """Return a store, whose authority is trusted where it has one."""
    use_aws(monkeypatch, folder, {})
    if not kind.endswith("https"):
        return FaultyS3()
    authority = Authority(folder / "authority")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.ca_file))
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca_file))
    return FaultyS3(authority.server())


def url_of(kind: str, server: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> str:
    """Store an object and return its url; for S3, this process's AWS variables point at the store."""
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    url = server.put("a.tar", DATA)
    return url if kind.startswith("s3") else server.http_url("a.tar")


def lead_through(proxy_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the environment name a proxy for everything."""
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, proxy_url)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_proxy_passes_everything_on(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain requests by their whole url, those over TLS through a tunnel; with the credentials of the proxy's url."""
    async with ForwardProxy(USER, PASSWORD) as proxy, server_for(kind, tmp_path, monkeypatch) as server:
        lead_through(proxy.url(), monkeypatch)
        rig = Rig(tmp_path / "cache")
        partial = await rig.download(await rig.stat(url_of(kind, server, monkeypatch)))
        await rig.origins.close()
        place = urlsplit(server.endpoint_url).netloc
    assert partial.path.read_bytes() == DATA
    assert (rig.counters.retries, proxy.denied) == (0, 0)
    assert proxy.targets
    for target in proxy.targets:
        assert target == place if kind.endswith("https") else target.startswith(f"{server.endpoint_url}/")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_proxy_that_wants_other_credentials_is_an_error_at_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so, and not the password."""
    async with ForwardProxy(USER, PASSWORD) as proxy, server_for(kind, tmp_path, monkeypatch) as server:
        lead_through(proxy.url("hush"), monkeypatch)
        url = url_of(kind, server, monkeypatch)
        rig = Rig(tmp_path / "cache")
        with pytest.raises(AccessDeniedError, match="407") as failed:
            await rig.stat(url)
        await rig.origins.close()
    assert failed.value.url == url
    assert "hush" not in str(failed.value)
    assert (rig.counters.retries, server.seen) == (0, [])


@pytest.mark.parametrize("proxy_url", ["https://me:hush@127.0.0.1:1", "socks5://127.0.0.1:1"])
async def test_a_proxy_of_another_kind_is_refused(proxy_url: str, tmp_path: Path) -> None:
    """For web servers; the SDK knows what it can use."""
    table = OriginTable.model_validate({"match": "http://", "storage_options": {"proxy": proxy_url}})
    origins = Origins([table], max_connections=4)
    with pytest.raises(ConfigError, match="proxy") as failed:
        await origins.origin("http://127.0.0.1:1/a.tar").stat("http://127.0.0.1:1/a.tar")
    await origins.close()
    assert "hush" not in str(failed.value)
