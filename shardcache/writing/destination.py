"""The folder or prefix that a dataset is written to: its objects, its index, and the place for unfinished shards."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from shardcache import shardlist
from shardcache.access.protocols import LOCAL, WEB
from shardcache.access.urls import SHARD_SUFFIXES, checked, protocol_of
from shardcache.config import OriginTable
from shardcache.errors import AccessDeniedError, ConfigError, NotFoundError, OriginUnavailableError
from shardcache.fetch.retry import BACKOFF
from shardcache.origin.base import WRITABLE, RemoteObject
from shardcache.origin.buffers import read_object
from shardcache.origin.registry import Origins
from shardcache.protocol import ShardRef, from_here, local_path
from shardcache.transport.flow import Free, nothing
from shardcache.writing.shard_file import unwritable

INDEX = "index.json"
"""Name of the index in the destination."""

_ATTEMPTS = 4
_CONNECTIONS = 8


class Destination:
    """A folder or prefix of an object store; an asynchronous context manager.

    Every object appears under its name whole or not at all.

    Args:
        url: the folder: a path or a url, relative paths included.
        tables: `[[origin]]` tables for its access.

    Raises:
        ConfigError: the url is malformed, or cannot be written to.
    """

    def __init__(self, url: str, tables: Sequence[OriginTable]) -> None:
        self.url = from_here(url).rstrip("/") + "/"
        self._tables = tables
        self._is_local = protocol_of(self.url) in LOCAL
        checked(self.url)
        if protocol_of(self.url) in WEB:
            raise ConfigError("web servers can only be read", url=self.url, remedy=WRITABLE)

    async def __aenter__(self) -> Self:
        self._origins = Origins(self._tables, max_connections=_CONNECTIONS)
        self._folder = None if self._is_local else tempfile.TemporaryDirectory(prefix="shardcache-write-")
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._origins.close()
        if self._folder is not None:
            self._folder.cleanup()

    def draft(self, name: str) -> Path:
        """Return the local path where an object is made before it is stored: next to it, if the destination is local.

        Raises DiskError if the folder cannot be made.
        """
        if self._folder is not None:
            return Path(self._folder.name) / name
        folder = Path(local_path(self.url) or self.url)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as exn:
            raise unwritable(exn, folder) from exn
        return folder / f".{name}.part"

    async def objects(self) -> dict[str, RemoteObject]:
        """Return the objects in the destination, by name, those in folders below it excluded."""
        try:
            with _for_this_user():
                found = await self._origins.origin(self.url).list_prefix(self.url, nothing)
        except NotFoundError:
            if not self._is_local:
                raise
            return {}  # the folder will be made
        names = {obj.url.removeprefix(self.url): obj for obj in found}
        return {name: obj for name, obj in names.items() if "/" not in name}

    async def read(self, name: str) -> bytes:
        """Return the bytes of a small object. Raises the origin's errors."""
        origin = self._origins.origin(self.url)
        return await read_object(origin, await origin.stat(self.url + name), Free())

    async def store(self, draft: Path, name: str) -> RemoteObject:
        """Store a file under its name, and remove it; return the object.

        Raises AccessDeniedError, ConfigError; OriginUnavailableError after several attempts.
        """
        url = self.url + name
        try:
            with _for_this_user():
                return await self._upload(draft, url)
        finally:
            _remove(draft)

    async def _upload(self, draft: Path, url: str) -> RemoteObject:
        for failures in range(1, _ATTEMPTS):
            try:
                return await self._origins.uploads(url).upload(draft, url)
            except OriginUnavailableError:
                pass
            await asyncio.sleep(BACKOFF.pause_s(failures, random.random()))
        return await self._origins.uploads(url).upload(draft, url)

    async def store_bytes(self, data: bytes, name: str) -> RemoteObject:
        """Store bytes under a name. Raises as `store`."""
        draft = self.draft(name)
        try:
            draft.write_bytes(data)
        except OSError as exn:
            raise unwritable(exn, draft) from exn
        return await self.store(draft, name)

    async def store_index(self, shards: Iterable[tuple[RemoteObject, int, int | None]]) -> None:
        """Store the index of the shards, each with its number of samples, and of tokens if counted, in their order.

        Names are relative. Versions are left out for local files, whose version changes when they are copied elsewhere.
        """
        rows = [
            ShardRef(obj.url, None if self._is_local else obj.version, obj.size_bytes, samples, tokens)
            for obj, samples, tokens in shards
        ]
        await self.store_bytes(shardlist.write(rows, self.url).encode(), INDEX)


@contextmanager
def _for_this_user() -> Iterator[None]:
    """Give errors a remedy for the user who writes, with credentials of their own."""
    try:
        yield
    except AccessDeniedError as exn:
        remedy = "log in, or name a profile that may write there: AWS_PROFILE, or an [[origin]] table of --config"
        raise AccessDeniedError(exn.message, url=exn.url, remedy=remedy) from exn


def _remove(draft: Path) -> None:
    draft.unlink(missing_ok=True)


def check_empty(objects: Iterable[str], url: str) -> None:
    """Raise ConfigError if a new dataset would mix with shards that are there already."""
    taken = [name for name in objects if name == INDEX or name.endswith(SHARD_SUFFIXES)]
    if taken:
        raise ConfigError(
            f"the destination already holds other shards or their index, such as {min(taken)}",
            url=url,
            remedy="choose an empty folder or prefix, or delete what is there",
        )
