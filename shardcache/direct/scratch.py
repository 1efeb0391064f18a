"""Files without a name, for shards that one process reads by itself: gone with it, however it ends."""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from shardcache.config import Amount
from shardcache.errors import CacheDirError, CacheError, DiskFullError
from shardcache.units import size

DIRECT_DIR_ENV = "SHARDCACHE_DIRECT_DIR"
_REMEDY = f"mend that, or set {DIRECT_DIR_ENV} to a folder on a disk with room for the shards in hand"


class ScratchFile:
    """A file that is closed, and so gone, once nobody refers to it any more: a thread that still writes it does.

    Closing it by hand would free its descriptor's number for the next file that this process opens, and such a thread
    would write there.

    Attributes:
        fd: open for reading and writing.
    """

    def __init__(self, folder: Path) -> None:
        """Make one. Raises OSError."""
        with tempfile.TemporaryFile(dir=folder, prefix="shardcache-", buffering=0) as file:
            self.fd = os.dup(file.fileno())
        self._close = weakref.finalize(self, os.close, self.fd)
        _open_files.add(self)

    def __repr__(self) -> str:
        return f"ScratchFile(fd={self.fd})"

    @property
    def path(self) -> Path:
        """A path by which this process alone can open it, as long as it refers to this object."""
        return Path(f"/proc/self/fd/{self.fd}")

    @property
    def path_for_others(self) -> Path:
        """A path by which another process of the same user can open it while this process has it open."""
        return Path(f"/proc/{os.getpid()}/fd/{self.fd}")

    def forget(self) -> None:
        """Close a forked child's copy, so that the file goes when its owner is done with it."""
        self._close()


_open_files: weakref.WeakSet[ScratchFile] = weakref.WeakSet()


def _forget_inherited() -> None:
    for inherited in list(_open_files):
        inherited.forget()


os.register_at_fork(after_in_child=_forget_inherited)


class Scratch:
    """The folder of the nameless files.

    Args:
        folder: default: `$SHARDCACHE_DIRECT_DIR`, else the temporary directory.
        min_free: what its filesystem keeps free.
    """

    def __init__(self, min_free: Amount, folder: Path | None = None, env: Mapping[str, str] = os.environ) -> None:
        self.folder = folder or Path(env.get(DIRECT_DIR_ENV) or tempfile.gettempdir())
        self._min_free = min_free

    def __repr__(self) -> str:
        return f"Scratch({str(self.folder)!r})"

    def file(self, size_bytes: int = 0) -> ScratchFile:
        """Return an empty file that has room for so many bytes. Blocks; raises OSError."""
        file = ScratchFile(self.folder)
        if size_bytes:
            self.check_room(size_bytes)
            os.posix_fallocate(file.fd, 0, size_bytes)
        return file

    def check_room(self, size_bytes: int) -> None:
        """Raise OSError (ENOSPC) unless so many bytes fit beside what is to stay free."""
        disk = os.statvfs(self.folder)
        free_bytes = disk.f_frsize * disk.f_bavail
        if free_bytes - size_bytes < self._min_free.of(disk.f_frsize * disk.f_blocks):
            raise OSError(errno.ENOSPC, f"{size(size_bytes)} do not fit beside the free space that is kept")

    @contextmanager
    def errors(self, url: str) -> Iterator[None]:
        """Name the folder, the shard and what helps in the errors of a block that uses files of this folder."""
        try:
            yield
        except OSError as exn:
            raise self.error(exn, url) from exn
        except CacheError as exn:
            raise type(exn)(f"cannot be kept in {self.folder}: {exn.message}", url=url, remedy=_REMEDY) from exn

    def error(self, exn: OSError, url: str) -> CacheError:
        """Return the error for a file of this folder that cannot be used."""
        kind = DiskFullError if exn.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else CacheDirError
        return kind(f"cannot be kept in {self.folder} ({exn.strerror})", url=url, remedy=_REMEDY)
