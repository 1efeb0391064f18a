"""Stores behind TLS, at IPv6 addresses and behind proxies, and whom the daemon trusts."""

import base64
import contextlib
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from shardcache.config.origin_table import OriginTable
from shardcache.errors import AccessDeniedError, ConfigError, OriginError, OriginUnavailableError
from shardcache.origin.patterns.expansion import expand
from shardcache.origin.registry import Origins
from support.network.certificates import Authority
from support.network.http_requests import Request
from support.network.scripted_server import Reply, ScriptedServer, answer, head
from support.programs.downloads import Rig
from support.stores import aws_env
from support.stores.buckets import use_aws
from support.stores.faulty_s3 import FaultyS3
from support.stores.mischief import Ending

DATA = bytes(range(256)) * 1000
PASSED = timedelta(days=-1)
VERSION = 'ETag: "1"'
WHOLE = f"Content-Range: bytes 0-{len(DATA) - 1}/{len(DATA)}"
FACTS = {
    "s3": head(f"Content-Length: {len(DATA)}", VERSION, status="200 OK"),
    "web": answer(DATA[:1], f"Content-Range: bytes 0-0/{len(DATA)}", VERSION),
}
KINDS = pytest.mark.parametrize("kind", ["s3", "web"])
LOOPBACK = "::1"
USER = "me"
PASSWORD = "p@ss:w/rd"
BLOCK_BYTES = 64 * 1024
# The head of a TLS record of 16 KiB of ciphertext, and less of it than that.
HALF_A_RECORD = b"\x17\x03\x03\x40\x00" + bytes(100)


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Authority:
    """An authority that this process trusts, as users make it trust theirs."""
    authority = Authority(tmp_path / "authority")
    use_aws(monkeypatch, tmp_path, {"AWS_CA_BUNDLE": str(authority.ca_file)})
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca_file))
    return authority


