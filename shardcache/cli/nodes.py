"""The daemons of several nodes, read over their TCP ports."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from shardcache.cli.admin_client import error_of, shown
from shardcache.cli.display.rates import Page, Rates, rates_between
from shardcache.errors import ConfigError, NoDaemonError, NotAllowedError, ProtocolError, ShardcacheError

_PORT = 9300
_ANSWER_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class DaemonNode:
    """One node.

    Attributes:
        name: the node as the user named it.
        url: address of its TCP port.
    """

    name: str
    url: str

    @classmethod
    def parse(cls, text: str) -> DaemonNode:
        """Parse `HOST`, `HOST:PORT` or `https://HOST:PORT`. Raises ConfigError."""
        parts = urlsplit(text if "://" in text else f"http://{text}")
        try:
            port = parts.port or (443 if parts.scheme == "https" else _PORT)
        except ValueError:
            port = 0
        if not (parts.hostname and port and parts.scheme in ("http", "https")) or parts.path.strip("/"):
            raise ConfigError(f"{text!r} is not a node", remedy="write HOST, HOST:PORT or https://HOST:PORT")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        return cls(text, f"{parts.scheme}://{host}:{port}")


@dataclass(slots=True, eq=False)
class NodeState:
    """The latest answer of one node.

    Attributes:
        page: its status page; None before the first answer.
        rates: the rates since the page before; None without one.
        error: the reason that it does not answer; None while it does.
    """

    node: DaemonNode
    page: Page | None = None
    rates: Rates | None = None
    error: ShardcacheError | None = None
    _asked: asyncio.Event = field(default_factory=asyncio.Event)
    _settled: asyncio.Event = field(default_factory=asyncio.Event)

    def answered(self, page: Page) -> None:
        """Note a status page."""
        former = None if self.error else self.page
        self.page, self.rates, self.error = page, rates_between(former, page), None
        self._asked.set()
        if self.rates:
            self._settled.set()

    def failed(self, error: ShardcacheError) -> None:
        """Note that the node does not answer."""
        self.rates, self.error = None, error
        self._asked.set()
        self._settled.set()

    async def known(self, *, with_rates: bool) -> None:
        """Wait until the node has answered, or it is known that it does not."""
        await (self._settled if with_rates else self._asked).wait()

    @property
    def is_up(self) -> bool:
        """True if the node answered the last request."""
        return self.page is not None and self.error is None

    def to_json(self) -> dict[str, Any]:
        """Return the node's part of a JSON line."""
        if self.error is not None:
            return {"node": self.node.name, "error": self.error.to_json()}
        return {"node": self.node.name, "status": self.page, "rates": self.rates and self.rates.to_json()}


class Nodes:
    """Asks each node for its status, again and again: one that hangs delays no other. An async context manager.

    Attributes:
        states: the latest answers, in the order in which the nodes were given.
    """

    def __init__(self, nodes: Sequence[DaemonNode], token: str | None, interval_s: float) -> None:
        self.states = [NodeState(node) for node in nodes]
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._interval_s = interval_s
        self._running = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._http = await self._running.enter_async_context(aiohttp.ClientSession(headers=self._headers))
        tasks = await self._running.enter_async_context(asyncio.TaskGroup())
        for state in self.states:
            self._running.callback(tasks.create_task(self._follow(state)).cancel)
        return self

    async def __aexit__(self, *exc: Any) -> bool | None:
        return await self._running.__aexit__(*exc)

    async def known(self, *, with_rates: bool) -> None:
        """Wait until each node has answered, or is known not to; `with_rates`: twice, an interval apart."""
        await asyncio.gather(*(state.known(with_rates=with_rates) for state in self.states))

    async def _follow(self, state: NodeState) -> None:
        while True:
            try:
                async with asyncio.timeout(_ANSWER_LIMIT_S):
                    state.answered(await self._status(state.node))
            except TimeoutError:
                state.failed(NoDaemonError(f"no answer within {_ANSWER_LIMIT_S:g} s", url=state.node.url))
            except ShardcacheError as exn:
                state.failed(exn)
            await asyncio.sleep(self._interval_s)

    async def _status(self, node: DaemonNode) -> Page:
        try:
            # A redirect would send the token elsewhere.
            async with self._http.get(f"{node.url}/v1/status", allow_redirects=False) as answer:
                if answer.status != 200:
                    raise _refusal(node, error_of(answer.status, answer.reason or "", await answer.read()))
                page = shown(await answer.json())
        except aiohttp.ClientConnectorError as exn:
            number = exn.os_error.errno or 0  # negative for a name that is not known
            reason = os.strerror(number) if number > 0 else exn.os_error.strerror
            raise NoDaemonError(f"no daemon answers: {reason}", url=node.url) from exn
        except (aiohttp.ContentTypeError, ValueError) as exn:
            raise ProtocolError("the server at this port is not a shardcache daemon", url=node.url) from exn
        except (aiohttp.ClientError, ConnectionError) as exn:
            raise NoDaemonError(f"the connection broke: {exn or type(exn).__name__}", url=node.url) from exn
        if not isinstance(page, dict) or not {"cache", "counters", "jobs"} <= page.keys():
            raise ProtocolError("the server at this port is not a shardcache daemon", url=node.url)
        return page


def _refusal(node: DaemonNode, error: Exception) -> Exception:
    if isinstance(error, NotAllowedError):
        return NotAllowedError(error.message, url=node.url, remedy="give the daemons' token with --http-token-file")
    return error


def read_token(file: Path | None) -> str | None:
    """Return the token in a file; None without a file. Raises ConfigError if it cannot be read."""
    if file is None:
        return None
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as exn:
        raise ConfigError(f"cannot read the token file: {exn}", remedy="correct --http-token-file") from None
