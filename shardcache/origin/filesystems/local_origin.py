"""Local files.

A link is a symbolic link. The redirect guard is the daemon's rules for urls: the daemon may be able
to read files that its users must not read, so a link must not lead to a forbidden place.
"""

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from shardcache.access.urls import without_protocol
from shardcache.origin.base import Setup
from shardcache.origin.filesystems.fsspec_errors import missing_error, translate_fsspec_errors
from shardcache.origin.filesystems.fsspec_origin import FsspecOrigin
from shardcache.origin.objects import RemoteObject


class LocalOrigin(FsspecOrigin):
    """Local files.

    Every method raises NotAllowedError for a path with links that lead to a place that the redirect
    guard forbids. Links are resolved here, and again when the file is opened. In between, only
    users who can write to an allowed folder can replace a link.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._redirect_guard = setup.redirect_guard

    async def upload(self, path: Path, url: str, replaced: str | None = None) -> RemoteObject:
        """As `Origin.upload`.

        The file is moved if it is on the same filesystem, and copied otherwise. It survives a loss
        of power.
        """
        with translate_fsspec_errors(url):
            await asyncio.to_thread(_publish, path, Path(self._path(url)))
        return await self.stat(url)

    def _connect(self, cls: type[fsspec.AbstractFileSystem]) -> Any:
        """As `FsspecOrigin._connect`, but with a class that follows links in listings."""
        return super()._connect(_LocalFiles)

    async def _check_readable(self, url: str) -> None:
        """Raise NotAllowedError for forbidden links, and NotFoundError for a missing folder.

        A url of a folder, which ends in "/", is a prefix to list.
        """
        path = without_protocol(url)
        names_folder = path.endswith("/")
        real = await asyncio.to_thread(os.path.realpath, path)
        has_links = real != path.rstrip("/")
        if self._redirect_guard is not None and has_links:
            target = f"file://{real}"
            if names_folder:
                target += "/"
            self._redirect_guard.check_hop(url, target)
        # fsspec would list a missing folder as an empty one.
        if names_folder and not await asyncio.to_thread(os.path.isdir, real):
            raise missing_error("folder", url)


class _LocalFiles(LocalFileSystem):  # type: ignore[misc]
    """Local files, where a link is listed as the file that it leads to."""

    def info(self, path: Any, **options: Any) -> Any:
        """Describe a file. In a listing, too, a link is described as the file that it leads to."""
        if isinstance(path, os.DirEntry) and path.is_symlink() and path.is_file():
            path = path.path
        return super().info(path, **options)


def _publish(path: Path, target: Path) -> None:
    """Move or copy a file to its place, and sync the file and its folder to the disk. Blocks."""
    target.parent.mkdir(parents=True, exist_ok=True)
    is_on_other_filesystem = path.stat().st_dev != target.parent.stat().st_dev
    if is_on_other_filesystem:
        # A copy grows as it is written, so it has another name until it is complete.
        draft = target.with_name(f".{target.name}.part")
        shutil.copyfile(path, draft)
        path = draft
    with path.open("rb") as file:
        os.fsync(file.fileno())
    path.replace(target)

    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
