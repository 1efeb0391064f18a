"""Operations on files that the standard library lacks: sync, atomic replacement, quiet removal.

All functions block.
"""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

_STAT_BLOCK_BYTES = 512  # unit of `st_blocks`, whatever the size of the filesystem's blocks


def fsync_path(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, temporary: Path, lines: Iterable[str]) -> None:
    """Atomically replace a text file: after a crash, it has either all old or all new lines.

    Args:
        path: the file to replace.
        temporary: path for the new file until it is complete, on the same filesystem.
        lines: the new lines, with their line breaks.
    """
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync_path(path.parent)


def unlink_quietly(*paths: Path) -> None:
    """Remove files, ignoring those that do not exist."""
    for path in paths:
        path.unlink(missing_ok=True)


def allocated_or_zero(path: Path) -> int:
    """Return the bytes that a file takes on disk, without its holes, or 0 if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        stat = path.stat()
        return min(stat.st_size, stat.st_blocks * _STAT_BLOCK_BYTES)
    return 0


def size_or_zero(path: Path) -> int:
    """Return a file's size in bytes, or 0 if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def inode_or_zero(path: Path) -> int:
    """Return a file's inode number, or 0 if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_ino
    return 0


def modified_s(path: Path) -> float | None:
    """Return when a file was last written, in Unix time; None if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime
    return None
