"""Stores behind TLS: whom the daemon trusts, and what it says of those whom it does not."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from shardcache.errors import OriginError, OriginUnavailableError
from shardcache.origin.listing import expand
from support.network.certificates import Authority
from support.network.scripted_server import Reply, ScriptedServer, answer, cut_record, head
from support.programs.downloads import Rig
from support.stores import aws_env
from support.stores.buckets import use_aws
from support.stores.faulty_s3 import FaultyS3
from support.stores.mischief import Ending

DATA = bytes(range(256)) * 1000
PASSED = timedelta(days=-1)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """An authority that nobody trusts yet."""
    return Authority(tmp_path / "authority")


@pytest.fixture
def trusting(authority: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Authority:
    """An authority that this process trusts, as users make it trust theirs."""
    use_aws(monkeypatch, tmp_path, {"AWS_CA_BUNDLE": str(authority.ca_file)})
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca_file))
    return authority


def lead_aws(monkeypatch: pytest.MonkeyPatch, server: FaultyS3 | ScriptedServer) -> None:
    """Point this process's AWS variables at a server."""
    endpoint_url = server.endpoint_url if isinstance(server, FaultyS3) else server.url("")
    for name, value in aws_env(endpoint_url).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("scheme", ["s3", "https"])
async def test_server_with_a_trusted_certificate_is_read(
    scheme: str, trusting: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """AWS_CA_BUNDLE for S3, SSL_CERT_FILE for the web: every byte comes, over connections that are used again."""
    async with FaultyS3(trusting.server()) as server:
        lead_aws(monkeypatch, server)
        url = server.put("a.tar", DATA)
        rig = Rig(tmp_path / "cache")
        partial = await rig.download(await rig.stat(url if scheme == "s3" else server.http_url("a.tar")))
        await rig.origins.close()
    assert partial.path.read_bytes() == DATA
    assert rig.counters.retries == 0


@pytest.mark.parametrize("scheme", ["s3", "https"])
@pytest.mark.parametrize("wrong", ["unknown", "expired", "another name"])
async def test_a_certificate_that_is_refused_is_an_error_at_once(
    scheme: str, wrong: str, trusting: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that says what is wrong and what to do: another try would not help, so there is none."""
    contexts = {
        "unknown": Authority(tmp_path / "unknown").server(),
        "expired": trusting.server(lifetime=PASSED),
        "another name": trusting.server("store.example"),
    }
    reasons = {"unknown": "unable to get local issuer", "expired": "expired", "another name": "IP address mismatch"}
    async with FaultyS3(contexts[wrong]) as server:
        lead_aws(monkeypatch, server)
        url = server.put("a.tar", DATA) if scheme == "s3" else server.http_url("a.tar")
        rig = Rig(tmp_path / "cache")
        with pytest.raises(OriginError, match=f"certificate.*{reasons[wrong]}") as failed:
            await rig.stat(url)
        await rig.origins.close()
    assert not isinstance(failed.value, OriginUnavailableError)
    assert failed.value.url == url
    assert "SSL_CERT_FILE" in failed.value.remedy
    assert (rig.counters.retries, server.seen) == (0, [])


async def test_listing_from_an_untrusted_server_is_refused_alike(
    trusting: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The SDK asks for it, over connections of its own."""
    async with FaultyS3(Authority(tmp_path / "unknown").server()) as server:
        lead_aws(monkeypatch, server)
        rig = Rig(tmp_path / "cache")
        with pytest.raises(OriginError, match="certificate") as failed:
            await expand("s3://faulty/", rig.origins)
        await rig.origins.close()
    assert not isinstance(failed.value, OriginUnavailableError)
    assert failed.value.url == "s3://faulty/"
    assert "AWS_CA_BUNDLE" in failed.value.remedy


@pytest.mark.parametrize("scheme", ["s3", "https"])
async def test_a_certificate_that_expires_between_two_requests_is_an_error_at_once(
    scheme: str, trusting: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a part as of the question what the object is."""
    context = trusting.server()
    async with FaultyS3(context) as server:
        lead_aws(monkeypatch, server)
        url = server.put("a.tar", DATA) if scheme == "s3" else server.http_url("a.tar")
        server.put("a.tar", DATA)
        rig = Rig(tmp_path / "cache")
        obj = await rig.stat(url)
        trusting.server(lifetime=PASSED, context=context)
        with pytest.raises(OriginError, match=r"certificate.*expired"):
            await rig.download(obj)
        await rig.origins.close()
    assert rig.counters.retries == 0


@pytest.mark.parametrize("scheme", ["s3", "https"])
async def test_a_cut_within_a_record_is_a_lost_connection(
    scheme: str, trusting: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another try may help; the last one's error names the url."""
    size, version = f"bytes 0-{len(DATA) - 1}/{len(DATA)}", 'ETag: "1"'
    known = {
        "s3": head(f"Content-Length: {len(DATA)}", version, status="200 OK"),
        "https": answer(DATA[:1], f"Content-Range: bytes 0-0/{len(DATA)}", version),
    }
    half = answer(DATA[: len(DATA) // 2], f"Content-Range: {size}", version, length=len(DATA))
    with ScriptedServer(known[scheme], Reply(half, Ending.CLOSE, cut_record), context=trusting.server()) as server:
        lead_aws(monkeypatch, server)
        url = "s3://bucket/a.tar" if scheme == "s3" else server.url()
        rig = Rig(tmp_path / "cache")
        obj = await rig.stat(url)
        with pytest.raises(OriginUnavailableError, match=r"closed the connection.*after 3 attempts") as failed:
            await rig.download(obj, part_bytes=len(DATA))
        await rig.origins.close()
    assert failed.value.url == url
    assert rig.counters.retries == 2


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Temporary Redirect"])
@pytest.mark.parametrize("scheme", ["s3", "https"])
async def test_nothing_is_read_where_https_leads_to_http(
    scheme: str, status: str, trusting: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A url asked for by https does not come by a way that anybody can change; the error comes at once."""
    with ScriptedServer(answer(DATA)) as plain:
        away = head(f"Location: {plain.url()}", "Content-Length: 0", status=status)
        with ScriptedServer(away, context=trusting.server()) as server:
            lead_aws(monkeypatch, server)
            url = "s3://bucket/a.tar" if scheme == "s3" else server.url()
            rig = Rig(tmp_path / "cache")
            with pytest.raises(OriginError) as failed:
                await rig.stat(url)
            await rig.origins.close()
        assert plain.connections == 0
        assert len(server.heads) <= 4  # the SDK would ask for the bucket's region for ever
    assert not isinstance(failed.value, OriginUnavailableError)
    assert failed.value.url == url
    assert failed.value.remedy
    assert rig.counters.retries == 0
