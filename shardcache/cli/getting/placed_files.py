"""Files in the destination of `get`, as links, clones or copies of cached files.

`fetch_into` calls these functions. A link is a hard link to the cached file; a clone is a copy that
shares the cached file's blocks on disk. A mark is an extended attribute of a copy, by which the
next run recognises it. Symbolic links in the destination are never followed, so that no file
outside of the destination is touched.
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
"""Names of the folders and of the file on the way from the destination to the file."""

OnCopied: TypeAlias = Callable[[int], None]
"""Called with the number of bytes of a file that have been copied so far."""

_FICLONE = 0x40049409  # number of the request in ioctl_ficlone(2)
# Name of the mark. Its value has a hash of url and version, and the size and the modification time
# that the copy had when it was made.
_MARK = "user.shardcache"
_FILE_MODE = 0o644
_STEP_BYTES = 64 * 2**20  # number of bytes that are copied between two reports


@contextmanager
def folder_of(place: Path | int, names: Names = (), *, make: bool = True) -> Iterator[int]:
    """Yield the descriptor of a folder below another folder.

    No symbolic link on the way from `place` is followed.

    Args:
        place: path of the destination, which may be a link, or the descriptor of an open folder.
        names: names of the folders on the way from `place`; empty for `place` itself.
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
    """Return True if the destination has an unchanged copy of the file in the same version.

    The copy is recognised by its mark.

    Args:
        folder: descriptor of the destination.
        names: names of the file in the destination.
        ref: the file.
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
    """Put a cached file under a name in the destination, where it appears whole or not at all.

    Args:
        cached: path of the file in the cache.
        folder: descriptor of the destination.
        names: names of the file in the destination.
        ref: the file, for the mark of a copy.
        on_copied: called with the number of bytes that have been copied.
        links: True to make a hard link where that is possible, False to make none. None to make a
            link if it is safe: if this user could not write to the cached file through the link.

    Returns:
        "present" if the destination had such a link already, else "linked", "cloned" or "copied".

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
            must_copy = links is False  # a link from an earlier run is then replaced by a copy
            if is_linked and not must_copy:
                return "present"
        if may_link:
            # Linking fails on another filesystem, and for another user's file. A copy is made then.
            with suppress(OSError), _replacing(name, parent) as temporary:
                os.link(cached, temporary, dst_dir_fd=parent)
                return "linked"
        with _replacing(name, parent) as temporary:
            return _copy(file.fileno(), temporary, parent, ref, on_copied)


@contextmanager
def _replacing(name: str, parent: int) -> Iterator[str]:
    """Yield a temporary name in a folder, under which the block has to make a file.

    At the end of the block, the file gets the name `name`, in place of any other file.
    """
    temporary = f".{secrets.token_hex(8)}.part"
    try:
        yield temporary
        os.replace(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    finally:
        # The temporary name still exists after an error, and if both names were links to the same
        # file, since renaming then does nothing.
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=parent)


def _copy(source: int, name: str, parent: int, ref: ShardRef, on_copied: OnCopied) -> str:
    """Make a copy under a name in a folder; return "cloned" or "copied".

    Args:
        source: descriptor of the cached file.
        name: name of the copy.
        parent: descriptor of the folder.
        ref: the file, for the mark.
        on_copied: called with the number of bytes that have been copied.
    """
    flags = os.O_WRONLY | os.O_CLOEXEC
    try:
        # A file without a name vanishes if this process is killed, but some filesystems lack such
        # files.
        fd = os.open(".", os.O_TMPFILE | flags, _FILE_MODE, dir_fd=parent)
        is_named = False
    except OSError:
        fd = os.open(name, os.O_CREAT | os.O_EXCL | flags, _FILE_MODE, dir_fd=parent)
        is_named = True
    try:
        state = _fill(fd, source, on_copied)
        # Some filesystems have no extended attributes. The next run copies the file again then.
        with suppress(OSError):
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
    """Fill a new file as a clone, or else as a copy; return "cloned" or "copied".

    Args:
        fd: descriptor of the new file.
        source: descriptor of the cached file.
        on_copied: called with the number of bytes that have been copied.
    """
    try:
        fcntl.ioctl(fd, _FICLONE, source)
        return "cloned"
    except OSError:
        pass  # the filesystem cannot share blocks

    offset = 0
    on_copied(offset)
    while sent_bytes := os.sendfile(fd, source, offset, _STEP_BYTES):
        offset += sent_bytes
        on_copied(offset)
    return "copied"
