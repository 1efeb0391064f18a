"""Origins that are fsspec filesystems.

This is the origin for every protocol without an origin of its own, and the base of the origins for
local files and for cloud stores. An info is fsspec's description of a file: a dict whose fields
differ between filesystems.
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
from fsspec.registry import known_implementations, registry

from shardcache.access.protocols import COMMON, STORES
from shardcache.access.urls import protocol_of
from shardcache.origin.base import WRITABLE_REMEDY, Origin, Setup, commit_parts
from shardcache.origin.filesystems.fsspec_errors import (
    folder_error,
    foreign_errors,
    special_file_error,
    translate_fsspec_errors,
)
from shardcache.origin.http.http_semantics import size_of
from shardcache.origin.objects import RemoteObject
from shardcache.shared.exceptions import ConfigError, OriginUnavailableError, ShardChangedError
from shardcache.shared.wording.remedies import did_you_mean
from shardcache.transport.between.flow import Commit, Flow, Received
from shardcache.transport.between.parts import Parts, PartSums

# Fields of an info that identify the content, the most specific first. If an info has none of them,
# the size and a date make up the version.
_IDENTITIES = ("ETag", "etag", "e_tag", "sha", "checksum")
_DATES = (
    "mtime",
    "last_modified",
    "LastModified",
    "updated",
    "modified",
    "modify",
    "modificationTime",
    "created",
)
# Similarity from which an unknown protocol may be a misspelling of a known one. It is low because
# the names of protocols are short.
_MIN_SIMILARITY = 0.5


def check_protocol(url: str) -> None:
    """Raise ConfigError if a url or prefix is of a protocol without a filesystem."""
    protocol = protocol_of(url)
    if protocol not in known_implementations and protocol not in registry:
        raise _unknown_protocol(protocol)


def _unknown_protocol(protocol: str) -> ConfigError:
    """Return the error for a protocol without a filesystem, with a known one that is similar."""
    known = sorted({*COMMON, *known_implementations})
    suggestion = did_you_mean(protocol, known, cutoff=_MIN_SIMILARITY)
    examples = ", ".join(f"{name}://" for name in COMMON)
    return ConfigError(
        f"there is no filesystem for {protocol}:// urls{suggestion}",
        remedy=f"write one of {examples}, or another of fsspec's",
    )


class FsspecOrigin(Origin):
    """One fsspec filesystem.

    An asynchronous filesystem runs on the daemon's event loop, any other in threads of this origin.
    fsspec cannot read on the condition that an object has a certain version. So `is_guarded` is
    False for its objects: the caller checks the version again after the last read. A read in a
    thread can be neither cancelled nor paused: if the caller gives it up, the thread is occupied
    until the read returns.
    """

    def __init__(self, setup: Setup) -> None:
        """Open the filesystem. Raises ImportError, ConfigError."""
        check_protocol(f"{setup.protocol}://")
        self._setup = setup
        # True if a file appears only when all of it is written, as in object stores. In other
        # filesystems, a file grows as it is written.
        self._writes_atomically = setup.protocol in STORES
        self._fs = self._open()
        self._pool = ThreadPoolExecutor(
            setup.max_connections,
            thread_name_prefix=f"{setup.protocol}-read",
        )

    async def stat(self, url: str, _first_bytes: int = 0) -> RemoteObject:
        """As `Origin.stat`, without requesting the first bytes at the same time."""
        await self._check_readable(url)
        with translate_fsspec_errors(url):
            self._fs.invalidate_cache()
            info = await self._call("info", self._path(url))
            if info["type"] == "other":
                raise special_file_error(url)
            if info["type"] == "directory":
                raise folder_error(url)
            return self._remote_object(url, info)

    async def fetch(
        self,
        obj: RemoteObject,
        parts: Parts,
        flow: Flow,
        commit: Commit | None = None,
    ) -> list[PartSums] | None:
        """As `Origin.fetch`, but without a version check: see `RemoteObject.is_guarded`."""
        await self._check_readable(obj.url)
        with translate_fsspec_errors(obj.url):
            path = self._path(obj.url)
            await flow.ready()  # waits while the read has to pause
            # An object without ranges is read as a whole: see `_remote_object`.
            options = {"start": parts.start, "end": parts.stop} if obj.has_ranges else {}
            data: bytes = await self._call("cat_file", path, **options)
        _check_length(len(data), parts.size_bytes, obj)
        flow.received(len(data))
        return await commit_parts(parts, data, commit)

    async def list_prefix(
        self,
        prefix: str,
        received: Received,
        *,
        flat: bool = False,
    ) -> list[RemoteObject]:
        """As `Origin.list_prefix`.

        fsspec lists folders, not prefixes, so the whole folder of the prefix is listed.

        Args:
            prefix: the prefix.
            received: called with the number of files listed.
            flat: True for the files and folders directly below the folder, instead of all files.
        """
        folder = prefix[: prefix.rindex("/") + 1]
        root = self._path(folder).rstrip("/") + "/"  # the filesystem's path of the folder
        await self._check_readable(folder)
        with translate_fsspec_errors(prefix):
            self._fs.invalidate_cache()
            infos = await self._infos(root, received, flat=flat)
            objects: list[RemoteObject] = []
            for path, info in infos.items():
                if f"{path}/" == root:  # the folder itself
                    continue
                url = folder + path.removeprefix(root)
                objects.append(self._listed_object(url, info, flat=flat))
        matching = [obj for obj in objects if obj.url.startswith(prefix)]
        return sorted(matching, key=lambda obj: obj.url)

    async def upload(self, path: Path, url: str, replaced: str | None = None) -> RemoteObject:
        """As `Origin.upload`, without a check of the version that is replaced.

        In a filesystem where files grow as they are written, the file has another name until it is
        complete.
        """
        target = self._path(url)
        try:
            with translate_fsspec_errors(url):
                if self._writes_atomically:
                    await self._call("put_file", str(path), target)
                else:
                    await self._upload_and_rename(path, target)
        except NotImplementedError:
            message = "this kind of url can only be read"
            raise ConfigError(message, url=url, remedy=WRITABLE_REMEDY) from None
        return await self.stat(url)

    async def close(self) -> None:
        """Stop the threads.

        fsspec filesystems close their connections when they are garbage-collected.
        """
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _open(self) -> Any:
        """Return a new filesystem. Raises ImportError, ConfigError."""
        try:
            return self._connect(self._filesystem_class())
        except ImportError as exn:
            # Only the cause of fsspec's error has the package's name as an attribute.
            if isinstance(exn.__cause__, ImportError):
                raise exn.__cause__ from None
            raise
        except foreign_errors(TypeError) as exn:  # TypeError: it has no such option
            raise ConfigError(
                f"{self._setup.protocol}:// cannot be opened with its endpoint_url or "
                f"storage_options: {exn}",
                remedy="correct the [[origin]] table in the daemon's config",
            ) from exn

    def _filesystem_class(self) -> type[fsspec.AbstractFileSystem]:
        """Return the class of the filesystem. Raises ImportError."""
        cls: type[fsspec.AbstractFileSystem] = fsspec.get_filesystem_class(self._setup.protocol)
        return cls

    def _connect(self, cls: type[fsspec.AbstractFileSystem]) -> Any:
        """Return a new filesystem of a class, with the options of the table."""
        options: dict[str, Any] = {}
        if cls.async_impl:
            options["asynchronous"] = True
        options |= self._setup.table.storage_options
        return cls(**options, skip_instance_cache=True)

    async def _check_readable(self, url: str) -> None:
        """Raise the error for a url that must not be read.

        Here every url may be read. A subclass may refuse some urls, such as local paths with links
        that lead out of the permitted folders.
        """

    def _path(self, url: str) -> str:
        """Return the filesystem's path for a url."""
        return str(self._fs._strip_protocol(url))  # noqa: SLF001  # every fsspec filesystem has it

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the filesystem, and return its result.

        Args:
            name: name of the method, without the underscore of the asynchronous ones.
        """
        if self._fs.async_impl:
            method = getattr(self._fs, f"_{name}")
            return await method(*args, **kwargs)
        call = partial(getattr(self._fs, name), *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    async def _infos(self, root: str, received: Received, *, flat: bool) -> dict[str, Any]:
        """Return the info of each file below a folder, by path.

        Args:
            root: the filesystem's path of the folder.
            flat: True for the files and folders directly below it, instead of all files.
        """
        if flat:
            infos = await self._call("ls", root, detail=True)
            by_path = {info["name"].rstrip("/"): info for info in infos}
        else:
            by_path = dict(await self._call("find", root, detail=True))
        received(len(by_path))
        return by_path

    def _listed_object(self, url: str, info: Mapping[str, Any], *, flat: bool) -> RemoteObject:
        """Return an object of a listing. Raises the error for a folder, unless `flat`.

        Args:
            flat: True if folders are listed as well.
        """
        if info["type"] != "directory":
            return self._remote_object(url, info)
        if flat:
            # A folder has neither a version nor a size: see `Origin.list_prefix`.
            return RemoteObject(f"{url.rstrip('/')}/", version="", size_bytes=0)
        raise folder_error(url)

    def _remote_object(self, url: str, info: Mapping[str, Any]) -> RemoteObject:
        """Return the object that the filesystem describes."""
        version = self._version(info, url)
        size_bytes = size_of(info.get("size"), url)
        # If only the size tells versions apart, reads of two parts may be of two versions. Such a
        # file is read as a whole. `_version` returns the bare size if it finds nothing else.
        is_only_size = version == str(size_bytes)
        return RemoteObject(url, version, size_bytes, has_ranges=not is_only_size, is_guarded=False)

    def _version(self, info: Mapping[str, Any], _url: str) -> str:
        """Return an object's version: a field that identifies it, else its size, date and inode.

        A date or inode that is not known is left out. The url is for subclasses, which raise errors
        about it.
        """
        for name in _IDENTITIES:
            if info.get(name):
                return str(info[name]).strip('"')

        fields = [str(info["size"])]
        date = _date_in(info)
        if date:
            fields.append(date)
        if "ino" in info:
            fields.append(str(info["ino"]))
        return "-".join(fields)

    async def _upload_and_rename(self, path: Path, target: str) -> None:
        """Upload a file under a hidden name in the target's folder, then rename it."""
        folder, _, name = target.rpartition("/")
        draft = f"{folder}/.{name}.part"
        await self._call("makedirs", folder, exist_ok=True)
        await self._call("put_file", str(path), draft)
        # Asynchronous filesystems have no asynchronous `mv`.
        method = "mv_file" if self._fs.async_impl else "mv"
        await self._call(method, draft, target)


def _date_in(info: Mapping[str, Any]) -> str:
    """Return the date of a file's last change, in the form of its filesystem; "" if unknown."""
    for name in _DATES:
        date = info.get(name)
        if isinstance(date, datetime):
            return str(date.timestamp())
        if date:
            return str(date)
    return ""


def _check_length(received_bytes: int, wanted_bytes: int, obj: RemoteObject) -> None:
    """Raise the error for a read that returned more or fewer bytes than wanted."""
    if received_bytes == wanted_bytes:
        return
    # A file that is read as a whole has changed if its size has. A short read of a range may
    # succeed at the next attempt.
    if not obj.has_ranges:
        raise ShardChangedError(
            f"the file has {received_bytes} bytes, not {wanted_bytes}",
            url=obj.url,
        )
    raise OriginUnavailableError(
        f"a read of {wanted_bytes} bytes returned {received_bytes}",
        url=obj.url,
    )
