"""A proxy before a real S3 server, which spoils answers as it is told to."""

import asyncio
from collections.abc import Mapping
from http.client import HTTPConnection
from urllib.parse import urlsplit

from support.network.http_requests import Request, answered
from support.programs.guard import GUARD_S
from support.stores.mischief import Answer, Ending
from support.stores.spoiling_server import HOP, ThreadedServer, end_by


class FaultyProxy(ThreadedServer):
    """Passes requests on to a server, bodies included; a context manager.

    Signatures stay right: the client signs the proxy's own address, and that is the Host which the
    server sees.

    Attributes:
        swallowed: number of requests that came over forgotten connections.
    """

    def __init__(self, upstream_url: str) -> None:
        super().__init__()
        self._upstream = urlsplit(upstream_url).netloc
        self.swallowed = 0
        self._forgotten: set[asyncio.StreamWriter] = set()

    def env(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the variables by which an AWS SDK finds the server, with the proxy in between."""
        return {**env, "AWS_ENDPOINT_URL": self.endpoint_url}

    def forget(self) -> int:
        """Swallow what comes over the present connections; return how many there are."""

        async def swallow() -> int:
            self._forgotten |= self._clients.keys()
            return len(self._clients)

        return asyncio.run_coroutine_threadsafe(swallow(), self._loop).result()

    async def _answer(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        if writer not in self._forgotten:
            return await super()._answer(request, reader, writer)
        self.swallowed += 1
        return await end_by(Ending.HANG, reader, writer)

    async def ask(self, request: Request) -> Answer:
        return await asyncio.to_thread(self._pass_on, request)

    def _pass_on(self, request: Request) -> Answer:
        connection = HTTPConnection(self._upstream, timeout=GUARD_S)
        answer = answered(connection, request.target, request.headers, request.method, request.body)
        headers = {
            name.lower(): value for name, value in answer.headers.items() if name.lower() not in HOP
        }
        if request.method != "HEAD":
            headers["content-length"] = str(len(answer.body))
        return Answer(answer.status, headers, answer.body)
