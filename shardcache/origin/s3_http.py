"""The SDK's connections, without redirects of HTTP's own, and with distrust of those that were idle.

aiobotocore leaves redirects to aiohttp, which would take a signed request, session token included, to wherever a server
says. botocore by itself follows none, and knows which answers mean another region of the same store.
"""

from __future__ import annotations

from typing import Any

from aiobotocore.httpsession import AIOHTTPSession

from shardcache.transport.sockets import IDLE_S, Distrust, new_socket

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_REGION = "x-amz-bucket-region"
_CONNECTOR = {"keepalive_timeout": IDLE_S, "socket_factory": new_socket}


class LedAwayError(OSError):
    """A server redirects, and says of no region that the bucket is in.

    botocore would ask for the region by a HEAD, whose answer it would treat alike, hundreds of times.
    """


class _StayingSession(AIOHTTPSession):  # type: ignore[misc]
    """aiobotocore's session, whose requests end with the first answer."""

    async def _get_session(self, proxy_url: str | None) -> _Staying:
        return _Staying(await super()._get_session(proxy_url))


class StoreSession(_StayingSession):
    """Two such sessions, of which one keeps connections for the next request; for `AioConfig(http_session_cls=…)`."""

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
        """Send a request; one that changes nothing a second time, where an idle connection keeps silent.

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
    def __init__(self, session: Any) -> None:
        self._session = session

    def request(self, *args: Any, **options: Any) -> Any:
        return self._session.request(*args, **options, allow_redirects=False)
