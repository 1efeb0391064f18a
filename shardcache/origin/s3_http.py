"""The SDK's connections, without redirects of HTTP's own.

aiobotocore leaves them to aiohttp, which would take a signed request, session token included, to wherever a server
says. botocore by itself follows none, and knows which answers mean another region of the same store.
"""

from __future__ import annotations

from typing import Any

from aiobotocore.httpsession import AIOHTTPSession


class StayingSession(AIOHTTPSession):  # type: ignore[misc]
    """aiobotocore's session, whose requests end with the first answer; for `AioConfig(http_session_cls=…)`."""

    async def _get_session(self, proxy_url: str | None) -> _Staying:
        return _Staying(await super()._get_session(proxy_url))


class _Staying:
    def __init__(self, session: Any) -> None:
        self._session = session

    def request(self, *args: Any, **options: Any) -> Any:
        return self._session.request(*args, **options, allow_redirects=False)
