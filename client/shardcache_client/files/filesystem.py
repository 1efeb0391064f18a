"""The cache as a read-only filesystem of fsspec, for any object that the daemon may fetch.

A file's url is the object's url with `shardcache::` before it.

    with fsspec.open("shardcache::s3://bucket/table.parquet") as file: ...
    pandas.read_parquet("shardcache::s3://bucket/table.parquet")

Only the parts of a file that are read are fetched, each once per node (`--range-part-size`, 256 KiB
by default). A file that is read in order is fetched ahead. A file of which more than half is read
is fetched whole (`--whole-from-percent`). If fsspec's package for the object store, such as s3fs,
is not installed, write `shardcache://s3://bucket/table.parquet`.

Paths are literal; only `glob` takes patterns. For `--listing-ttl-s` seconds, the daemon keeps the
size and version of an object, and the entries of a folder. After `invalidate_cache`, or the error
that a file was replaced, the daemon asks the object store again.
"""

import errno
import os
import re
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from datetime import UTC, datetime
from typing import Any, NoReturn

from fsspec.caching import BaseCache
from fsspec.implementations.chained import ChainedFileSystem
from fsspec.spec import AbstractBufferedFile

from shardcache.shared.exceptions import (
    ConfigError,
    NotFoundError,
    OutdatedError,
    ShardChangedError,
)
from shardcache.shared.protocol import ShardRef, Wanted
from shardcache.shared.urls.local_urls import absolute_url, local_path
from shardcache_client.arguments.other_words import OTHER_WORDS
from shardcache_client.arguments.values import DAEMONS, JOB, PATH, SECONDS, checked, whole
from shardcache_client.daemon.choice import DaemonChoice
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.patience import Patience
from shardcache_client.daemon.session import resolve
from shardcache_client.files.cached_file import session_of
from shardcache_client.files.range_file import RangeFile
from shardcache_client.files.read_ahead import DEFAULT_BLOCK_BYTES, Fetch, ReadAhead
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.ranks.environment import job_name

Details = dict[str, Any]
"""Details of a file or folder: "name", "size", "type" and, for a file, "version"."""

_FILE_PROTOCOL = re.compile(r"file:(?://)?(?=/)")
_WEB_PROTOCOL = re.compile("https?://", re.IGNORECASE)
# Text in a path that the daemon would take for a pattern. `_OP_` opens braces in NeMo's spelling.
_PATTERN = re.compile(r"[*?\[\]{}\\]|_OP_")
# Arguments that fsspec itself takes, for any filesystem.
_FSSPEC_ARGUMENTS = (
    "asynchronous",
    "batch_size",
    "listings_expiry_time",
    "loop",
    "max_paths",
    "skip_instance_cache",
    "use_listings_cache",
)
# The options that fsspec derives from an S3 url with `?versionId=`. This filesystem may ignore
# them, as the version stays in the path.
_VERSION_OPTIONS = {"version_aware": True}


