"""Files in the destination of `get`, as links, clones or copies of cached files.

`fetch_into` calls these functions. A link is a hard link to the cached file; a clone is a copy that
shares the cached file's blocks on disk. A mark is an extended attribute of a copy, by which the
next run recognises it. Folders are passed on as descriptors, and symbolic links in the destination
are never followed, so that no file outside of the destination is touched.
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
"""Path of a file below the destination: the names of its folders, and its own."""

OnCopied: TypeAlias = Callable[[int], None]
"""Called again and again with the number of bytes of a file that have been copied so far."""

_FICLONE = 0x40049409  # number of the request in ioctl_ficlone(2)
# Name of the mark. Its value has a hash of url and version, and the size and the modification time
# that the copy had when it was made.
_MARK = "user.shardcache"
_FILE_MODE = 0o644
_STEP_BYTES = 64 * 2**20  # number of bytes that are copied between two reports


@contextmanager
def open_folder(start: Path | int, names: Names = (), *, create: bool = True) -> Iterator[int]:
    """Yield the descriptor of a folder.

    No symbolic link on the way from `start` is followed.

    Args:
        start: path of the destination, which may be a link, or the descriptor of a folder.
        names: names of the folders on the way from `start`; empty for `start` itself.
        create: True to create missing folders; False to raise FileNotFoundError for them.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    if isinstance(start, Path):
        start.mkdir(parents=True, exist_ok=True)
        fd = os.open(start, flags)
    else:
        fd = os.dup(start)
    try:
        for name in names:
            if create:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=fd)
            inner_fd = os.open(name, flags | os.O_NOFOLLOW, dir_fd=fd)
            os.close(fd)
            fd = inner_fd
        yield fd
    finally:
        os.close(fd)


def is_copy_of(folder_fd: int, names: Names, ref: ShardRef) -> bool:
    """Return True if the destination has an unchanged copy of the file in the same version.

    The copy is recognised by its mark.

    Args:
        folder_fd: descriptor of the destination.
        names: path of the copy below the destination.
        ref: url and version of the file.
    """
    if ref.version is None:
        return False
    *folders, name = names
    with suppress(OSError), open_folder(folder_fd, tuple(folders), create=False) as parent_fd:
        # O_NONBLOCK is for a pipe of this name, which would block `open`.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(name, flags, dir_fd=parent_fd)
        try:
            return os.getxattr(fd, _MARK) == _mark(fd, ref)
        finally:
            os.close(fd)
    return False


def place_file(
    cached: Path,
    folder_fd: int,
    names: Names,
    ref: ShardRef,
    on_copied: OnCopied,
    *,
    links: bool | None,
) -> str:
    """Put a cached file under a name in the destination, where it appears whole or not at all.

    Args:
        cached: path of the file in the cache.
        folder_fd: descriptor of the destination.
        names: path of the file below the destination.
        ref: url and version of the file, for the mark of a copy.
        on_copied: called while the file is copied.
        links: True to make a hard link where that is possible, False to make none. None to make a
            link if it is safe: if this user could not write to the cached file through the link.

    Returns:
        "present" if the destination already had a link to this file, else "linked", "cloned" or
        "copied".

    Raises OSError.
    """
    *folders, name = names
    may_link = links
    if may_link is None:
        may_link = not os.access(cached, os.W_OK, effective_ids=True)
    with (
        open_folder(folder_fd, tuple(folders)) as parent_fd,
        cached.open("rb", buffering=0) as file,
    ):
        cached_fd = file.fileno()
        must_copy = links is False  # a link from an earlier run is then replaced by a copy
        if not must_copy and _is_link_to(cached_fd, name, parent_fd):
            return "present"
        if may_link:
            # Linking fails on another filesystem, and for another user's file. A copy is made then.
            with suppress(OSError), _replacing(name, parent_fd) as temporary:
                os.link(cached, temporary, dst_dir_fd=parent_fd)
                return "linked"
        with _replacing(name, parent_fd) as temporary:
            return _copy(cached_fd, temporary, parent_fd, ref, on_copied)


def _is_link_to(cached_fd: int, name: str, parent_fd: int) -> bool:
    """Return True if a name in a folder is a hard link to the cached file."""
    try:
        existing = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(existing, os.fstat(cached_fd))


@contextmanager
def _replacing(name: str, parent_fd: int) -> Iterator[str]:
    """Yield a temporary name in a folder, under which the block has to make a file.

    At the end of the block, the file is renamed to `name`, and replaces any file of that name.
    """
    temporary = f".{secrets.token_hex(8)}.part"
    try:
        yield temporary
        os.replace(temporary, name, src_dir_fd=parent_fd, dst_dir_fd=parent_fd)
    finally:
        # The temporary name still exists after an error, and if both names were links to the same
        # file, since renaming then does nothing.
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=parent_fd)


def _copy(cached_fd: int, name: str, parent_fd: int, ref: ShardRef, on_copied: OnCopied) -> str:
    """Make a copy under a name in a folder; return "cloned" or "copied".

    Args:
        cached_fd: descriptor of the cached file.
        name: name of the copy.
        parent_fd: descriptor of the folder.
        ref: url and version of the file, for the mark.
        on_copied: called while the file is copied.
    """
    flags = os.O_WRONLY | os.O_CLOEXEC
    try:
        # A file without a name vanishes if this process is killed, but some filesystems lack such
        # files.
        fd = os.open(".", os.O_TMPFILE | flags, _FILE_MODE, dir_fd=parent_fd)
        is_named = False
    except OSError:
        fd = os.open(name, os.O_CREAT | os.O_EXCL | flags, _FILE_MODE, dir_fd=parent_fd)
        is_named = True
    try:
        state = _fill(fd, cached_fd, on_copied)
        # Some filesystems have no extended attributes. The next run copies the file again then.
        with suppress(OSError):
            os.setxattr(fd, _MARK, _mark(fd, ref))
        if not is_named:
            os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=parent_fd, follow_symlinks=True)
    finally:
        os.close(fd)
    return state


def _mark(fd: int, ref: ShardRef) -> bytes:
    """Return the value of `_MARK` for an open copy."""
    status = os.fstat(fd)
    version_hash = hashlib.sha256(f"{ref.url}\0{ref.version}".encode()).hexdigest()
    return f"{version_hash} {status.st_size} {status.st_mtime_ns}".encode()


def _fill(fd: int, cached_fd: int, on_copied: OnCopied) -> str:
    """Clone the cached file into a new file, or else copy it; return "cloned" or "copied".

    Args:
        fd: descriptor of the new file.
        cached_fd: descriptor of the cached file.
        on_copied: called while the file is copied, not while it is cloned.
    """
    try:
        fcntl.ioctl(fd, _FICLONE, cached_fd)
        return "cloned"
    except OSError:
        pass  # the filesystem cannot share blocks

    offset = 0
    on_copied(offset)
    while sent_bytes := os.sendfile(fd, cached_fd, offset, _STEP_BYTES):
        offset += sent_bytes
        on_copied(offset)
    return "copied"
