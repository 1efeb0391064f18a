"""The samples of a tar as flat tables: cheap to build, to write, to read, and to look up samples in.

The sidecar file of a shard has its facts as JSON, and these tables:

    prologue        magic, seven counts, CRC-32 of the tables
    header          JSON, `header_bytes` long
    CRC-32          of prologue and header
    tables          starts u64[members]       ends u64[members]      member_ends u64[samples]
                    key_ends u64[samples]     extension_ends u64[extensions]
                    faults u64[3 x faults]    extension_ids u32[members]
                    keys u8[key_bytes]        extensions u8[extension_bytes]

Numbers are in native byte order, since a sidecar never leaves its node. The header can be read without the tables, so
that a daemon with many shards can look one up quickly. Nothing in the file is executed, and every number in it is
checked before use.
"""

import enum
import json
import mmap
import operator
import os
import struct
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, Self, TypeAlias

from shardcache.errors import CorruptShardError

_SHOWN_CHARS = 200
_MAGIC = b"shardix1"
_PROLOGUE = struct.Struct("=8s7QI")
_BLOCK_BYTES = 256 * 1024
_CRC = struct.Struct("=I")

Table: TypeAlias = memoryview  # of u64 or u32
Tables: TypeAlias = "Samples | TarIndex"


class Fault(enum.IntEnum):
    """A reason why a sample is unusable although its shard is intact."""

    DUPLICATE = 1
    RESERVED = 2
    SPARSE = 3
    LINK = 4


_FAULTS = {
    Fault.DUPLICATE: "the sample {!r} has two members with the extension {!r}",
    Fault.RESERVED: "the sample {!r} has a member with the reserved extension {!r}",
    Fault.SPARSE: "the member {1!r} of the sample {0!r} is stored as a sparse file, which cannot be mapped",
    Fault.LINK: "the member {1!r} of the sample {0!r} is a hard link to a file that is not in the tar before it",
}


class TarBytes(Protocol):
    """The bytes of a tar, by range."""

    def __getitem__(self, run: slice, /) -> bytes: ...


def key_of(tables: Tables, sample: int) -> str:
    """Return the `__key__` of a sample."""
    start = tables.key_ends[sample - 1] if sample else 0
    return str(tables.keys[start : tables.key_ends[sample]], "utf-8", "surrogateescape")


def keys_of(tables: Tables) -> list[bytes]:
    """Return the key of each sample, encoded as in the tar."""
    keys, ends = bytes(tables.keys), tables.key_ends
    return [keys[start:end] for start, end in pairwise(chain((0,), ends))]


def fault_of(tables: Tables, sample: int) -> str | None:
    """Return the reason why a sample is unusable, or None if it is usable."""
    if sample not in tables.faults:
        return None
    fault, extension = tables.faults[sample]
    return _FAULTS[fault].format(key_of(tables, sample)[:_SHOWN_CHARS], tables.extensions[extension][:_SHOWN_CHARS])


