"""Plain web servers, through aiohttp: ranged reads where the server has them, one stream where it does not."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp

from shardcache.config import OriginTable
from shardcache.errors import OriginError, OriginUnavailableError, ShardcacheError, ShardChangedError
from shardcache.origin.base import Flow, Received, RemoteObject
from shardcache.origin.fence import Fence
from shardcache.origin.http_client import HttpClient
from shardcache.origin.http_range import READ_BYTES, check_range, fill, range_header, span_bytes, total_bytes
from shardcache.origin.status import error_of


class HttpOrigin:
    """Web servers reached with one set of options; `storage_options` are those of `HttpClient`."""

    def __init__(self, table: OriginTable, max_connections: int, fence: Fence) -> None:
        self._client = HttpClient(table.storage_options, max_connections, fence)

    async def stat(self, url: str) -> RemoteObject:
        """As `Origin.stat`.

        Asks for one byte and not with HEAD: that also tells whether ranges work, and links that are signed for GET
        refuse HEAD.
        """
        async with self._get(url, {"Range": "bytes=0-0"}) as answer:
            size_bytes = _size_bytes(answer)
            version = _version(answer.headers, size_bytes)
            guarded = not version.startswith("size=")
            return RemoteObject(url, version, size_bytes, ranges=answer.status != 200, guarded=guarded)

    async def read_into(self, obj: RemoteObject, start: int, buffer: memoryview, flow: Flow) -> None:
        """As `Origin.read_into`; one GET with If-Match or If-Unmodified-Since."""
        stop = start + len(buffer)
        async with self._get(obj.url, {"Range": range_header(start, stop), **_condition(obj.version)}) as answer:
            check_range(obj, start, stop, answer.status, answer.headers.get("Content-Range"))
            _check_version(obj, answer.headers)
            await fill(buffer, answer.content.read, flow, obj.url)

    async def stream(self, obj: RemoteObject, buffer: memoryview, flow: Flow) -> AsyncGenerator[memoryview, None]:
        """As `Origin.stream`; one GET."""
        async with self._get(obj.url, _condition(obj.version)) as answer:
            _check_version(obj, answer.headers)
            for start in range(0, obj.size_bytes, len(buffer)):
                part = buffer[: obj.size_bytes - start]
                await fill(part, _Limited(answer.content, len(part)).read, flow, obj.url)
                yield part
            if await answer.content.read(1):
                raise OriginUnavailableError(f"the server sent more than {obj.size_bytes} bytes", url=obj.url)

    async def list_prefix(self, prefix: str, received: Received) -> list[RemoteObject]:
        """Raise OriginError: the web has no listing."""
        raise OriginError(
            "a web server cannot list its files",
            url=prefix,
            remedy="name the shards by a brace pattern such as {000..099}, or by an index file (.json)",
        )

    async def close(self) -> None:
        """As `Origin.close`."""
        await self._client.close()

    @asynccontextmanager
    async def _get(self, url: str, headers: dict[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._client.get(url, headers) as answer:
                if answer.status >= 400 and not _is_of_empty_file(answer):
                    raise error_of(answer.status, f"the server answered {answer.status} {answer.reason}", url)
                _check_encoding(answer, url)
                yield answer
        except aiohttp.InvalidURL as exn:
            raise OriginError("not a url that a web server could have", url=url) from exn
        except ShardcacheError:  # a NotFoundError is an OSError, too
            raise
        except (aiohttp.ClientError, OSError) as exn:
            detail = str(exn) or type(exn).__name__
            raise OriginUnavailableError(f"the connection to the server failed: {detail}", url=url) from exn


class _Limited:
    """The next so many bytes of a body."""

    def __init__(self, content: aiohttp.StreamReader, count: int) -> None:
        self._content = content
        self._left = count

    async def read(self, count: int) -> bytes:
        chunk = await self._content.read(min(count, self._left, READ_BYTES))
        self._left -= len(chunk)
        return chunk


def _is_of_empty_file(answer: aiohttp.ClientResponse) -> bool:
    """Tell whether there was no first byte to send because there is none at all."""
    return answer.status == 416 and total_bytes(answer.headers.get("Content-Range")) == 0


def _check_encoding(answer: aiohttp.ClientResponse, url: str) -> None:
    """Make sure that the stored bytes come. Raises OriginError for those that a server encodes as it sends them.

    A file may be stored encoded, and its headers say so. Then its length is known; that of what is encoded on the way
    is not, or it is another one than that of the range.
    """
    encoding, length = answer.headers.get("Content-Encoding", "identity"), answer.content_length
    span = span_bytes(answer.headers.get("Content-Range")) if answer.status == 206 else length
    if encoding != "identity" and (length is None or length != span):
        raise OriginError(
            f"the server encodes what it sends ({encoding}), though it was asked not to",
            url=url,
            remedy="turn off compression on the fly for these files (nginx: gzip off; Apache: SetEnv no-gzip 1)",
        )


def _size_bytes(answer: aiohttp.ClientResponse) -> int:
    """Return the whole file's size. Raises OriginError where the server does not say."""
    size = answer.content_length if answer.status == 200 else total_bytes(answer.headers.get("Content-Range"))
    if size is None:
        raise OriginError(
            "the server does not say how large the file is, so that a cut could not be told from its end",
            url=str(answer.url),
            remedy="serve it with a Content-Length, as any file server does",
        )
    return size


def _version(headers: Mapping[str, str], size_bytes: int) -> str:
    """Return the ETag as it stands, else the date of change; a size alone says little, but all there is."""
    said = (headers.get("ETag", ""), headers.get("Last-Modified", ""))
    # What cannot be sent back, such as a byte that is no character, can hold no version fast.
    return next((version for version in said if version and version.isprintable()), f"size={size_bytes}")


def _check_version(obj: RemoteObject, headers: Mapping[str, str]) -> None:
    if _version(headers, obj.size_bytes) != obj.version:
        raise ShardChangedError("the server sent another version than was asked for", url=obj.url)


def _condition(version: str) -> dict[str, str]:
    if version.startswith('"'):
        return {"If-Match": version}
    # A weak ETag never satisfies If-Match (RFC 9110, 13.1.1); the answer's own headers are compared instead.
    return {} if version.startswith(("W/", "size=")) else {"If-Unmodified-Since": version}
