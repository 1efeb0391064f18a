"""fsspec filesystems: local files, and all others that have no module of their own."""

import asyncio
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations, registry

from shardcache import errors
from shardcache.access import COMMON, STORES, protocol_of
from shardcache.origin.base import WRITABLE, Origin, RemoteObject, Setup, commit_parts
from shardcache.origin.http_semantics import error_of, size_of
from shardcache.protocol import local_path
from shardcache.transport.parts import Parts, PartSums
from shardcache.transport.workers import Commit, Flow, Received

# Fields that identify the content, most specific first; failing those, fields that date it, combined with the size.
_IDENTITIES = ("ETag", "etag", "e_tag", "sha", "checksum")
_DATES = ("mtime", "last_modified", "LastModified", "updated", "modified", "modify", "modificationTime", "created")
# Exceptions that are not OSErrors, by the module that must be loaded for one to occur.
_FOREIGN = {
    "aiohttp": "ClientError",
    "gcsfs.retry": "HttpError",
    "google.auth.exceptions": "GoogleAuthError",
    "azure.core.exceptions": "AzureError",
    "httpx": "HTTPError",
    "httpx2": "HTTPError",
}
# Those of them that a retry does not cure.
_DENIALS = {"ClientAuthenticationError", "DefaultCredentialsError", "RefreshError"}


def check_protocol(url: str) -> None:
    """Raise ConfigError if a url or prefix is of a protocol without a filesystem."""
    protocol = protocol_of(url)
    if protocol not in known_implementations and protocol not in registry:
        raise unknown_protocol(protocol)


def unknown_protocol(protocol: str) -> errors.ConfigError:
    """Return the error for urls of a protocol without a filesystem."""
    known = sorted({*COMMON, *known_implementations})
    return errors.ConfigError(
        f"there is no filesystem for {protocol}:// urls{errors.did_you_mean(protocol, known, 0.5)}",
        remedy=f"write one of {', '.join(f'{name}://' for name in COMMON)}, or another of fsspec's",
    )


class FsspecOrigin(Origin):
    """One fsspec filesystem: on this event loop if it is asynchronous, else in threads of its own.

    fsspec has no conditional reads, so its objects are not `guarded`. A blocking read can be neither cancelled nor
    paused midway: a stalled thread is abandoned.
    """

    def __init__(self, setup: Setup) -> None:
        """Open the filesystem. Raises ImportError, ConfigError."""
        protocol = setup.protocol
        self._is_atomic = protocol in STORES
        if protocol not in known_implementations and protocol not in registry:
            raise unknown_protocol(protocol)
        self._setup = setup
        self._fs = self._open()
        self._pool = ThreadPoolExecutor(setup.max_connections, thread_name_prefix=f"{protocol}-read")

    async def stat(self, url: str, _first_bytes: int = 0) -> RemoteObject:
        """As `Origin.stat`."""
        await self._check(url)
        with translated(url):
            self._fs.invalidate_cache()
            info = await self._call("info", self._path(url))
            if info["type"] == "other":
                raise _is_special(url)
            return self._remote_object(url, info)

    async def fetch(
        self, obj: RemoteObject, parts: Parts, flow: Flow, commit: Commit | None = None
    ) -> list[PartSums] | None:
        """As `Origin.fetch`, but without a version check: see `RemoteObject.guarded`."""
        await self._check(obj.url)
        with translated(obj.url):
            path = self._path(obj.url)
            await flow.ready()
            span = {"start": parts.start, "end": parts.stop} if obj.ranges else {}
            data: bytes = await self._call("cat_file", path, **span)
        if len(data) != parts.size_bytes:
            if not obj.ranges:
                raise errors.ShardChangedError(f"the file has {len(data)} bytes, not {parts.size_bytes}", url=obj.url)
            raise errors.OriginUnavailableError(f"a read of {parts.size_bytes} bytes returned {len(data)}", url=obj.url)
        flow.received(len(data))
        return await commit_parts(parts, data, commit)

    async def list_prefix(self, prefix: str, received: Received, *, flat: bool = False) -> list[RemoteObject]:
        """As `Origin.list_prefix`."""
        folder = prefix[: prefix.rindex("/") + 1]
        root = self._path(folder).rstrip("/") + "/"
        await self._check(folder)
        with translated(prefix):
            self._fs.invalidate_cache()
            found: Any = await self._call("ls" if flat else "find", root, detail=True)
            received(len(found))
            found = {info["name"].rstrip("/"): info for info in found} if flat else found
            urls = {folder + path.removeprefix(root): info for path, info in found.items() if f"{path}/" != root}
            objects = [self._remote_object(url, info, flat=flat) for url, info in urls.items()]
        return sorted((obj for obj in objects if obj.url.startswith(prefix)), key=lambda obj: obj.url)

    async def upload(self, path: Path, url: str, replaced: str | None = None) -> RemoteObject:
        """As `Origin.upload`; where files grow as they are written, under another name until the end."""
        target = self._path(url)
        folder, _, name = target.rpartition("/")
        draft = target if self._is_atomic else f"{folder}/.{name}.part"
        try:
            with translated(url):
                if draft != target:
                    await self._call("makedirs", folder, exist_ok=True)
                await self._call("put_file", str(path), draft)
                if draft != target:
                    await self._call("mv_file" if self._fs.async_impl else "mv", draft, target)
        except NotImplementedError:
            raise errors.ConfigError("this kind of url can only be read", url=url, remedy=WRITABLE) from None
        return await self.stat(url)

    async def close(self) -> None:
        """Stop the threads; fsspec filesystems close their connections when they are garbage-collected."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _open(self) -> Any:
        """Return a new filesystem. Raises ImportError, ConfigError."""
        protocol = self._setup.protocol
        try:
            return self._connect(fsspec.get_filesystem_class(protocol))
        except ImportError as exn:  # fsspec's own is prose; its cause has the package's name
            raise exn.__cause__ if isinstance(exn.__cause__, ImportError) else exn from None
        except _foreign(TypeError) as exn:
            raise errors.ConfigError(
                f"{protocol}:// cannot be opened with its endpoint_url or storage_options: {exn}",
                remedy="correct the [[origin]] table in the daemon's config",
            ) from exn

    def _connect(self, cls: type[fsspec.AbstractFileSystem]) -> Any:
        asynchronous = {"asynchronous": True} if cls.async_impl else {}
        return cls(**(asynchronous | self._setup.table.storage_options), skip_instance_cache=True)

    async def _check(self, url: str) -> None:
        """Raise the error for a url that must not be read, by symbolic links or for want of its folder."""

    def _path(self, url: str) -> str:
        return str(self._fs._strip_protocol(url))

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self._fs.async_impl:
            return await getattr(self._fs, f"_{name}")(*args, **kwargs)
        call = partial(getattr(self._fs, name), *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def _remote_object(self, url: str, info: Mapping[str, Any], *, flat: bool = False) -> RemoteObject:
        if info["type"] == "directory":
            if flat:
                return RemoteObject(f"{url.rstrip('/')}/", "", 0)
            raise _is_folder(url)
        version, size_bytes = self._version(info, url), size_of(info.get("size"), url)
        # With nothing but the size to tell versions apart, several reads could be of several.
        return RemoteObject(url, version, size_bytes, ranges=version != str(size_bytes), guarded=False)

    def _version(self, info: Mapping[str, Any], _url: str) -> str:
        """Return the version of an object that the filesystem describes."""
        for name in _IDENTITIES:
            if info.get(name):
                return str(info[name]).strip('"')
        dated = [info[name] for name in _DATES if info.get(name)][:1]
        dates = [str(date.timestamp() if isinstance(date, datetime) else date) for date in dated]
        return "-".join([str(info["size"]), *dates, *([str(info["ino"])] if "ino" in info else [])])


class LocalOrigin(FsspecOrigin):
    """Local files. Every method raises NotAllowedError for a path whose links lead where the redirect guard forbids.

    Links are resolved here and again when the file is opened. Only users who can write to an allowed folder can replace
    one in between.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._redirect_guard = setup.redirect_guard

    async def upload(self, path: Path, url: str, replaced: str | None = None) -> RemoteObject:
        """As `Origin.upload`: the file is moved if it lies on the same filesystem, and survives a loss of power."""
        with translated(url):
            await asyncio.to_thread(_publish, path, Path(self._path(url)))
        return await self.stat(url)

    def _connect(self, cls: type[fsspec.AbstractFileSystem]) -> Any:
        return super()._connect(_LocalFiles)

    async def _check(self, url: str) -> None:
        path = url.partition("://")[2] if "://" in url else url
        real = await asyncio.to_thread(os.path.realpath, path)
        if self._redirect_guard is not None and real != path.rstrip("/"):
            self._redirect_guard.check_hop(url, f"file://{real}" + "/" * path.endswith("/"))
        if path.endswith("/") and not await asyncio.to_thread(os.path.isdir, real):
            raise _missing("folder", url)