def member_spans(tables: Tables, extension: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of each sample's member with an extension; (0, 0) for a sample without one."""
    extension = extension.lower()
    wanted = tables.extensions.index(extension) if extension in tables.extensions else -1
    starts, ends, extension_ids, first = tables.starts, tables.ends, tables.extension_ids, 0
    for last in tables.member_ends:
        for each in range(first, last):
            if extension_ids[each] == wanted:
                yield starts[each], ends[each]
                break
        else:
            yield 0, 0
        first = last


def _u64() -> "array[int]":
    return array("Q")


@dataclass(slots=True)
class Samples:
    """The samples of one tar, as flat tables."""

    starts: "array[int]" = field(default_factory=_u64)  # of each member, offset in the tar, in bytes
    ends: "array[int]" = field(default_factory=_u64)  # of each member, likewise, exclusive
    extension_ids: "array[int]" = field(default_factory=lambda: array("I"))  # of each member, its index in `extensions`
    member_ends: "array[int]" = field(default_factory=_u64)  # of each complete sample's members, exclusive
    keys: bytearray = field(default_factory=bytearray)  # all of them, concatenated
    key_ends: "array[int]" = field(default_factory=_u64)  # of each key
    extensions: list[str] = field(default_factory=list)  # lower-cased, each once, in order of appearance
    faults: dict[int, tuple[Fault, int]] = field(default_factory=dict)  # sample → its fault, the extension's index

    def __len__(self) -> int:
        return len(self.key_ends)

    def begin(self, key: bytes) -> None:
        """Complete the current sample and begin another."""
        self.end()
        self.keys += key
        self.key_ends.append(len(self.keys))

    def end(self) -> None:
        """Complete the current sample, if there is one."""
        if len(self.member_ends) < len(self.key_ends):
            self.member_ends.append(len(self.starts))


class _Counts(NamedTuple):
    """Lengths of the file's sections: in bytes (`_bytes`) or entries."""

    header_bytes: int
    samples: int
    members: int
    extensions: int
    faults: int
    key_bytes: int
    extension_bytes: int

    def table_sizes(self) -> list[int]:
        """Sizes of the tables, in the file's order."""
        long_tables = (self.members, self.members, self.samples, self.samples, self.extensions, 3 * self.faults)
        return [*(8 * count for count in long_tables), 4 * self.members, self.key_bytes, self.extension_bytes]

    def file_bytes(self) -> int:
        return _PROLOGUE.size + self.header_bytes + _CRC.size + sum(self.table_sizes())


def write(path: Path, header: dict[str, Any], samples: Samples, limit_bytes: int | None = None) -> int:
    """Write a sidecar, unless it would exceed `limit_bytes`; return its size. Blocks.

    It is not synced to disk. The `size_bytes` of `header` is the size of the tar. Raises OSError if
    it cannot be written.
    """
    header_json = json.dumps(header, separators=(",", ":")).encode()
    names = [name.encode("utf-8", "surrogateescape") for name in samples.extensions]
    faults = array("Q", [value for sample, (fault, name) in samples.faults.items() for value in (sample, fault, name)])
    long_tables = (samples.starts, samples.ends, samples.member_ends, samples.key_ends)
    numbers = (*long_tables, array("Q", accumulate(map(len, names))), faults, samples.extension_ids)
    tables = b"".join((*(table.tobytes() for table in numbers), samples.keys, *names))
    counts = _Counts(
        header_bytes=len(header_json),
        samples=len(samples),
        members=len(samples.starts),
        extensions=len(names),
        faults=len(samples.faults),
        key_bytes=len(samples.keys),
        extension_bytes=sum(map(len, names)),
    )
    if limit_bytes is None or counts.file_bytes() <= limit_bytes:
        head = _PROLOGUE.pack(_MAGIC, *counts, zlib.crc32(tables)) + header_json
        with open(path, "wb") as file:
            file.write(head + _CRC.pack(zlib.crc32(head)))
            file.write(tables)
    return counts.file_bytes()


def read_header(path: Path) -> dict[str, Any]:
    """Return the JSON header of a sidecar, without its tables. Blocks. Raises CorruptShardError, OSError."""
    with open(path, "rb") as file:
        return _read_head(file, path)[0]


def _read_head(file: BinaryIO, path: Path) -> tuple[dict[str, Any], _Counts, int]:
    """Return header, counts, and the expected CRC-32 of the tables."""
    size_bytes = os.fstat(file.fileno()).st_size
    prologue = file.read(_PROLOGUE.size)
    if len(prologue) < _PROLOGUE.size or not prologue.startswith(_MAGIC):
        raise _damaged(path, "it does not begin with a sidecar's prologue")
    _, *numbers, tables_crc = _PROLOGUE.unpack(prologue)
    counts = _Counts(*numbers)
    if counts.file_bytes() != size_bytes:
        raise _damaged(path, f"it has {size_bytes} bytes instead of {counts.file_bytes()}")
    header = file.read(counts.header_bytes)
    if file.read(_CRC.size) != _CRC.pack(zlib.crc32(prologue + header)):
        raise _damaged(path, "the checksum of its header does not match")
    try:
        parsed = json.loads(header)
    except (ValueError, RecursionError) as exn:
        raise _damaged(path, f"its header is not JSON ({exn})") from exn
    if not isinstance(parsed, dict) or not isinstance(parsed.get("size_bytes"), int):
        raise _damaged(path, "its header lacks the size of the tar")
    return parsed, counts, tables_crc


@dataclass(frozen=True, slots=True, repr=False)
class TarIndex:
    """Locations of a shard's samples; immutable, memory-mapped (20 bytes per member, 16 plus its key per sample).

    The tables are those of `Samples`; every offset lies within the tar's `size_bytes`.
    """

    header: dict[str, Any]  # the sidecar's
    starts: Table
    ends: Table
    extension_ids: Table
    member_ends: Table
    keys: memoryview
    key_ends: Table
    extensions: list[str]
    faults: dict[int, tuple[Fault, int]]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map and check a sidecar. Blocks. Raises CorruptShardError if it is damaged, OSError."""
        with open(path, "rb") as file:
            header, counts, tables_crc = _read_head(file, path)
            begin = file.tell()
            # Read it before mapping it: a disk error is an exception here, but SIGBUS in a mapping.
            crc = 0
            while block := file.read(_BLOCK_BYTES):
                crc = zlib.crc32(block, crc)
            if crc != tables_crc:
                raise _damaged(path, "the checksum of its tables does not match")
            # Map it rather than load it: readers hold many indexes, and share their pages.
            with memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)) as mapped:
                tables = mapped[begin:]
        index = cls._of_tables(header, counts, tables, path)
        if not index._is_sound():
            index.close()
            raise _damaged(path, "its tables contradict each other or the size of the tar")
        return index

    def close(self) -> None:
        """Release the tables, and with them the mapping; must not be called while they are in use."""
        for table in (self.starts, self.ends, self.extension_ids, self.member_ends, self.keys, self.key_ends):
            table.release()

    @classmethod
    def _of_tables(cls, header: dict[str, Any], counts: _Counts, tables: memoryview, path: Path) -> Self:
        parts, at = [], 0
        for size_bytes in counts.table_sizes():
            parts.append(tables[at : at + size_bytes])
            at += size_bytes
        starts, ends, member_ends, key_ends, extension_ends, faults = (part.cast("Q") for part in parts[:6])
        try:
            named_faults = {faults[at]: (Fault(faults[at + 1]), faults[at + 2]) for at in range(0, len(faults), 3)}
        except ValueError as exn:
            raise _damaged(path, f"it names an unknown fault ({exn})") from exn
        return cls(
            header=header,
            starts=starts,
            ends=ends,
            extension_ids=parts[6].cast("I"),
            member_ends=member_ends,
            keys=parts[7],
            key_ends=key_ends,
            extensions=_cut(bytes(parts[8]), extension_ends),
            faults=named_faults,
        )

    def _is_sound(self) -> bool:
        """Return True if every offset and index is within bounds."""
        names = len(self.extensions)
        return (
            max(self.ends, default=0) <= self.header["size_bytes"]
            and all(map(operator.le, self.starts, self.ends))
            and max(self.extension_ids, default=-1) < names
            and _partitions(self.member_ends, len(self.starts))
            and _partitions(self.key_ends, len(self.keys))
            and all(sample < len(self) and name < names for sample, (_, name) in self.faults.items())
        )

    def __len__(self) -> int:
        return len(self.member_ends)

    def __repr__(self) -> str:
        return f"TarIndex(samples={len(self)}, members={len(self.starts)}, faults={len(self.faults)})"


def _partitions(ends: Table, total: int) -> bool:
    """Return True if `ends` is ascending and ends with `total`."""
    return (ends[-1] if len(ends) else 0) == total and all(map(operator.le, ends, islice(ends, 1, None)))


def _cut(joined: bytes, ends: Table) -> list[str]:
    return [joined[start:end].decode("utf-8", "surrogateescape") for start, end in zip([0, *ends], ends, strict=False)]


def _damaged(path: Path, what: str) -> CorruptShardError:
    return CorruptShardError(f"the sidecar {path} is damaged: {what}")