class ShardcacheFileSystem(ChainedFileSystem):  # type: ignore[misc]
    """The files of one object store, read through the cache.

    A path is a url, or a path as fsspec's filesystem for the store takes it.

    Args:
        target_protocol: protocol of the url that follows `shardcache::`.
        fo: path of that url.
        target_options: options for fsspec's filesystem of the store. They would have no effect, as
            the daemon opens the store, so any option is a ConfigError.
        block_size: maximum number of bytes that are read ahead in a file that is read in order; 0,
            which some libraries pass, stands for the default, 5 MiB.
        job, socket, daemon, timeout_s: as for `open_cached`.
        options: fsspec's own options. Any other option is a ConfigError.
    """

    protocol = "shardcache"
    # fsspec ignores this argument when it looks for an existing filesystem object. So all urls of
    # one protocol share an object.
    _strip_tokenize_options = ("fo",)

    @checked(
        OTHER_WORDS,
        _FSSPEC_ARGUMENTS,
        job=JOB.or_none(),
        socket=PATH.or_none(),
        daemon=DAEMONS,
        timeout_s=SECONDS,
        block_size=whole(0).or_none(),
    )
    def __init__(
        self,
        target_protocol: str | None = None,
        fo: str | None = None,
        target_options: Mapping[str, Any] | None = None,
        *,
        job: str | None = None,
        socket: str | os.PathLike[str] | None = None,
        daemon: Any = "auto",
        timeout_s: float = 300.0,
        block_size: int | None = None,
        **options: Any,
    ) -> None:
        if target_options and target_options != _VERSION_OPTIONS:
            raise ConfigError(
                f"the options of {target_protocol}:// ({', '.join(sorted(target_options))}) would "
                "not be used: the daemon opens the object store",
                remedy="write them into an [[origin]] table of the daemon's config; those that "
                "come from the url itself are kept by shardcache://URL in place of "
                "shardcache::URL",
            )
        super().__init__(target_protocol=target_protocol, fo=fo, **options)
        self._prefix = ""  # what a path lacks to be a url; empty for local files
        if target_protocol not in (None, "file", "local"):
            self._prefix = f"{target_protocol}://"
        self.choice = DaemonChoice.of(socket, daemon)
        self.patience = Patience(timeout_s)
        self.reader = ReaderIdentity(job or job_name())
        self._block_size = block_size or DEFAULT_BLOCK_BYTES
        # `time.monotonic` of the last `invalidate_cache`; None if it was never called.
        self._invalidated_s: float | None = None
        # For each path: the version seen last, and the time at which it was first seen.
        self._first_seen: dict[str, tuple[str, datetime]] = {}

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        """Return a path, or a list of them, without `shardcache::` and slashes at the end."""
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        stripped = os.fspath(path).removeprefix("shardcache://").removeprefix("shardcache::")
        stripped = _FILE_PROTOCOL.sub("", stripped)
        return stripped.rstrip("/") or stripped[:1]  # the root folder stays `/`

    def url(self, path: str) -> str:
        """Return the object store's url of a path."""
        path = self._strip_protocol(path)
        if "://" in path:
            return path
        if self._prefix:
            return f"{self._prefix}{path}"
        return absolute_url(path).rstrip("/")

    def unstrip_protocol(self, name: str) -> str:
        """Return the url by which fsspec opens a path through the cache."""
        return f"shardcache://{self.url(name)}"

    def invalidate_cache(self, path: str | None = None) -> None:
        """Make the daemon ask the object store again, for all paths.

        Args:
            path: path to remove from fsspec's own caches; None for all paths.
        """
        self._invalidated_s = time.monotonic()
        super().invalidate_cache(path)

    def info(self, path: str, **_options: Any) -> Details:
        """Return name, size, type and version of a file, or name and type of a folder."""
        url = self.url(path)
        (ref,) = self._refs(url, "objects")
        if ref.version is None:  # no object at this url
            self._check_folder(url)
            ref = ShardRef(f"{url}/")
        return self._details(ref)

    def _path(self, url: str) -> str:
        """Return the path of a url of the object store."""
        if self._prefix:
            return url.removeprefix(self._prefix)
        return local_path(url) or url

    def _refs(self, url: str, wanted: Wanted) -> Manifest:
        """Return the objects at a url, or in a folder, as the daemon finds them.

        Args:
            url: url of an object, or of a folder, which ends with a slash.
            wanted: what is listed, and how objects are read; see `Wanted`.
        """
        # The daemon may answer from memory, but not with what it knew before the last
        # `invalidate_cache`.
        max_age_s = None
        if self._invalidated_s is not None:
            max_age_s = time.monotonic() - self._invalidated_s
        return resolve(
            self.choice,
            self.reader,
            [url],
            timeout_s=self.patience.limit_s,
            wanted=wanted,
            max_age_s=max_age_s,
        )

    def _check_folder(self, url: str) -> None:
        """Raise NotFoundError if there is no folder at a url, where there is no file either."""
        try:
            self._refs(f"{url}/", "entries")
        except NotFoundError as exn:
            raise NotFoundError(
                "there is neither a file nor a folder at this path",
                url=url,
                remedy=exn.remedy,
            ) from exn

    def _details(self, ref: ShardRef) -> Details:
        """Return the details of an object or a folder; a folder's url ends with a slash."""
        if ref.url.endswith("/"):
            return {"name": self._path(ref.url).rstrip("/"), "size": 0, "type": "directory"}
        return {
            "name": self._path(ref.url),
            "size": ref.size_bytes,
            "type": "file",
            "version": ref.version,
        }

    def exists(self, path: str, **_options: Any) -> bool:
        """Return whether there is a file or folder.

        Unlike fsspec's own `exists`, raises the errors of a failing store.
        """
        return self._type(path) is not None

    def isfile(self, path: str) -> bool:
        """Return whether there is a file. Raises as `exists` does."""
        return self._type(path) == "file"

    def isdir(self, path: str) -> bool:
        """Return whether there is a folder. Raises as `exists` does."""
        return self._type(path) == "directory"

    def _type(self, path: str) -> str | None:
        """Return "file" or "directory"; None if the path is neither."""
        try:
            return str(self.info(path)["type"])
        except FileNotFoundError:
            return None

    def modified(self, path: str) -> datetime:
        """Return the time at which this filesystem first saw the file's present version.

        It stands in for the time of the last change, which is not known: it changes whenever the
        version does. Raises IsADirectoryError for a folder.
        """
        details = self._file_details(path)
        version, first_seen = self._first_seen.get(details["name"], (None, None))
        if first_seen is None or version != details["version"]:
            first_seen = datetime.now(UTC)
            self._first_seen[details["name"]] = (details["version"], first_seen)
        return first_seen

    def _file_details(self, path: str) -> Details:
        """Return the details of a file. Raises IsADirectoryError for a folder."""
        details = self.info(path)
        if details["type"] == "directory":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return details

    def ls(
        self,
        path: str,
        detail: bool = True,
        refresh: bool = False,
        **_options: Any,
    ) -> list[Any]:
        """Return the files and folders directly in a folder, or the file itself.

        Args:
            path: path of the folder or file.
            detail: True for the details of each, as `info` returns them; False for the names alone.
            refresh: True to ask the object store again, as after `invalidate_cache`.
        """
        if refresh:
            self.invalidate_cache(path)
        try:
            entries = self._contents(path, "entries")
        except NotFoundError:
            entries = [self.info(path)]
        if detail:
            return entries
        return [each["name"] for each in entries]

    def _contents(self, path: str, wanted: Wanted) -> list[Details]:
        """Return the details of what is in a folder. Raises NotFoundError if there is no folder.

        Args:
            path: path of the folder.
            wanted: "entries" for files and folders directly in it, "files" for all files below it.
        """
        url = self.url(path)
        if _WEB_PROTOCOL.match(url):
            raise NotFoundError(
                "web servers have no folders",
                url=url,
                remedy="name a file of the server",
            )
        return [self._details(ref) for ref in self._refs(f"{url}/", wanted)]

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        **options: Any,
    ) -> Any:
        """Return all files below a folder, as fsspec's `find` does.

        The daemon lists all folders at once, where fsspec would list one folder after another.
        """
        # The daemon's listing has no folders and no limit of depth, and would take a path with
        # special characters for a pattern. In these cases fsspec lists the folders.
        looks_like_pattern = _PATTERN.search(self.url(path)) is not None
        if maxdepth is None and not withdirs and not looks_like_pattern:
            # If there is no such folder, the path may be that of a file, which fsspec's own `find`
            # below then finds.
            with suppress(NotFoundError):
                files = {each["name"]: each for each in self._contents(path, "files")}
                return files if options.get("detail") else list(files)
        return super().find(path, maxdepth, withdirs, **options)

    def glob(self, path: str, maxdepth: int | None = None, **options: Any) -> Any:
        """Return the matches of a pattern, as fsspec's `glob` does, with urls in place of paths.

        A library that opens the results itself then reads them through the cache.
        """
        matches = super().glob(path, maxdepth, **options)
        if isinstance(matches, dict):
            return {self._normalisable_url(name): details for name, details in matches.items()}
        return [self._normalisable_url(name) for name in matches]

    def expand_path(
        self,
        path: Any,
        recursive: bool = False,
        maxdepth: int | None = None,
        **options: Any,
    ) -> Any:
        """Return the paths that a path or pattern stands for, as fsspec's `expand_path` does.

        A recursive glob finds an object both by its url and by its path. Only the path is returned.
        """
        expanded = super().expand_path(path, recursive, maxdepth, **options)
        return sorted({*self._strip_protocol(expanded)})

    def _normalisable_url(self, name: str) -> str:
        """Return the url of `unstrip_protocol`, for libraries that normalise it as a path."""
        url = self.url(name)
        # Normalising would turn the three slashes of `file:///` into two.
        if url.startswith("/"):
            return f"shardcache://file:{url}"
        return f"shardcache://{url}"

    def _open(self, path: str, mode: str = "rb", **options: Any) -> "BufferedFile":
        """Open a file for reading. fsspec's `open` calls this, and adds text modes."""
        if mode != "rb":
            self._refuse(path)
        details = self._file_details(path)
        options["block_size"] = options.get("block_size") or self._block_size
        options["size"] = details["size"]
        file = BufferedFile(self, path, mode, **options)
        file.details = details  # spares fsspec a second request for them
        return file

    def _refuse(self, path: Any, *_arguments: Any, **_options: Any) -> NoReturn:
        """Raise the error for a call that would change a file or folder."""
        raise OSError(
            errno.EROFS, "the cache is read-only: write to the object store itself", str(path)
        )

    # Every method by which fsspec changes a filesystem calls one of these methods in the end.
    mkdir = makedirs = rmdir = rm = rm_file = _rm = cp_file = mv = touch = pipe_file = put_file = (
        _refuse
    )