class _LocalFiles(LocalFileSystem):  # type: ignore[misc]
    def info(self, path: Any, **options: Any) -> Any:
        """Describe the file that a link leads to, in a listing as by its path."""
        is_linked_file = isinstance(path, os.DirEntry) and path.is_symlink() and path.is_file()
        return super().info(path.path if is_linked_file else path, **options)


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


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Translate what a filesystem raises in the block."""
    try:
        yield
    except errors.ShardcacheError:  # NotFoundError is also an OSError
        raise
    except _foreign() as exn:
        raise _error(exn, url) from exn


def _foreign(*more: type[Exception]) -> tuple[type[Exception], ...]:
    loaded = [getattr(sys.modules[module], name) for module, name in _FOREIGN.items() if module in sys.modules]
    return OSError, ValueError, *loaded, *more


def _missing(kind: str, url: str) -> errors.NotFoundError:
    """Return the error for a file or folder that does not exist."""
    path = local_path(url)
    remedy = path and f"check the path (ls {shlex.quote(str(Path(path).parent))}/), on the node of the daemon"
    return errors.NotFoundError(f"the {kind} does not exist", url=url, remedy=remedy)


def _is_folder(url: str) -> errors.NotFoundError:
    return errors.NotFoundError("this is a folder", url=url, remedy="end the url with / to take every shard below it")


def _is_special(url: str) -> errors.NotFoundError:
    return errors.NotFoundError(
        "this is no regular file, but a pipe, socket or device", url=url, remedy="write its content to a file"
    )


def _error(exn: Exception, url: str) -> errors.ShardcacheError:
    reason = str(exn) or type(exn).__name__
    if isinstance(exn, (FileNotFoundError, NotADirectoryError)):
        return _missing("file", url)
    if isinstance(exn, PermissionError) or not _DENIALS.isdisjoint(cls.__name__ for cls in type(exn).__mro__):
        return errors.AccessDeniedError(
            f"the daemon may not read it: {reason}", url=url, remedy="give the daemon's user or credentials access"
        )
    if isinstance(exn, IsADirectoryError):
        return _is_folder(url)
    for source, name in product((exn, getattr(exn, "response", None)), ("status", "status_code", "code")):
        if isinstance(status := getattr(source, name, None), int):
            return error_of(status, reason, url)
    return errors.OriginUnavailableError(f"the read failed: {reason}", url=url)