def url_of(kind: str, server: FaultyS3 | ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the url of an object; for S3, this process's AWS variables point at the server."""
    for name, value in aws_env(
        server.endpoint_url if isinstance(server, FaultyS3) else server.url("")
    ).items():
        monkeypatch.setenv(name, value)
    if isinstance(server, ScriptedServer):
        return "s3://bucket/a.tar" if kind == "s3" else server.url()
    url = server.put("a.tar", DATA)
    return url if kind == "s3" else server.http_url("a.tar")


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("wrong", ["unknown", "expired", "another name"])
async def test_a_certificate_that_is_refused_is_an_error_at_once(
    kind: str,
    wrong: str,
    trusting: Authority,
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """One that says what is wrong and what to do: another try would not help, so there is none."""
    contexts = {
        "unknown": Authority(tmp_path / "unknown").server(),
        "expired": trusting.server(lifetime=PASSED),
        "another name": trusting.server("store.example"),
    }
    reasons = {
        "unknown": "unable to get local issuer",
        "expired": "expired",
        "another name": "IP address mismatch",
    }
    async with FaultyS3(contexts[wrong]) as server:
        url = url_of(kind, server, monkeypatch)
        with pytest.raises(OriginError, match=f"certificate.*{reasons[wrong]}") as failed:
            await rig.stat(url)
        assert failed.value.url == url
        if kind == "s3":  # the SDK asks for a listing, over connections of its own
            with pytest.raises(OriginError, match="certificate") as failed:
                await expand("s3://faulty/", rig.origins)
    assert not isinstance(failed.value, OriginUnavailableError)
    assert "SSL_CERT_FILE" in failed.value.remedy
    assert "AWS_CA_BUNDLE" in failed.value.remedy
    assert rig.counters.retries == 0
    assert server.seen == []


def cut_record(plain: socket.socket) -> None:
    """Send the beginning of a TLS record; for `Reply.then`, before the connection is closed."""
    plain.sendall(HALF_A_RECORD)


@KINDS
async def test_a_cut_within_a_record_is_a_lost_connection(
    kind: str, trusting: Authority, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another try may help; the last one's error names the url."""
    half = Reply(
        answer(DATA[: len(DATA) // 2], WHOLE, VERSION, length=len(DATA)), Ending.CLOSE, cut_record
    )
    with ScriptedServer(FACTS[kind], half, context=trusting.server()) as server:
        url = url_of(kind, server, monkeypatch)
        obj = await rig.stat(url)
        with pytest.raises(
            OriginUnavailableError, match=r"closed the connection.*after 3 attempts"
        ) as failed:
            await rig.download(obj, part_bytes=len(DATA))
    assert failed.value.url == url
    assert rig.counters.retries == 2


@pytest.mark.slow
@pytest.mark.parametrize("status", ["301 Moved", "307 Temporary Redirect"])
@KINDS
async def test_redirect_from_https_to_http_is_an_error(
    kind: str, status: str, trusting: Authority, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An https url never comes over an insecure way; the error comes at once."""
    with ScriptedServer(answer(DATA)) as plain:
        away = head(f"Location: {plain.url()}", "Content-Length: 0", status=status)
        with ScriptedServer(away, context=trusting.server()) as server:
            url = url_of(kind, server, monkeypatch)
            with pytest.raises(OriginError) as failed:
                await rig.stat(url)
        assert plain.connections == 0
        assert len(server.heads) <= 4  # the SDK would ask for the bucket's region for ever
    assert not isinstance(failed.value, OriginUnavailableError)
    assert failed.value.url == url
    assert failed.value.remedy
    assert rig.counters.retries == 0


def has_loopback() -> bool:
    """Return whether this machine has the IPv6 loopback."""
    try:
        socket.create_server((LOOPBACK, 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.skipif(not has_loopback(), reason="needs ::1")
@pytest.mark.parametrize("secure", [False, True], ids=["http", "https"])
@pytest.mark.parametrize("kind", ["web", "s3", "s3 by a table"])
async def test_a_store_at_an_ipv6_address_is_read(
    kind: str, secure: bool, trusting: Authority, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker puts the address in brackets for the Host, and without them for TLS."""
    context = trusting.server(LOOPBACK) if secure else None
    facts = FACTS[kind.partition(" ")[0]]
    with ScriptedServer(
        facts, answer(DATA, WHOLE, VERSION), context=context, address=LOOPBACK
    ) as server:
        url = url_of(kind.partition(" ")[0], server, monkeypatch)
        if kind == "s3 by a table":
            monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
            table = {"match": "s3://bucket/", "storage_options": {"endpoint_url": server.url("")}}
            rig.origins = Origins([OriginTable.model_validate(table)], max_connections=4)
        partial = await rig.download(await rig.stat(url), part_bytes=len(DATA))
        host = f"[{LOOPBACK}]:{server.port}"
    assert partial.path.read_bytes() == DATA
    assert rig.counters.retries == 0
    assert len(server.heads) == 2
    for asked in server.heads:
        assert f"\r\nHost: {host}\r\n" in asked
        assert ("X-Amz-Signature=" in asked) == (kind != "web")


PORTS = {"http": 80, "https": 443}


class ForwardProxy(ScriptedServer):
    def __init__(self, user: str, password: str) -> None:
        super().__init__()
        self._user = user
        self._pair = base64.b64encode(f"{user}:{password}".encode()).decode()
        # A url, or host and port by CONNECT, of each connection.
        self.targets: list[str] = []

    def url_for(self, password: str) -> str:
        return self.url("", f"{quote(self._user)}:{quote(password, '')}@127.0.0.1")

    def reply(self, head: str, _number: int) -> Reply:
        request = Request.parse(head)
        if request.headers.get("proxy-authorization") != f"Basic {self._pair}":
            return Reply(answer(b"", status="407 Proxy Authentication Required"), Ending.CLOSE)
        self.targets.append(request.target)
        tunnel = request.method == "CONNECT"
        url = urlsplit(f"//{request.target}" if tunnel else request.target)
        far = socket.create_connection((url.hostname, url.port or PORTS[url.scheme]))
        if tunnel:
            return Reply(
                b"HTTP/1.1 200 Connection established\r\n\r\n", Ending.CLOSE, partial(join, far)
            )
        far.sendall(head.encode("latin-1"))
        return Reply(b"", Ending.CLOSE, partial(join, far))


def join(far: socket.socket, near: socket.socket) -> None:
    """Pass on what comes from either side, until both have ended."""
    with far:
        there = threading.Thread(target=pump, args=(near, far))
        there.start()
        pump(far, near)
        there.join()


def pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(BLOCK_BYTES):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@pytest.fixture
def proxy() -> Iterator[ForwardProxy]:
    """A proxy that one user may use."""
    with ForwardProxy(USER, PASSWORD) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True], ids=["http", "https"])
@KINDS
async def test_a_proxy_passes_everything_on(
    kind: str,
    secure: bool,
    proxy: ForwardProxy,
    trusting: Authority,
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain requests go by their whole url, TLS through a tunnel, with the proxy's credentials.

    Other credentials are an error at once, which does not name them.
    """
    async with FaultyS3(trusting.server() if secure else None) as server:
        url = url_of(kind, server, monkeypatch)
        for password in ("hush", PASSWORD):
            for name in ("http_proxy", "https_proxy"):
                monkeypatch.setenv(name, proxy.url_for(password))
            rig.origins = Origins([], max_connections=4)
            if password == PASSWORD:
                assert (await rig.download(await rig.stat(url))).path.read_bytes() == DATA
                continue
            with pytest.raises(AccessDeniedError, match="407") as failed:
                await rig.stat(url)
            assert failed.value.url == url
            assert "hush" not in str(failed.value)
            assert rig.counters.retries == 0
            assert server.seen == []
            await rig.origins.close()
        place = urlsplit(server.endpoint_url).netloc
    assert rig.counters.retries == 0
    assert proxy.targets
    for target in proxy.targets:
        assert target == place if secure else target.startswith(f"{server.endpoint_url}/")


@pytest.mark.parametrize("proxy_url", ["https://me:hush@127.0.0.1:1", "socks5://127.0.0.1:1"])
async def test_a_proxy_of_another_kind_is_refused(proxy_url: str) -> None:
    """For web servers; the SDK knows what it can use."""
    table = OriginTable.model_validate(
        {"match": "http://", "storage_options": {"proxy": proxy_url}}
    )
    origins = Origins([table], max_connections=4)
    with pytest.raises(ConfigError, match="proxy") as failed:
        await origins.origin("http://127.0.0.1:1/a.tar").stat("http://127.0.0.1:1/a.tar")
    await origins.close()
    assert "hush" not in str(failed.value)
