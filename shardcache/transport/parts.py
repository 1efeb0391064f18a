"""Parts of a file on disk: checksummed, written, and recorded in a journal."""

import contextlib
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

Data: TypeAlias = bytes | memoryview

RECORD = struct.Struct("<II")
"""Journal record of a finished part: its number and its CRC32C."""


@dataclass(frozen=True, slots=True)
class PartSums:
    """Checksums of the part number `index`, which is on disk."""

    index: int
    crc32c: int
    checksum: int  # in the algorithm of the origin's checksum; 0 if there is none


@dataclass(frozen=True, slots=True)
class Parts:
    """Consecutive parts of a file, filled from one body."""

    path: str  # empty for a file without a name
    journal_path: str | None  # of the finished parts
    part_bytes: int  # of every part but the file's last
    start: int  # of the first byte, in the object and in the file; the start of a part
    size_bytes: int  # of the body
    algorithm: str | None = None  # a checksum from `ALGORITHMS` to compute in addition to CRC32C
    fd: int | None = None  # descriptor, in this process, of a file without a name

    @property
    def count(self) -> int:
        """Number of parts."""
        return -(-self.size_bytes // self.part_bytes)

    @property
    def stop(self) -> int:
        """Offset of the byte after the last."""
        return self.start + self.size_bytes


# For one larger write, ext4 allocates larger folios, which takes up to twice the time, and more on a busy machine.
_WRITE_BYTES = 256 * 1024


class PartFileError(Exception):
    """The file or its journal cannot be written; `cause` is the OSError."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


# Writers of one file would only spin on its kernel lock. One lock per process suffices: a file has one worker.
_turns: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
_giving_turns = threading.Lock()


class PartsWriter:
    """Writes a body into its parts and records each complete part. Blocks; raises PartFileError."""

    def __init__(self, parts: Parts, fd: int) -> None:
        self._parts = parts
        self._fd = fd
        self._turn = _turn_of(parts.path or f"descriptor {parts.fd}")
        self._at = parts.start
        self._crc32c = self._checksum = 0
        self._update_crc32c = checksum_function("crc32c")
        self._update = None if parts.algorithm in (None, "crc32c") else checksum_function(parts.algorithm or "")
        self.finished: list[PartSums] = []  # the parts written so far

    def write(self, data: memoryview) -> None:
        """Append bytes."""
        while data:
            part_stop = min(self._parts.stop, self._at - self._at % self._parts.part_bytes + self._parts.part_bytes)
            block = data[: part_stop - self._at]
            self._crc32c = self._update_crc32c(block, self._crc32c)
            if self._update is not None:
                self._checksum = self._update(block, self._checksum)
            with self._turn, _errors():
                write_all(self._fd, block, self._at)
                self._at += len(block)
                if self._at == part_stop:
                    self._finish()
            data = data[len(block) :]

    def _finish(self) -> None:
        index = (self._at - 1) // self._parts.part_bytes
        checksum = self._crc32c if self._parts.algorithm == "crc32c" else self._checksum
        if self._parts.journal_path is not None:
            with open(self._parts.journal_path, "ab", buffering=0) as journal:
                journal.write(RECORD.pack(index, self._crc32c))
        self.finished.append(PartSums(index, self._crc32c, checksum))
        self._crc32c = self._checksum = 0


def _turn_of(file: str) -> threading.Lock:
    with _giving_turns:
        return _turns.setdefault(file, threading.Lock())


@contextlib.contextmanager
def writing(parts: Parts) -> Iterator[PartsWriter]:
    """Open the file of the parts during the block. Raises PartFileError."""
    with _errors():
        fd = os.open(parts.path, os.O_WRONLY | os.O_CLOEXEC) if parts.fd is None else os.dup(parts.fd)
    try:
        yield PartsWriter(parts, fd)
    finally:
        os.close(fd)


def write_parts(parts: Parts, body: Data) -> list[PartSums]:
    """Write a whole body. Blocks; raises PartFileError."""
    with writing(parts) as writer:
        writer.write(memoryview(body))
    return writer.finished


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write bytes at an offset of a file. Blocks; raises OSError."""
    while data:
        count = os.pwrite(fd, data[:_WRITE_BYTES], offset)
        data = data[count:]
        offset += count


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except OSError as exn:
        raise PartFileError(exn) from exn


ALGORITHMS = ("crc32c", "crc32", "crc64nvme")
"""Checksums that origins keep of objects, and that are made of those of their parts."""


@cache
def checksum_function(algorithm: str) -> Callable[[Data, int], int]:
    """Return the function that computes one of `ALGORITHMS`: of more bytes, and of those before them."""
    if algorithm == "crc32":  # what SDKs store by default; three times as fast as zlib's, four times as the CRT's
        from isal import isal_zlib

        return isal_zlib.crc32
    return getattr(_crt(), algorithm)  # type: ignore[no-any-return]


def crc32c(data: Data, earlier: int) -> int:
    """Return the CRC32C of `data` after bytes whose CRC32C is `earlier`."""
    return checksum_function("crc32c")(data, earlier)


def combined(algorithm: str, parts: Sequence[int], part_bytes: int, size_bytes: int) -> int:
    """Return the checksum of a whole from those of its parts, all of `part_bytes` except the last."""
    combine = getattr(_crt(), f"combine_{algorithm}")
    whole = 0
    for index, part in enumerate(parts):
        whole = combine(whole, part, min(part_bytes, size_bytes - index * part_bytes))
    return whole


def _crt() -> Any:
    from awscrt import checksums  # 50 ms, which a daemon that starts need not spend

    return checksums
