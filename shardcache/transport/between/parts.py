"""Parts of a file on disk: checksummed, written, and recorded in a journal.

A part is a piece of a file, of a fixed size except for the last one. A journal is a file that lists
the finished parts with their checksums, so that a later daemon can resume the download. Transport
workers write the body of an answer with a `PartsWriter`; the daemon writes a body that it has in
memory with `write_parts`.
"""

import contextlib
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakValueDictionary

from shardcache.transport.between.checksums import Data, checksum_function

RECORD = struct.Struct("<II")
"""Journal record of a finished part: its number and its CRC32C."""

# Limit on the bytes of one write call. For larger writes, ext4 allocates larger folios, which takes
# up to twice the time, and more on a busy machine.
_WRITE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class PartSums:
    """Checksums of a part that is on disk.

    Attributes:
        index: number of the part in its file, from 0.
        crc32c: its CRC32C.
        checksum: its checksum by the algorithm that the origin uses for the object; 0 if the origin
            has no checksum.
    """

    index: int
    crc32c: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Parts:
    """Consecutive parts of a file, filled from one body.

    Attributes:
        path: path of the file; empty for a file without a name.
        journal_path: path of the journal that lists the file's finished parts; None for no journal.
        part_bytes: size of every part of the file except the last.
        start: offset of the body's first byte, in the object as in the file; a part begins there.
        size_bytes: size of the body, that is, of all these parts.
        algorithm: a checksum from `ALGORITHMS` to compute in addition to CRC32C; None for none.
        fd: descriptor, in this process, of a file without a name; None if the file has a path.
    """

    path: str
    journal_path: str | None
    part_bytes: int
    start: int
    size_bytes: int
    algorithm: str | None = None
    fd: int | None = None

    @property
    def count(self) -> int:
        """Number of parts."""
        return -(-self.size_bytes // self.part_bytes)

    @property
    def stop(self) -> int:
        """Offset of the byte after the body's last."""
        return self.start + self.size_bytes


class PartFileError(Exception):
    """The file or its journal cannot be written; `cause` is the OSError."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


# By file, the lock by which its writers take turns: several threads that write to one file at the
# same time would only spin on the file's lock in the kernel. Locks of one process suffice, as all
# writers of a file are in one worker.
_file_locks: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
_file_locks_guard = threading.Lock()


def _lock_of(file: str) -> threading.Lock:
    """Return the lock by which the writers of a file take turns."""
    with _file_locks_guard:
        return _file_locks.setdefault(file, threading.Lock())


class PartsWriter:
    """Writes a body into the parts of a file, and records each part that is complete.

    Its methods block, and raise PartFileError.

    Args:
        fd: descriptor of the file.

    Attributes:
        finished: checksums of the parts written so far.
    """

    def __init__(self, parts: Parts, fd: int) -> None:
        self._parts = parts
        self._fd = fd
        self._file_lock = _lock_of(parts.path or f"descriptor {parts.fd}")
        self._offset = parts.start  # in the file, of the next byte to write
        # Checksums of the current part's bytes that have been written.
        self._crc32c = 0
        self._checksum = 0
        self._update_crc32c = checksum_function("crc32c")
        # Computes the origin's checksum; None if there is none, or if it is the CRC32C itself.
        self._update_checksum = None
        if parts.algorithm is not None and parts.algorithm != "crc32c":
            self._update_checksum = checksum_function(parts.algorithm)
        self.finished: list[PartSums] = []

    def write(self, data: memoryview) -> None:
        """Append bytes of the body."""
        part_bytes = self._parts.part_bytes
        while data:
            part_start = self._offset - self._offset % part_bytes
            part_stop = min(self._parts.stop, part_start + part_bytes)
            block = data[: part_stop - self._offset]  # up to the end of the current part

            self._crc32c = self._update_crc32c(block, self._crc32c)
            if self._update_checksum is not None:
                self._checksum = self._update_checksum(block, self._checksum)

            with self._file_lock, _disk_errors():
                write_all(self._fd, block, self._offset)
                self._offset += len(block)
                if self._offset == part_stop:
                    self._finish()
            data = data[len(block) :]

    def _finish(self) -> None:
        """Record the part whose last byte was just written."""
        index = (self._offset - 1) // self._parts.part_bytes
        if self._parts.journal_path is not None:
            _append_record(self._parts.journal_path, RECORD.pack(index, self._crc32c))

        # If the origin's checksum is the CRC32C, it was computed only once.
        checksum = self._crc32c if self._parts.algorithm == "crc32c" else self._checksum
        self.finished.append(PartSums(index, self._crc32c, checksum))
        self._crc32c = 0
        self._checksum = 0


@contextlib.contextmanager
def writing(parts: Parts) -> Iterator[PartsWriter]:
    """Open the parts' file for the block, and yield its writer. Raises PartFileError."""
    with _disk_errors():
        fd = _open(parts)
    try:
        yield PartsWriter(parts, fd)
    finally:
        os.close(fd)


def _open(parts: Parts) -> int:
    """Open the parts' file; return its descriptor, which the caller closes. Raises OSError."""
    if parts.fd is None:
        return os.open(parts.path, os.O_WRONLY | os.O_CLOEXEC)
    return os.dup(parts.fd)


def write_parts(parts: Parts, body: Data) -> list[PartSums]:
    """Write a whole body; return its parts' checksums. Blocks; raises PartFileError."""
    with writing(parts) as writer:
        writer.write(memoryview(body))
    return writer.finished


def _append_record(path: str, record: bytes) -> None:
    """Append a record to a journal. Blocks; raises OSError."""
    # The built-in `open` would make six system calls in place of three, and at each call, another
    # thread may take the interpreter lock.
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.write(fd, record)
    finally:
        os.close(fd)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write bytes at an offset of a file. Blocks; raises OSError."""
    while data:
        count = os.pwrite(fd, data[:_WRITE_BYTES], offset)
        data = data[count:]
        offset += count


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """Raise PartFileError in place of an OSError in the block, which comes from the disk."""
    try:
        yield
    except OSError as exn:
        raise PartFileError(exn) from exn
