"""Sessions answer whatever their work raises, at once and typed; so does the admin API."""

import asyncio
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from shardcache.cache.facade import Cache
from shardcache.cache.listings.manifests import Manifests
from shardcache.config.settings import Settings
from shardcache.fetch.download import Downloader
from shardcache.origin.registry import Origins
from shardcache.server.app import serving
from shardcache.server.listening.limits import Limits
from shardcache.server.listening.tcp_listener import TcpListener
from shardcache.store.indexing.indexers import Indexers
from shardcache.telemetry.metrics import Counters
from support.programs.daemon import UnixConnection
from support.programs.raw_session import RawSession
from support.shards.stores import open_store


class FaultyManifests:
    """Manifests that fail unexpectedly at a url, and otherwise do what the real ones do."""

    def __init__(self, real: Manifests) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    async def resolve(self, urls: list[str], *args: Any, **options: Any) -> Any:
        """Raise TypeError for one url."""
        if urls == ["file:///fault.tar"]:
            raise TypeError("'int' object is not subscriptable")
        return await self._real.resolve(urls, *args, **options)


@pytest.fixture
async def socket_path(tmp_path: Path) -> AsyncIterator[Path]:
    """Socket of a server in this process, over a real cache with faulty manifests."""
    settings = Settings.load({"cache_dir": str(tmp_path / "cache"), "capacity": "1GB"})
    store = open_store(tmp_path / "cache")
    origins = Origins([], max_connections=4)
    indexers = Indexers(1)
    with tempfile.TemporaryDirectory() as folder, closing(socket.socket(socket.AF_UNIX)) as sock:
        path = Path(folder) / "s.sock"
        sock.bind(str(path))
        sock.listen()
        sock.setblocking(False)
        async with asyncio.TaskGroup() as group:
            cache = Cache(
                settings, store, origins, Downloader(settings, Counters()), indexers, group
            )
            cache.manifests = cast(Manifests, FaultyManifests(cache.manifests))
            async with serving(
                cache, [sock], lambda: Limits.of_unix_socket(settings), TcpListener()
            ):
                yield path
            cache.stop()
        await indexers.close()
        await origins.close()
    store.close()


async def asked(question: Callable[[], Any]) -> Any:
    """Return what a client in a thread was answered."""
    return await asyncio.to_thread(question)


async def test_unexpected_error_answers_its_request_and_the_session_goes_on(
    socket_path: Path, tmp_path: Path
) -> None:
    """The reader waits for no time limit, and its next request is answered."""
    (tmp_path / "a.tar").write_bytes(b"")

    def ask() -> tuple[dict[str, Any], dict[str, Any]]:
        with RawSession(socket_path) as session:
            first = session.ask("resolve", urls=["file:///fault.tar"])
            return first, session.ask("resolve", urls=[f"file://{tmp_path}/a.tar"])

    failed, answered = await asked(ask)
    assert failed["type"] == "error"
    assert "internal error in the daemon: TypeError" in failed["error"]["message"]
    assert "log" in failed["error"]["remedy"]
    assert answered["type"] == "manifest"


async def test_unexpected_error_answers_its_request_of_the_admin_api(socket_path: Path) -> None:
    """With its JSON, as any other error, and the status of a fault of the server."""

    def ask() -> tuple[int, Any]:
        with closing(UnixConnection(socket_path)) as connection:
            connection.request(
                "POST", "/v1/warm", json.dumps({"urls": ["file:///fault.tar"]}).encode()
            )
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    status, answer = await asked(ask)
    assert status == 500
    assert "internal error in the daemon: TypeError" in answer["error"]["message"]
