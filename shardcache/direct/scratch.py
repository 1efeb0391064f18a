"""Nameless files for shards that one process fetches by itself: freed with the process, however it ends."""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardcache.config import Amount
from shardcache.errors import CacheDirError, CacheError, DiskFullError
from shardcache.origin.base import RemoteObject
from shardcache.store.partial import PartFile
from shardcache.units import size

DIRECT_DIR_ENV = "SHARDCACHE_DIRECT_DIR"
_REMEDY = f"fix that, or set {DIRECT_DIR_ENV} to a folder on a disk with space for the shards being read"


class ScratchFile:
    """A file that is closed, and so freed, once nothing references it, including threads that still write to it.

    Closing it explicitly would free its descriptor number for the next file that this process opens, and such a thread
    would write there.

    Attributes:
        fd: open for reading and writing.
    """

    def __init__(self, folder: Path) -> None:
        """Create the file. Raises OSError."""
        with tempfile.TemporaryFile(dir=folder, prefix="shardcache-", buffering=0) as file:
            self.fd = os.dup(file.fileno())
        self._close = weakref.finalize(self, os.close, self.fd)
        _open_files.add(self)

    def __repr__(self) -> str:
        return f"ScratchFile(fd={self.fd})"

    @property
    def path(self) -> Path:
        """Path by which only this process can open it, while this object is referenced."""
        return Path(f"/proc/self/fd/{self.fd}")

    @property
    def path_for_others(self) -> Path:
        """Path by which other processes of the same user can open it, while this process has it open."""
        return Path(f"/proc/{os.getpid()}/fd/{self.fd}")

    def forget(self) -> None:
        """Close a forked child's copy, so that the file is freed when its owner is done with it."""
        self._close()


_open_files: weakref.WeakSet[ScratchFile] = weakref.WeakSet()


def _forget_inherited() -> None:
    for inherited in list(_open_files):
        inherited.forget()


os.register_at_fork(after_in_child=_forget_inherited)


class Scratch:
    """Folder of the nameless files.

    Args:
        min_free: space to keep free on its filesystem.
        folder: by default `$SHARDCACHE_DIRECT_DIR`, else the temporary directory.
    """

    def __init__(self, min_free: Amount, folder: Path | None = None, env: Mapping[str, str] = os.environ) -> None:
        self.folder = folder or Path(env.get(DIRECT_DIR_ENV) or tempfile.gettempdir())
        self._min_free = min_free

    def __repr__(self) -> str:
        return f"Scratch({str(self.folder)!r})"

    def file(self, size_bytes: int = 0) -> ScratchFile:
        """Return an empty file with `size_bytes` of space allocated. Blocks; raises OSError."""
        file = ScratchFile(self.folder)
        if size_bytes:
            self.check_room(size_bytes)
            os.posix_fallocate(file.fd, 0, size_bytes)
        return file

    def sink(self, obj: RemoteObject, part_bytes: int) -> ScratchSink:
        """Return a file with space for an object. Blocks; raises DiskFullError and CacheDirError."""
        with self.errors(obj.url):
            file = self.file(obj.size_bytes)
        return ScratchSink(obj, part_bytes, file.path_for_others, scratch=self, file=file)

    def check_room(self, size_bytes: int) -> None:
        """Raise OSError (ENOSPC) unless `size_bytes` fit without using the space to keep free."""
        disk = os.statvfs(self.folder)
        free_bytes = disk.f_frsize * disk.f_bavail
        if free_bytes - size_bytes < self._min_free.of(disk.f_frsize * disk.f_blocks):
            raise OSError(errno.ENOSPC, f"{size(size_bytes)} do not fit within the space that may be used")

    @contextmanager
    def errors(self, url: str) -> Iterator[None]:
        """Add the folder, the shard and a remedy to errors of the block, which uses files of this folder."""
        try:
            yield
        except OSError as exn:
            raise self.error(exn, url) from exn
        except CacheError as exn:
            raise type(exn)(f"cannot be stored in {self.folder}: {exn.message}", url=url, remedy=_REMEDY) from exn

    def error(self, exn: OSError, url: str) -> CacheError:
        """Return the error for a file of this folder that cannot be used."""
        kind = DiskFullError if exn.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else CacheDirError
        return kind(f"cannot be stored in {self.folder} ({exn.strerror})", url=url, remedy=_REMEDY)


@dataclass(slots=True, kw_only=True)
class ScratchSink(PartFile):
    """A nameless file that is filled part by part, without a journal: nothing of it outlives the process."""

    scratch: Scratch
    file: ScratchFile

    def disk_error(self, exn: OSError) -> CacheError:
        """As `PartFile.disk_error`."""
        return self.scratch.error(exn, self.obj.url)
