"""HTTP session of the S3 SDK: replaces silent connections, follows no redirects, limits heads.

`s3_sessions` gives `StoreSession` to aiobotocore. aiobotocore's session has an aiohttp session for
each proxy; both kinds are wrapped here. A pooled connection is one that is kept open for further
requests. A connection is silent if no answer to a request arrives: a NAT or load balancer may have
dropped the connection while it was idle. The head of an answer is its status line and headers.
"""

import asyncio
import math
from typing import Any

import aiohttp
from aiobotocore.httpsession import AIOHTTPSession

from shardcache.origin.s3.s3_errors import RedirectError
from shardcache.transport.http.http_heads import MAX_HEAD_BYTES, HeadError
from shardcache.transport.http.pool import IDLE_S, SILENCE_S
from shardcache.transport.http.sockets import new_socket

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_REGION_HEADER = "x-amz-bucket-region"
_REPEATABLE = ("GET", "HEAD")
_POOLED_OPTIONS = {"keepalive_timeout": IDLE_S, "socket_factory": new_socket}


class _StrictSession(AIOHTTPSession):  # type: ignore[misc]
    """aiobotocore session whose requests are those of `_StrictClient`."""

    async def _get_session(self, proxy_url: str | None) -> "_StrictClient":
        """As aiobotocore's own: return the aiohttp session for a proxy."""
        return _StrictClient(await super()._get_session(proxy_url))


class StoreSession(_StrictSession):
    """Session that pools connections, with a second session that opens one for each request.

    This is the `http_session_cls` of `AioConfig`. After one pooled connection was silent, no pooled
    connections are used for `IDLE_S`. By then, all connections that were idle at the same time as
    the silent one have been closed.
    """

    def __init__(
        self,
        *args: Any,
        connector_args: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        pooled_options = _POOLED_OPTIONS | (connector_args or {})
        fresh_options = pooled_options | {"force_close": True}
        del fresh_options["keepalive_timeout"]  # aiohttp rejects it together with `force_close`
        super().__init__(*args, connector_args=pooled_options, **options)
        self._fresh = _StrictSession(*args, connector_args=fresh_options, **options)
        # These are times by the event loop's clock.
        self._trusted_from_s = -math.inf  # time from which pooled connections are used
        self._answered_s = -math.inf  # time of the latest answer over a pooled connection

    async def __aenter__(self) -> "StoreSession":
        await self._fresh.__aenter__()
        await super().__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._fresh.__aexit__(*exc_info)
        await super().__aexit__(*exc_info)

    async def send(self, request: Any) -> Any:
        """Send a request, and return the answer.

        A GET or HEAD is sent again, over a new connection, if a pooled connection is silent.

        Raises RedirectError if a HEAD is redirected without the name of the bucket's region.
        """
        if request.method in _REPEATABLE:
            answer = await self._send_repeatable(request)
        else:
            answer = await super().send(request)
        # The SDK itself handles a redirect: it sends the request to the bucket's region. If the
        # answer does not name the region, the SDK sends a HEAD to find it. If that HEAD is
        # redirected as well, it would do so hundreds of times.
        is_redirect = answer.status_code in _REDIRECTS
        names_region = _REGION_HEADER in answer.headers
        if request.method == "HEAD" and is_redirect and not names_region:
            raise RedirectError(answer.status_code)
        return answer

    async def _send_repeatable(self, request: Any) -> Any:
        """Send a request over a pooled connection, and again over a new one after a silence.

        While pooled connections are not trusted, the request is sent only over a new connection.
        """
        is_trusted = asyncio.get_running_loop().time() >= self._trusted_from_s
        if is_trusted:
            answer = await self._send_pooled(request)
            if answer is not None:
                return answer
        return await self._fresh.send(request)

    async def _send_pooled(self, request: Any) -> Any:
        """Return the answer over a pooled connection; None if the connection is silent."""
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        try:
            async with asyncio.timeout(SILENCE_S) as silence_limit:
                answer = await super().send(request)
        except TimeoutError:
            if not silence_limit.expired():
                raise
            self._distrust_pooled()
            return None
        except asyncio.CancelledError:
            # The caller may have cancelled the request because the connection is silent. If another
            # request was answered since, pooled connections work, and this one was only slower.
            was_other_answered = self._answered_s > asked_s
            if not was_other_answered:
                self._distrust_pooled()
            raise
        self._answered_s = loop.time()
        return answer

    def _distrust_pooled(self) -> None:
        """Use no pooled connections until all that are idle now have been closed."""
        self._trusted_from_s = asyncio.get_running_loop().time() + IDLE_S


class _StrictClient:
    """aiohttp session that follows no redirects, and rejects answers with a large head.

    It has the only method that the SDK calls.
    """

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def request(self, *args: Any, **options: Any) -> aiohttp.ClientResponse:
        """As `ClientSession.request`, with re-encoded headers.

        Raises HeadError if the answer's headers are too large.
        """
        answer = await self._session.request(*args, **options, allow_redirects=False)
        head_bytes = sum(len(name) + len(value) for name, value in answer.raw_headers)
        if head_bytes > MAX_HEAD_BYTES:
            answer.close()
            raise HeadError
        # aiobotocore decodes headers as UTF-8. They are re-encoded, so that each character stands
        # for one byte, as in the answers to requests that shardcache makes without the SDK, in its
        # transport workers. aiohttp has no public way to do so.
        pairs = answer.raw_headers
        reencoded = tuple((_latin_as_utf8(name), _latin_as_utf8(value)) for name, value in pairs)
        answer._raw_headers = reencoded  # noqa: SLF001
        return answer


def _latin_as_utf8(raw: bytes) -> bytes:
    """Return bytes in UTF-8 that decode to one character for each byte of `raw`."""
    return raw.decode("latin-1").encode()
