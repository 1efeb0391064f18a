"""The SDK's connections, without HTTP redirects, and with distrust of idle connections.

aiobotocore leaves redirects to aiohttp, which would send a signed request, session token included, wherever a server
says. botocore itself follows none, and recognizes answers that mean another region of the same object store.
"""

from __future__ import annotations

from typing import Any

import aiohttp
from aiobotocore.httpsession import AIOHTTPSession

from shardcache.transport.head import MAX_HEAD_BYTES, HeadError
from shardcache.transport.sockets import IDLE_S, Distrust, new_socket

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_REGION = "x-amz-bucket-region"
_CONNECTOR = {"keepalive_timeout": IDLE_S, "socket_factory": new_socket}


class LedAwayError(OSError):
    """A redirect that does not state the bucket's region.

    botocore would ask for the region by a HEAD, and treat its answer the same way, hundreds of times.
    """


class _StayingSession(AIOHTTPSession):  # type: ignore[misc]
    """aiobotocore session that does not follow redirects."""

    async def _get_session(self, proxy_url: str | None) -> _Staying:
        return _Staying(await super()._get_session(proxy_url))


class StoreSession(_StayingSession):
    """Session that reuses connections, with a second one that does not; for `AioConfig(http_session_cls=…)`."""

    def __init__(self, *args: Any, connector_args: dict[str, Any] | None = None, **options: Any) -> None:
        pooled = _CONNECTOR | (connector_args or {})
        fresh = {name: value for name, value in pooled.items() if name != "keepalive_timeout"} | {"force_close": True}
        super().__init__(*args, connector_args=pooled, **options)
        self._fresh = _StayingSession(*args, connector_args=fresh, **options)
        self._distrust = Distrust()

    async def __aenter__(self) -> StoreSession:
        await self._fresh.__aenter__()
        await super().__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._fresh.__aexit__(*exc_info)
        await super().__aexit__(*exc_info)

    async def send(self, request: Any) -> Any:
        """Send a request; a GET or HEAD again over a new connection if an idle one stays silent.

        Raises LedAwayError.
        """
        answer = await self._send(request)
        if request.method == "HEAD" and answer.status_code in _REDIRECTS and _REGION not in answer.headers:
            raise LedAwayError(answer.status_code, "the server redirects")
        return answer

    async def _send(self, request: Any) -> Any:
        if request.method not in ("GET", "HEAD"):
            return await super().send(request)
        send = super().send
        return await self._distrust.ask(lambda: send(request), lambda: self._fresh.send(request))


class _Staying:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def request(self, *args: Any, **options: Any) -> aiohttp.ClientResponse:
        answer = await self._session.request(*args, **options, allow_redirects=False)
        if sum(len(name) + len(value) for name, value in answer._raw_headers) > MAX_HEAD_BYTES:
            answer.close()
            raise HeadError
        # aiobotocore takes them for UTF-8. As Latin-1, each character is a byte, as in the transport workers' answers.
        answer._raw_headers = tuple(
            (name.decode("latin-1").encode(), value.decode("latin-1").encode()) for name, value in answer._raw_headers
        )
        return answer
