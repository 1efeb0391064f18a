"""The folder or prefix of an object store that a dataset is written to.

`ShardWriter` and the processes of `shardcache write` store shards through a `Destination`. A draft
is the local file of an object before it is stored. The table of samples lists each sample with its
place in its shard. It is written in parts: the rows of a shard lie in a scratch folder until all
shards are stored.
"""

import asyncio
import random
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from shardcache.access.deceptive import checked
from shardcache.access.protocols import LOCAL, WEB
from shardcache.access.urls import protocol_of, without_protocol
from shardcache.config.origin_table import OriginTable
from shardcache.fetch.retry import BACKOFF
from shardcache.origin.base import WRITABLE_REMEDY
from shardcache.origin.objects import RemoteObject
from shardcache.origin.registry import Origins
from shardcache.origin.whole_object import read_object
from shardcache.shared import exceptions
from shardcache.shared.lists import shardlist
from shardcache.shared.protocol import ShardRef
from shardcache.shared.tarindex.contents import SUFFIX
from shardcache.shared.urls.local_urls import absolute_url
from shardcache.shared.urls.url_names import beside_index, is_tar
from shardcache.transport.between.flow import Flow, nothing
from shardcache.writing.journal import ShardRecord
from shardcache.writing.sample_tar import END
from shardcache.writing.shard_file import ShardFile, disk_errors

INDEX = "index.json"
"""Name of the index in the destination."""

TABLE = beside_index(INDEX, SUFFIX)
"""Name of the table of samples in the destination, which `select()` reads."""

_ATTEMPTS = 4  # maximum number of attempts of an upload
_CONNECTIONS = 8  # maximum number of connections to the object store


