"""Guard that keeps redirects and symbolic links within the places that a user may fetch from."""

from __future__ import annotations

import asyncio
import os
from typing import Protocol

from shardcache.origin.base import Origin, RemoteObject
from shardcache.transport.flow import Flow, Received
from shardcache.transport.parts import Parts, PartSums
from shardcache.transport.workers import Commit


class RedirectGuard(Protocol):
    """Policy for redirects and links.

    Attributes:
        far_only: True if names that resolve to near addresses (`is_near`) are refused.
    """

    @property
    def far_only(self) -> bool: ...  # noqa: D102

    def check_hop(self, source: str, target: str) -> None:
        """Raise NotAllowedError or ConfigError unless users who may fetch `source` may also fetch its `target`."""


class Unfenced:
    """Policy without restrictions, for a process that reads with its own user's rights."""

    far_only = False

    def check_hop(self, source: str, target: str) -> None:
        """Allow every hop."""


class FencedFiles:
    """Local files whose symbolic links are restricted like redirects.

    Links are resolved here and again when the file is opened. Only users who can write to an allowed folder can replace
    one in between; see docs/security.md.
    """

    def __init__(self, origin: Origin, redirect_guard: RedirectGuard) -> None:
        self._origin = origin
        self._redirect_guard = redirect_guard

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
            self._redirect_guard.check_hop(url, f"file://{real}" + "/" * path.endswith("/"))
