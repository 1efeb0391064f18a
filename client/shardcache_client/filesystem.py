"""The cache as a read-only filesystem of fsspec: `shardcache::` before the url of any object that the daemon may fetch.

    with fsspec.open("shardcache::s3://bucket/table.parquet") as file: ...
    pandas.read_parquet("shardcache::s3://bucket/table.parquet")

A file is fetched whole, once per node. While it arrives, the ranges that are read are fetched first. An environment
without the package of the object store writes `shardcache://s3://bucket/table.parquet`.
"""

import errno
import os
import re
from contextlib import ExitStack, closing, suppress
from typing import Any

from fsspec.implementations.chained import ChainedFileSystem
from fsspec.spec import AbstractBufferedFile

from shardcache.errors import NotFoundError
from shardcache.protocol import ShardRef, Wanted, from_here, local_path
from shardcache_client.daemon.choice import DaemonChoice, Patience
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.session import resolve
from shardcache_client.order.manifest import Manifest
from shardcache_client.paths import CachedFile, session_of
from shardcache_client.ranks.environment import job_name

Details = dict[str, Any]

_FILE_PROTOCOL = re.compile(r"file:(?://)?(?=/)")


class ShardcacheFileSystem(ChainedFileSystem):  # type: ignore[misc]
    """Files of one object store, through the cache; paths are those of the store's own filesystem, or urls.

    `target_protocol` and `fo` are what follows `shardcache::`; other arguments are as for `open_cached`.
    """

    protocol = "shardcache"

    def __init__(
        self,
        target_protocol: str | None = None,
        fo: str | None = None,
        *,
        job: str | None = None,
        socket: str | os.PathLike[str] | None = None,
        daemon: Any = "auto",
        timeout_s: float = 300.0,
        **options: Any,
    ) -> None:
        super().__init__(target_protocol=target_protocol, fo=fo, **options)
        self._prefix = f"{target_protocol}://" if target_protocol not in (None, "file", "local") else ""
        self.choice, self.patience = DaemonChoice.of(socket, daemon), Patience(timeout_s)
        self.reader = ReaderIdentity(job or job_name())

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [*map(cls._strip_protocol, path)]
        stripped = os.fspath(path).removeprefix("shardcache://").removeprefix("shardcache::")
        stripped = _FILE_PROTOCOL.sub("", stripped)
        return stripped.rstrip("/") or stripped[:1]

    def url(self, path: str) -> str:
        """Return the object store's url of a path."""
        path = self._strip_protocol(path)
        return path if "://" in path else f"{self._prefix}{path}" if self._prefix else from_here(path).rstrip("/")

    def unstrip_protocol(self, name: str) -> str:
        """Return a url of a path by which fsspec opens it through the cache."""
        return f"shardcache://{self.url(name)}"

    def _path(self, url: str) -> str:
        return url.removeprefix(self._prefix) if self._prefix else local_path(url) or url

    def _refs(self, url: str, wanted: Wanted) -> Manifest:
        return resolve(self.choice, self.reader, [url], self.patience.limit_s, wanted)

    def info(self, path: str, **_options: Any) -> Details:
        """Return name, size, type and version of a file, or name and type of a folder."""
        url = self.url(path)
        (ref,) = self._refs(url, "objects")
        if ref.version is None:
            self._refs(f"{url}/", "entries")
            ref = ShardRef(f"{url}/")
        return self._details(ref)

    def _details(self, ref: ShardRef) -> Details:
        if ref.url.endswith("/"):
            return {"name": self._path(ref.url).rstrip("/"), "size": 0, "type": "directory"}
        return {"name": self._path(ref.url), "size": ref.size_bytes, "type": "file", "version": ref.version}

    def ls(self, path: str, detail: bool = True, **_options: Any) -> list[Any]:
        """Return what lies directly in a folder, or the file itself."""
        try:
            found = [*map(self._details, self._refs(f"{self.url(path)}/", "entries"))]
        except NotFoundError:
            found = [self.info(path)]
        return found if detail else [each["name"] for each in found]

    def find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, **options: Any) -> Any:
        """As fsspec's: all files below a folder by one listing, not by one per folder."""
        with suppress(NotFoundError):  # a file
            if maxdepth is None and not withdirs:
                found = {each["name"]: each for each in map(self._details, self._refs(f"{self.url(path)}/", "files"))}
                return found if options.get("detail") else [*found]
        return super().find(path, maxdepth, withdirs, **options)

    def glob(self, path: str, maxdepth: int | None = None, **options: Any) -> Any:
        """As fsspec's, with urls in place of paths: a library that opens the results itself goes through the cache."""
        found = super().glob(path, maxdepth, **options)
        if isinstance(found, dict):
            return {self._own_url(name): details for name, details in found.items()}
        return [*map(self._own_url, found)]

    def expand_path(self, path: Any, recursive: bool = False, maxdepth: int | None = None, **options: Any) -> Any:
        """As fsspec's, of paths: a recursive glob finds an object by its url and by its path."""
        found = super().expand_path(path, recursive, maxdepth, **options)
        return sorted({*self._strip_protocol(found)})

    def _own_url(self, name: str) -> str:
        url = self.url(name)
        # Libraries that normalise paths make two slashes of three.
        return f"shardcache://file:{url}" if url.startswith("/") else f"shardcache://{url}"

    def _open(self, path: str, mode: str = "rb", **options: Any) -> "ArrivingFile":
        if mode != "rb":
            raise OSError(errno.EROFS, "the cache is read-only: write to the object store itself", path)
        return ArrivingFile(self, path, mode, **{"block_size": "default", **options})


class ArrivingFile(AbstractBufferedFile):  # type: ignore[misc]
    """A file, of which ranges can be read as soon as they have arrived."""

    _held: ExitStack | None = None
    _cached: CachedFile

    def _fetch_range(self, start: int, end: int) -> bytes:
        if self._held is None:
            fs, details = self.fs, self.details
            one = Manifest.of([ShardRef(fs.url(details["name"]), details["version"], details["size"])])
            with ExitStack() as held:
                session = held.enter_context(session_of(fs.choice, fs.reader, one, "files", fs.patience))
                self._cached = held.enter_context(closing(CachedFile(session, 0, partial=True)))
                self._held = held.pop_all()
        return self._cached.read(start, end)

    def close(self) -> None:
        """Close the file, and release it in the cache."""
        super().close()
        if self._held is not None:
            self._held.close()
            self._held = None
