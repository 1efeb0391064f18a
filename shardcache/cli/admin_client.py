"""The admin API over the daemon's Unix socket, as the commands use it."""

from __future__ import annotations

import json
import shlex
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Self

import aiohttp

from shardcache.errors import DaemonError, NoDaemonError, ProtocolError, from_json
from shardcache.protocol import socket_path
from shardcache.redact import printable

Json = dict[str, Any]
# Close it, as with `contextlib.aclosing`: a caller that stops reading early frees the connection that way.
Lines = AsyncGenerator[Json, None]


class AdminClient:
    """One command's connection to the daemon; an async context manager.

    Every method raises NoDaemonError if nothing answers at the socket, DaemonError if this user may not use it, and
    any error that the daemon itself returns.

    Attributes:
        socket: path of the daemon's socket.
        http: the session with it, for requests that have no method here.
    """

    http: aiohttp.ClientSession

    def __init__(self, socket: Path | None = None) -> None:
        self.socket = socket_path(socket)
        self._chosen = socket is not None

    def __repr__(self) -> str:
        return f"AdminClient({str(self.socket)!r})"

    async def __aenter__(self) -> Self:
        self.http = aiohttp.ClientSession(
            "http://shardcache",
            connector=aiohttp.UnixConnector(str(self.socket), limit=0),
            # No total timeout: warming a whole dataset takes hours, with pauses between events.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        )
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.http.close()

    async def status(self) -> Json:
        """Return the daemon's status page."""
        return await self._json("GET", "/v1/status")

    async def evict(self, urls: list[str]) -> Json:
        """Evict the shards that match; return those evicted, and those kept with the reason."""
        return await self._json("POST", "/v1/evict", json={"urls": urls})

    async def unpin(self, urls: list[str]) -> Json:
        """Unpin the shards that match; return those unpinned, and those kept with the reason."""
        return await self._json("POST", "/v1/unpin", json={"urls": urls})

    async def settings(self) -> list[Json]:
        """Return the settings that can be changed, with their current values."""
        answer: list[Json] = (await self._json("GET", "/v1/settings"))["settings"]
        return answer

    async def set(self, name: str, value: str) -> Json:
        """Change a setting; return its row, with the previous value."""
        return await self._json("POST", "/v1/settings", json={"name": name, "value": value})

    def pins(self) -> Lines:
        """Yield the pinned shards."""
        return self._lines("GET", "/v1/pins")

    def pin(self, urls: list[str]) -> Lines:
        """Pin the shards of `urls`, and yield events until each is in the cache or has failed."""
        return self._until_done("/v1/pin", {"urls": urls})

    def shards(self, prefix: str) -> Lines:
        """Yield the cached shards whose url starts with `prefix`."""
        return self._lines("GET", "/v1/shards", params={"prefix": prefix})

    def warm(self, urls: list[str]) -> Lines:
        """Yield events until every shard of `urls` is in the cache or has failed."""
        return self._until_done("/v1/warm", {"urls": urls})

    def index(self, urls: list[str], tokens: str | None = None) -> Lines:
        """Yield events until the samples of every shard of `urls` are counted, or it has failed.

        Args:
            tokens: member whose tokens to count, too.
        """
        return self._until_done("/v1/index", {"urls": urls} | ({} if tokens is None else {"tokens": tokens}))

    def probe(self, urls: list[str], *, quick: bool) -> Lines:
        """Yield the daemon's findings on the origins of `urls`, or on all known ones; `quick` skips the rate."""
        return self._lines("POST", "/v1/probe", json={"urls": urls, "quick": quick})

    def verify(self, prefix: str) -> Lines:
        """Yield events until every cached shard below `prefix` has been verified."""
        return self._until_done("/v1/verify", {"prefix": prefix})

    async def _json(self, method: str, path: str, **options: Any) -> Json:
        async with self._request(method, path, **options) as response:
            answer: Json = shown(await response.json())
            return answer

    async def _lines(self, method: str, path: str, **options: Any) -> Lines:
        async with self._request(method, path, **options) as response:
            async for line in response.content:
                yield shown(json.loads(line))

    async def _until_done(self, path: str, body: Json) -> Lines:
        event: Json = {}
        async with aclosing(self._lines("POST", path, json=body)) as events:
            async for event in events:
                yield event
        if event.get("event") != "done":
            raise NoDaemonError("the daemon stopped before the request was done", url=str(self.socket))

    @asynccontextmanager
    async def _request(self, method: str, path: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        with self._translated():
            async with self.http.request(method, path, **options) as response:
                if not response.ok:
                    raise await error_of(response)
                yield response

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn aiohttp's errors into errors that the user can act on."""
        try:
            yield
        except aiohttp.ClientConnectorError as exn:
            raise self._unreachable(exn.os_error) from exn
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as exn:
            raise NoDaemonError(
                f"the connection to the daemon broke: {exn or type(exn).__name__}", url=str(self.socket)
            ) from exn

    def _unreachable(self, cause: OSError) -> DaemonError:
        where = str(self.socket)
        if isinstance(cause, PermissionError):
            return DaemonError(
                "you may not use the daemon's socket",
                url=where,
                remedy=f"join the group that owns it (ls -l {shlex.quote(where)}), then log in again",
            )
        flag = f"--socket {shlex.quote(where)} " if self._chosen else ""
        command = f"shardcache serve {flag}--cache-dir /path/on/local/disk --capacity 500GB"
        return NoDaemonError("no daemon listens at the socket", url=where, remedy=f"start it: {command}")


def shown(value: Any) -> Any:
    """Return JSON without terminal control sequences: urls, names and reasons come from other users."""
    match value:
        case str():
            return printable(value)
        case list():
            return list(map(shown, value))
        case dict():
            return {name: shown(inner) for name, inner in value.items()}
    return value


async def error_of(response: aiohttp.ClientResponse) -> Exception:
    """Return the error that a response holds, or a ProtocolError that says what it holds instead."""
    try:
        return from_json(shown((await response.json())["error"]))
    except (aiohttp.ContentTypeError, ValueError, KeyError, TypeError):
        text = (await response.text()).strip()[:200]
        return ProtocolError(f"the daemon answered {response.status} {response.reason}: {text}")
