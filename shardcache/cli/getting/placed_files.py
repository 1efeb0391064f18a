"""Files in the destination of `get`, as links, clones or copies of cached ones.

Links in the destination are never followed, so that nothing outside of it is touched.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from shardcache.shared.protocol import ShardRef

Names: TypeAlias = tuple[str, ...]
"""Names of the folders and the file, below the destination."""

OnCopied: TypeAlias = Callable[[int], None]
"""Called with the number of bytes of a file that have been copied."""

_FICLONE = 0x40049409  # ioctl_ficlone(2)
# Extended attribute of a copy: hash of url and version, and its size and time when it was made.
_MARK = "user.shardcache"
_FILE_MODE = 0o644
_STEP_BYTES = 64 * 2**20  # copied between two reports


@contextmanager
def folder_of(place: Path | int, names: Names = (), *, make: bool = True) -> Iterator[int]:
    """Provide the descriptor of a folder below another one; no link in between is followed.

    Args:
        place: the destination, which may be a link, or the descriptor of an open folder.
        names: of the folders on the way from it.
        make: True to create missing folders; False to raise FileNotFoundError for them.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    if isinstance(place, Path):
        place.mkdir(parents=True, exist_ok=True)
        fd = os.open(place, flags)
    else:
        fd = os.dup(place)
    try:
        for name in names:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=fd)
            inner = os.open(name, flags | os.O_NOFOLLOW, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def is_copy_of(folder: int, names: Names, ref: ShardRef) -> bool:
    """Return True if an earlier run has put a copy of the same version under these names.

    Return False for a copy that has been changed since.
    """
    if ref.version is None:
        return False
    *folders, name = names
    with suppress(OSError), folder_of(folder, tuple(folders), make=False) as parent:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(name, flags, dir_fd=parent)
        try:
            return os.getxattr(fd, _MARK) == _mark(fd, ref)
        finally:
            os.close(fd)
    return False


def put(
    cached: Path,
    folder: int,
    names: Names,
    ref: ShardRef,
    on_copied: OnCopied,
    *,
    links: bool | None,
) -> str:
    """Put a cached file under a name in the destination, where it appears whole.

    Args:
        cached: path of the file in the cache.
        folder: descriptor of the destination.
        names: of the folders below it, and of the file.
        ref: of the file, for the mark of a copy.
        on_copied: called with the number of bytes that have been copied.
        links: True for hard links where they are possible, False for none; None for one if this
            user could not write to the cached file through it.

    Returns:
        "present" if it was there already, else "linked", "cloned" or "copied".

    Raises OSError.
    """
    *folders, name = names
    may_link = links
    if may_link is None:
        may_link = not os.access(cached, os.W_OK, effective_ids=True)
    with folder_of(folder, tuple(folders)) as parent, cached.open("rb", buffering=0) as file:
        with suppress(FileNotFoundError):
            existing = os.stat(name, dir_fd=parent, follow_symlinks=False)
            is_linked = os.path.samestat(existing, os.fstat(file.fileno()))
            must_copy = links is False  # also in place of a link
            if is_linked and not must_copy:
                return "present"
        if may_link:
            # It fails on another filesystem, or for another user's file.
            with suppress(OSError), _replacing(name, parent) as temporary:
                os.link(cached, temporary, dst_dir_fd=parent)
                return "linked"
        with _replacing(name, parent) as temporary:
            return _copy(file.fileno(), temporary, parent, ref, on_copied)


@contextmanager
def _replacing(name: str, parent: int) -> Iterator[str]:
    """Provide a temporary name under which to make a file.

    At the end of the block, the file gets its name, in place of any other file.
    """
    temporary = f".{secrets.token_hex(8)}.part"
    try:
        yield temporary
        os.replace(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    finally:
        with suppress(FileNotFoundError):  # it is still there if both were names of one file
            os.unlink(temporary, dir_fd=parent)


def _copy(source: int, name: str, parent: int, ref: ShardRef, on_copied: OnCopied) -> str:
    """Make a copy under a name in a folder; return its state, "cloned" or "copied"."""
    flags = os.O_WRONLY | os.O_CLOEXEC
    try:
        # A file without a name leaves nothing behind, but not all filesystems have them.
        fd = os.open(".", os.O_TMPFILE | flags, _FILE_MODE, dir_fd=parent)
        is_named = False
    except OSError:
        fd = os.open(name, os.O_CREAT | os.O_EXCL | flags, _FILE_MODE, dir_fd=parent)
        is_named = True
    try:
        state = _fill(fd, source, on_copied)
        with suppress(OSError):  # without the mark, it is copied again by the next run
            os.setxattr(fd, _MARK, _mark(fd, ref))
        if not is_named:
            os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=parent, follow_symlinks=True)
    finally:
        os.close(fd)
    return state


def _mark(fd: int, ref: ShardRef) -> bytes:
    """Return the value of `_MARK` for an open copy."""
    status = os.fstat(fd)
    version_hash = hashlib.sha256(f"{ref.url}\0{ref.version}".encode()).hexdigest()
    return f"{version_hash} {status.st_size} {status.st_mtime_ns}".encode()


def _fill(fd: int, source: int, on_copied: OnCopied) -> str:
    """Fill a new file, with the source's own blocks if they can be shared; return its state."""
    try:
        fcntl.ioctl(fd, _FICLONE, source)
        return "cloned"
    except OSError:
        pass  # the filesystem shares no blocks

    offset = 0
    on_copied(offset)
    while sent_bytes := os.sendfile(fd, source, offset, _STEP_BYTES):
        offset += sent_bytes
        on_copied(offset)
    return "copied"
