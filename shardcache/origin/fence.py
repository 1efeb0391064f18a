"""What keeps a fetch within the places that it was allowed for, wherever a server or a link leads it."""

from __future__ import annotations

import asyncio
import os
from typing import Protocol

from shardcache.origin.base import Origin, RemoteObject
from shardcache.transport.flow import Flow, Received
from shardcache.transport.parts import Parts, PartSums
from shardcache.transport.workers import Commit


class Fence(Protocol):
    """Who judges.

    Attributes:
        far_only: whether names that turn out to be near (`is_near`) are refused when they are looked up.
    """

    @property
    def far_only(self) -> bool: ...  # noqa: D102

    def check_hop(self, source: str, target: str) -> None:
        """Raise NotAllowedError or ConfigError unless whoever may fetch `source` may fetch `target`, where it leads."""


class Unfenced:
    """Lets everything lead everywhere: for one's own use of one's own rights."""

    far_only = False

    def check_hop(self, source: str, target: str) -> None:
        """Let it."""


class FencedFiles:
    """Local files, of which a symbolic link leads no further than a redirect would.

    Links are followed here and again when the file is opened. Whoever may exchange them in between may write to an
    allowed folder; see docs/security.md.
    """

    def __init__(self, origin: Origin, fence: Fence) -> None:
        self._origin = origin
        self._fence = fence

    async def stat(self, url: str) -> RemoteObject:
        """As `Origin.stat`; raises NotAllowedError as well."""
        await self._check(url)
        return await self._origin.stat(url)

    async def fetch(
        self, obj: RemoteObject, parts: Parts, flow: Flow, commit: Commit | None = None
    ) -> list[PartSums] | None:
        """As `Origin.fetch`; raises NotAllowedError as well."""
        await self._check(obj.url)
        return await self._origin.fetch(obj, parts, flow, commit)

    async def list_prefix(self, prefix: str, received: Received) -> list[RemoteObject]:
        """As `Origin.list_prefix`; raises NotAllowedError as well."""
        await self._check(prefix[: prefix.rindex("/") + 1])
        return await self._origin.list_prefix(prefix, received)

    async def close(self) -> None:
        """As `Origin.close`."""
        await self._origin.close()

    async def _check(self, url: str) -> None:
        path = url.partition("://")[2] if "://" in url else url
        real = await asyncio.to_thread(os.path.realpath, path)
        if real != path.rstrip("/"):
            self._fence.check_hop(url, f"file://{real}" + "/" * path.endswith("/"))
