"""Local files, whose symbolic links are checked like redirects."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

from shardcache.origin.base import RemoteObject, Setup
from shardcache.origin.fsspec import FsspecOrigin, missing, translated
from shardcache.transport.flow import Flow, Received
from shardcache.transport.parts import Parts, PartSums
from shardcache.transport.workers import Commit


class LocalOrigin(FsspecOrigin):
    """Local files. Every method raises NotAllowedError for a path whose links lead where the redirect guard forbids.

    Links are resolved here and again when the file is opened. Only users who can write to an allowed folder can replace
    one in between; see docs/security.md.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._redirect_guard = setup.redirect_guard

    async def stat(self, url: str) -> RemoteObject:
        """As `Origin.stat`."""
        await self._check(url)
        return await super().stat(url)

    async def fetch(
        self, obj: RemoteObject, parts: Parts, flow: Flow, commit: Commit | None = None
    ) -> list[PartSums] | None:
        """As `Origin.fetch`."""
        await self._check(obj.url)
        return await super().fetch(obj, parts, flow, commit)

    async def list_prefix(self, prefix: str, received: Received) -> list[RemoteObject]:
        """As `Origin.list_prefix`."""
        folder = prefix[: prefix.rindex("/") + 1]
        await self._check(folder)
        if not await asyncio.to_thread(os.path.isdir, self._path(folder)):
            raise missing("folder", folder)
        return await super().list_prefix(prefix, received)

    async def upload(self, path: Path, url: str) -> RemoteObject:
        """As `Uploads.upload`: the file is moved if it lies on the same filesystem, and survives a loss of power."""
        with translated(url):
            await asyncio.to_thread(_publish, path, Path(self._path(url)))
        return await self.stat(url)

    async def _check(self, url: str) -> None:
        path = url.partition("://")[2] if "://" in url else url
        real = await asyncio.to_thread(os.path.realpath, path)
        if real != path.rstrip("/"):
            self._redirect_guard.check_hop(url, f"file://{real}" + "/" * path.endswith("/"))


def _publish(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.stat().st_dev != target.parent.stat().st_dev:
        path = Path(shutil.copyfile(path, target.with_name(f".{target.name}.part")))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    path.replace(target)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
