"""Heads of answers that no store sends by design: floods, bytes beyond ASCII, absurd numbers; spellings of urls."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shardcache.errors import OriginError
from shardcache.origin.registry import Origins
from shardcache.transport.flow import nothing
from support.network.scripted_server import Reply, ScriptedServer
from support.stores.buckets import use_aws
from support.stores.faulty_s3 import aws_env
from support.stores.mischief import Ending

FLOOD = Reply(b"HTTP/1.1 200 OK\r\n" + b"".join(b"x-%d: %b\r\n" % (n, b"a" * 65_000) for n in range(95)), Ending.HANG)
DATA = b"0123456789"


@pytest.mark.parametrize("way", ["http", "s3", "s3 listing"])
async def test_flood_of_headers_is_a_typed_error(
    way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, origins: Origins
) -> None:
    """At once, with the url and a remedy; the connection is closed."""
    with ScriptedServer(FLOOD) as server:
        use_aws(monkeypatch, tmp_path, aws_env(server.url("")))
        url = server.url() if way == "http" else "s3://bucket/a/"
        ask = origins.origin(url).list_prefix(url, nothing) if "list" in way else origins.origin(url).stat(url + "b")
        with pytest.raises(OriginError, match="64 KiB") as failed:
            await ask
        assert not failed.value.retryable
        assert failed.value.url is not None and failed.value.url.startswith(url)
        assert failed.value.remedy
        await asyncio.to_thread(server.wait_closed, server.connections)
