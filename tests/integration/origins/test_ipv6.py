"""Stores at an IPv6 address, which urls have in brackets."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shardcache.config import OriginTable
from shardcache.origin.registry import Origins
from support.network.certificates import Authority
from support.network.scripted_server import ScriptedServer, answer, head
from support.programs.downloads import Rig
from support.stores import aws_env
from support.stores.buckets import use_aws

LOOPBACK = "::1"
DATA = bytes(range(256)) * 1000
VERSION = 'ETag: "1"'
WHOLE = f"Content-Range: bytes 0-{len(DATA) - 1}/{len(DATA)}"


def has_loopback() -> bool:
    """Tell whether this machine has the IPv6 loopback."""
    try:
        socket.create_server((LOOPBACK, 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not has_loopback(), reason="needs ::1")


@pytest.mark.parametrize("secure", [False, True], ids=["http", "https"])
@pytest.mark.parametrize("kind", ["web", "s3 by the environment", "s3 by a table"])
async def test_a_store_at_an_ipv6_address_is_read(
    kind: str, secure: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the worker, which names the address in brackets as the Host and without them to TLS; the SDK is not needed."""
    authority = Authority(tmp_path / "authority")
    use_aws(monkeypatch, tmp_path, {"AWS_CA_BUNDLE": str(authority.ca_file)})
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca_file))
    known = head(f"Content-Length: {len(DATA)}", VERSION, status="200 OK")
    if kind == "web":
        known = answer(DATA[:1], f"Content-Range: bytes 0-0/{len(DATA)}", VERSION)
    context = authority.server(LOOPBACK) if secure else None
    with ScriptedServer(known, answer(DATA, WHOLE, VERSION), context=context, address=LOOPBACK) as server:
        endpoint_url, host = server.url(""), f"[{LOOPBACK}]:{server.port}"
        for name, value in aws_env("http://127.0.0.1:1" if kind == "s3 by a table" else endpoint_url).items():
            monkeypatch.setenv(name, value)
        rig = Rig(tmp_path / "cache")
        if kind == "s3 by a table":
            table = {"match": "s3://bucket/", "storage_options": {"endpoint_url": endpoint_url}}
            rig.origins = Origins([OriginTable.model_validate(table)], max_connections=4)
        obj = await rig.stat(server.url() if kind == "web" else "s3://bucket/a.tar")
        partial = await rig.download(obj, part_bytes=len(DATA))
        await rig.origins.close()
    assert partial.path.read_bytes() == DATA
    assert rig.counters.retries == 0
    assert len(server.heads) == 2
    for asked in server.heads:
        assert f"\r\nHost: {host}\r\n" in asked
        assert ("X-Amz-Signature=" in asked) == (kind != "web")