class ReadAheadCache(BaseCache):  # type: ignore[misc]
    """A `ReadAhead` as fsspec's files use it: the default for the files of this filesystem.

    Args:
        blocksize: maximum number of bytes that are read ahead.
        fetcher: fetches bytes of the file.
        size: number of bytes of the file.
    """

    name = "shardcache"

    def __init__(self, blocksize: int, fetcher: Fetch, size: int) -> None:
        super().__init__(blocksize, fetcher, size)
        self._read_ahead = ReadAhead(blocksize, fetcher, size)

    def _fetch(self, start: int | None, stop: int | None) -> bytes:
        """Return bytes of the file; fsspec calls this, with None for the file's start or end."""
        read = self._read_ahead.read(start or 0, self.size if stop is None else stop)
        return read.tobytes()


class BufferedFile(AbstractBufferedFile):  # type: ignore[misc]
    """A file that is open for reading. Only the parts that are read are fetched.

    Args:
        fs: the filesystem.
        path: path of the file.
        mode: "rb".
        cache_type: name of the cache for read bytes: `ReadAheadCache`, or one of fsspec's caches.
        options: other options of fsspec for a file.
    """

    # Closes the session and the open file; None until the first read.
    _resources: ExitStack | None = None
    _ranges: RangeFile

    def __init__(
        self,
        fs: ShardcacheFileSystem,
        path: str,
        mode: str,
        *,
        cache_type: str = ReadAheadCache.name,
        **options: Any,
    ) -> None:
        if cache_type == ReadAheadCache.name:
            # fsspec does not know this cache, so it is set after the initialisation.
            super().__init__(fs, path, mode, cache_type="none", **options)
            self.cache = ReadAheadCache(self.blocksize, self._fetch_range, self.size)
        else:
            super().__init__(fs, path, mode, cache_type=cache_type, **options)

    def _fetch_range(self, start: int, end: int, ahead_to: int = 0) -> bytes:
        """Return bytes of the file; `ReadAheadCache` and fsspec's caches call this.

        Args:
            start: offset of the first byte.
            end: offset after the last byte.
            ahead_to: offset up to which cached bytes after `end` are returned as well; 0 for none,
                as for fsspec's caches.
        """
        if self._resources is None:
            self._open_ranges()
        try:
            return self._ranges.read(start, end, ahead_to)
        except (OutdatedError, ShardChangedError):
            # The version that the daemon knows is out of date. After the invalidation, the file can
            # be opened again with the new version.
            self.fs.invalidate_cache()
            raise

    def _open_ranges(self) -> None:
        """Open a session whose plan has only this file, and open the file."""
        fs = self.fs
        details = self.details
        ref = ShardRef(fs.url(details["name"]), details["version"], details["size"])
        with ExitStack() as resources:
            session = resources.enter_context(
                session_of(
                    fs.choice,
                    fs.reader,
                    Manifest.of([ref]),
                    wanted="ranges",
                    patience=fs.patience,
                ),
            )
            self._ranges = resources.enter_context(closing(RangeFile(session, position=0)))
            self._resources = resources.pop_all()  # `close` closes them

    def close(self) -> None:
        """Close the file, and release it in the cache."""
        super().close()
        if self._resources is not None:
            self._resources.close()
            self._resources = None