class Destination:
    """A folder or prefix of an object store; an asynchronous context manager.

    Every object appears under its name whole or not at all.

    Attributes:
        url: url of the prefix, or path of the local folder, with a slash at its end.
    """

    def __init__(
        self,
        url: str,
        origin_tables: Sequence[OriginTable],
        scratch: Path | None = None,
    ) -> None:
        """Check the url; `async with` opens the destination.

        Args:
            url: url of the folder or prefix.
            origin_tables: access settings of object stores, from `[[origin]]` tables.
            scratch: a local folder for parts of the table of samples. Several processes that write
                one dataset share it. None for a temporary folder that only this object uses.

        Raises ConfigError for a url that is empty or malformed, or cannot be written to.
        """
        # An empty url would become "/", the root of the file system.
        if not url:
            raise exceptions.ConfigError(
                "the destination is empty",
                remedy="name a folder, or the url of a prefix in an object store",
            )
        self._origin_tables = origin_tables
        self._scratch = scratch
        folder_url = absolute_url(url).rstrip("/") + "/"
        checked(folder_url)  # raises ConfigError for `..` and other deceptive urls
        protocol = protocol_of(folder_url)
        if protocol in WEB:
            message = "web servers can only be read"
            raise exceptions.ConfigError(message, url=folder_url, remedy=WRITABLE_REMEDY)
        self._is_local = protocol in LOCAL
        # A local folder is named by its path, without `file://`.
        self.url = without_protocol(folder_url) if self._is_local else folder_url

    async def __aenter__(self) -> Self:
        self._origins = Origins(self._origin_tables, max_connections=_CONNECTIONS)
        self._own_scratch = tempfile.TemporaryDirectory(prefix="shardcache-write-")
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._origins.close()
        self._own_scratch.cleanup()

    def draft(self, name: str) -> Path:
        """Return the local path for the draft of an object.

        The draft for a local destination is in the destination itself, so that it can be renamed.
        Raises DiskError.
        """
        if not self._is_local:
            return Path(self._own_scratch.name) / name
        folder = Path(self.url)
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder / f".{name}.part"

    async def objects(self) -> dict[str, RemoteObject]:
        """Return the objects in the destination, by name, without those in folders below it."""
        try:
            with _explaining_denied_access():
                origin = self._origins.origin(self.url)
                objects = await origin.list_prefix(self.url, received=nothing)
        except exceptions.NotFoundError:
            if not self._is_local:
                raise
            return {}  # the local folder does not exist yet
        by_name = {obj.url.removeprefix(self.url): obj for obj in objects}
        return {name: obj for name, obj in by_name.items() if "/" not in name}

    async def version(self, name: str) -> str:
        """Return the version of an object; "" if it does not exist. Raises the origin's errors."""
        with suppress(exceptions.NotFoundError), _explaining_denied_access():
            obj = await self._origins.origin(self.url).stat(self.url + name)
            return obj.version
        return ""

    async def read(self, name: str) -> bytes:
        """Return the bytes of a small object. Raises the origin's errors."""
        origin = self._origins.origin(self.url)
        obj = await origin.stat(self.url + name)
        return await read_object(origin, obj, Flow())

    async def store_shard(
        self,
        shard: ShardFile,
        name: str,
        number: int,
        kept_record: ShardRecord | None = None,
    ) -> ShardRecord:
        """Store a finished shard, write its part of the table of samples, and remove its draft.

        Raises the errors of `Origin.upload`, temporary ones only after several attempts.

        Args:
            shard: the finished shard.
            name: name of the shard.
            number: number of the shard in the index.
            kept_record: the record of a shard that the destination has already. Such a shard is not
                stored again; only its part of the table is written.
        """
        stored = kept_record or await self.store_file(shard.path, name)
        # A local file's version changes when the file is copied elsewhere, so it is left out.
        version_in_table = None if self._is_local else stored.version
        shard.write_rows(self._rows_path(name), number, version_in_table)
        return ShardRecord(
            size_bytes=stored.size_bytes,
            version=stored.version,
            samples=shard.samples,
            tokens=shard.tokens,
            members=shard.members,
        )

    async def store_table(self, names: Iterable[str]) -> RemoteObject:
        """Join the parts of the table of samples that belong to these shards, and store the table.

        Raises as `store_shard`.
        """
        draft = self.draft(TABLE)
        with disk_errors(draft), draft.open("wb") as table:
            for name in names:
                table.write(self._rows_path(name).read_bytes())
            table.write(END)
        return await self.store_file(draft, TABLE)

    async def store_bytes(self, data: bytes, name: str) -> None:
        """Store bytes under a name. Raises as `store_shard`."""
        draft = self.draft(name)
        with disk_errors(draft):
            draft.write_bytes(data)
        await self.store_file(draft, name)

    async def store_index(self, shards: Iterable[tuple[str, ShardRecord]]) -> None:
        """Store the index of the shards, in their order, with relative names."""
        refs = []
        for name, record in shards:
            # The version is left out for local files, as in the table of samples.
            version = None if self._is_local else record.version
            url = self.url + name
            refs.append(ShardRef(url, version, record.size_bytes, record.samples, record.tokens))
        index = shardlist.write(refs, self.url)
        await self.store_bytes(index.encode(), INDEX)

    async def store_file(self, draft: Path, name: str, replaced: str | None = None) -> RemoteObject:
        """Store a local file as an object, and remove the file. Raises as `store_shard`.

        Args:
            draft: path of the file.
            name: name of the object.
            replaced: the version that may be replaced, as for `Origin.upload`; None for no check.
        """
        try:
            with _explaining_denied_access():
                return await self._upload(draft, self.url + name, replaced)
        finally:
            draft.unlink(missing_ok=True)  # noqa: ASYNC240  # a single system call

    def _rows_path(self, name: str) -> Path:
        """Return the path of a shard's part of the table of samples."""
        folder = self._scratch or Path(self._own_scratch.name)
        return folder / f"{name}.rows"

    async def _upload(self, draft: Path, url: str, replaced: str | None) -> RemoteObject:
        """Upload a file; try again up to `_ATTEMPTS` times while the origin is unavailable."""
        failures = 0
        while True:
            try:
                return await self._origins.origin(url).upload(draft, url, replaced)
            except exceptions.ShardChangedError as exn:
                raise exceptions.ShardChangedError(
                    "another process has changed it since this command began",
                    url=url,
                    remedy="run the command again",
                ) from exn
            except exceptions.OriginUnavailableError:
                failures += 1
                if failures == _ATTEMPTS:
                    raise
            await asyncio.sleep(BACKOFF.pause_s(failures, random.random()))


def check_has_no_shards(names: Iterable[str], url: str) -> None:
    """Raise ConfigError if any of these objects is a shard or an index, by its name.

    Args:
        names: names of objects in the destination.
        url: url of the destination, for the error.
    """
    conflicting = [name for name in names if name == INDEX or is_tar(name)]
    if conflicting:
        raise exceptions.ConfigError(
            "the destination already holds other shards or their index, such as "
            f"{min(conflicting)}",
            url=url,
            remedy="choose an empty folder or prefix, or delete what is there",
        )


@contextmanager
def _explaining_denied_access() -> Iterator[None]:
    """Give AccessDeniedError a remedy for the user who runs this command."""
    try:
        yield
    except exceptions.AccessDeniedError as exn:
        raise exceptions.AccessDeniedError(
            exn.message,
            url=exn.url,
            remedy="log in, or name a profile that may write there: AWS_PROFILE, "
            "or an [[origin]] table of --config",
        ) from exn
