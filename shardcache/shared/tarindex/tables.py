"""The samples of a tar as flat tables: cheap to build, write and read, and to look samples up in.

A table is an array with a number for each member, sample or extension. A sidecar is the index file
that the cache keeps next to a shard. It has these sections, in order:

    prologue        magic, seven counts, CRC-32 of the tables
    header          JSON, `header_bytes` long
    CRC-32          of prologue and header
    tables          starts u64[members]       ends u64[members]      member_ends u64[samples]
                    key_ends u64[samples]     extension_ends u64[extensions]
                    faults u64[3 x faults]    extension_ids u32[members]
                    keys u8[key_bytes]        extensions u8[extension_bytes]

`Samples` describes the tables. Numbers are in native byte order, since a sidecar never leaves its
node. The header can be read without the tables, so that a daemon with many shards can look one up
quickly. Nothing in the file is executed, and every number in it is checked before use.
"""

import enum
import json
import mmap
import os
import struct
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, Self, TypeAlias

from shardcache.shared.exceptions import CorruptShardError
from shardcache.shared.tarindex.number_tables import (
    NumberTable,
    are_below,
    are_ranges,
    is_partition,
)

_SHOWN_CHARS = 200  # messages quote at most this much of a name
_MAGIC = b"shardix1"
_PROLOGUE = struct.Struct("=8s7QI")
_READ_BYTES = 256 * 1024
_CRC = struct.Struct("=I")
_NUMBERS_PER_FAULT = 3  # number of the sample, `Fault`, id of the extension

Tables: TypeAlias = "Samples | TarIndex"


class Fault(enum.IntEnum):
    """A reason why a sample is unusable although its shard is intact; see `_REASONS`."""

    DUPLICATE = 1
    RESERVED = 2
    SPARSE = 3
    LINK = 4
    JSON = 5
    EXAMPLE = 6


_REASONS = {
    Fault.DUPLICATE: "the sample {key!r} has two members with the extension {extension!r}",
    Fault.RESERVED: "the sample {key!r} has a member with the reserved extension {extension!r}",
    Fault.SPARSE: "the member {extension!r} of the sample {key!r} is stored as a sparse file, "
    "which cannot be mapped",
    Fault.LINK: "the member {extension!r} of the sample {key!r} is a hard link to a file that is "
    "not in the tar before it",
    Fault.JSON: "the line of the sample {key!r} is not a JSON object in UTF-8",
    Fault.EXAMPLE: "the record of the sample {key!r} is not a tf.train.Example, as the first one "
    "is",
}
_REMEDIES = {
    Fault.JSON: "write one JSON object a line; with jq, `jq -c . FILE` names the first bad one",
    Fault.EXAMPLE: "write Examples and other records into files of their own",
}
_REMEDY_FOR_MEMBERS = (
    "rewrite the shard with the members of each sample as plain files of different extensions"
)


class TarBytes(Protocol):
    """The bytes of a tar, by range."""

    def __getitem__(self, byte_range: slice, /) -> bytes: ...


def key_of(tables: Tables, sample: int) -> str:
    """Return the `__key__` of a sample."""
    start = tables.key_ends[sample - 1] if sample else 0
    return str(tables.keys[start : tables.key_ends[sample]], "utf-8", "surrogateescape")


def keys_of(tables: Tables) -> list[bytes]:
    """Return the key of each sample, encoded as in the tar."""
    keys = bytes(tables.keys)
    ends = tables.key_ends
    return [keys[start:end] for start, end in pairwise(chain((0,), ends))]


def members_of(tables: Tables, sample: int) -> range:
    """Return the numbers of a sample's members."""
    first = tables.member_ends[sample - 1] if sample else 0
    return range(first, tables.member_ends[sample])


def fault_of(tables: Tables, sample: int) -> str | None:
    """Return in words why a sample is unusable, or None if it is usable."""
    if sample not in tables.faults:
        return None
    fault, extension_id = tables.faults[sample]
    return _REASONS[fault].format(
        key=key_of(tables, sample)[:_SHOWN_CHARS],
        extension=tables.extensions[extension_id][:_SHOWN_CHARS],
    )


def fault_remedy(tables: Tables, sample: int) -> str:
    """Return what to do about a sample that is unusable."""
    fault, _ = tables.faults[sample]
    return _REMEDIES.get(fault, _REMEDY_FOR_MEMBERS)


def member_spans(tables: Tables, extension: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of the member with an extension, for each sample; (0, 0) if it has none.

    If a sample has several, as a line of JSON may, the last one counts.
    """
    extension = extension.lower()
    lowered = [name.lower() for name in tables.extensions]
    wanted_id = -1  # an id that no member has
    if extension in lowered:
        wanted_id = lowered.index(extension)
    starts = tables.starts
    ends = tables.ends
    extension_ids = tables.extension_ids
    first = 0
    for stop in tables.member_ends:
        for member in reversed(range(first, stop)):
            if extension_ids[member] == wanted_id:
                yield starts[member], ends[member]
                break
        else:  # no member of the sample has the extension
            yield 0, 0
        first = stop


def _u64() -> "array[int]":
    return array("Q")


def _u32() -> "array[int]":
    return array("I")


@dataclass(slots=True)
class Samples:
    """The samples of one tar, as flat tables.

    Attributes:
        starts: for each member, the offset in the tar at which its content begins, in bytes.
        ends: for each member, the offset of the byte after its content.
        extension_ids: for each member, the id of its extension: its index in `extensions`.
        member_ends: for each complete sample, the number of the member after its last one.
        keys: the keys of all samples, concatenated.
        key_ends: for each sample, the offset in `keys` of the byte after its key.
        extensions: the lower-cased extensions, each once, in order of appearance.
        faults: for each unusable sample, by its number: the fault, and the id of the extension of
            the member that has it.
        encodings: for each extension, how its values are stored; empty if all are plain bytes.
    """

    starts: "array[int]" = field(default_factory=_u64)
    ends: "array[int]" = field(default_factory=_u64)
    extension_ids: "array[int]" = field(default_factory=_u32)
    member_ends: "array[int]" = field(default_factory=_u64)
    keys: bytearray = field(default_factory=bytearray)
    key_ends: "array[int]" = field(default_factory=_u64)
    extensions: list[str] = field(default_factory=list)
    faults: dict[int, tuple[Fault, int]] = field(default_factory=dict)
    encodings: list[str] = field(default_factory=list)

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
    """Lengths of a sidecar's sections: in bytes if the name ends in `_bytes`, else in entries."""

    header_bytes: int
    samples: int
    members: int
    extensions: int
    faults: int
    key_bytes: int
    extension_bytes: int

    def table_sizes(self) -> list[int]:
        """Return the sizes of the tables in bytes, in the file's order."""
        return [
            8 * self.members,  # starts
            8 * self.members,  # ends
            8 * self.samples,  # member_ends
            8 * self.samples,  # key_ends
            8 * self.extensions,  # extension_ends
            8 * _NUMBERS_PER_FAULT * self.faults,
            4 * self.members,  # extension_ids
            self.key_bytes,
            self.extension_bytes,
        ]

    def file_bytes(self) -> int:
        """Return the size of the sidecar in bytes."""
        return _PROLOGUE.size + self.header_bytes + _CRC.size + sum(self.table_sizes())


def write(
    path: Path,
    header: dict[str, Any],
    samples: Samples,
    limit_bytes: int | None = None,
) -> int:
    """Write a sidecar, unless it would be too large; return its size in bytes. Blocks.

    The sidecar is not synced to disk. Raises OSError if it cannot be written.

    Args:
        path: path of the sidecar.
        header: facts about the tar; `size_bytes`, the tar's size, is required.
        samples: the samples of the tar.
        limit_bytes: maximum size of the sidecar; None for no maximum.
    """
    header_json = json.dumps(header, separators=(",", ":")).encode()
    extensions = [name.encode("utf-8", "surrogateescape") for name in samples.extensions]
    faults = array("Q")
    for sample, (fault, extension_id) in samples.faults.items():
        faults.extend((sample, fault, extension_id))
    tables = b"".join(
        (
            samples.starts.tobytes(),
            samples.ends.tobytes(),
            samples.member_ends.tobytes(),
            samples.key_ends.tobytes(),
            array("Q", accumulate(map(len, extensions))).tobytes(),
            faults.tobytes(),
            samples.extension_ids.tobytes(),
            samples.keys,
            *extensions,
        ),
    )
    counts = _Counts(
        header_bytes=len(header_json),
        samples=len(samples),
        members=len(samples.starts),
        extensions=len(extensions),
        faults=len(samples.faults),
        key_bytes=len(samples.keys),
        extension_bytes=sum(map(len, extensions)),
    )
    size_bytes = counts.file_bytes()
    if limit_bytes is None or size_bytes <= limit_bytes:
        head = _PROLOGUE.pack(_MAGIC, *counts, zlib.crc32(tables)) + header_json
        with open(path, "wb") as file:
            file.write(head + _CRC.pack(zlib.crc32(head)))
            file.write(tables)
    return size_bytes


def read_header(path: Path) -> dict[str, Any]:
    """Return the JSON header of a sidecar, without its tables. Blocks.

    Raises CorruptShardError, OSError.
    """
    with open(path, "rb") as file:
        header, _, _ = _read_head(file, path)
    return header


def _read_head(file: BinaryIO, path: Path) -> tuple[dict[str, Any], _Counts, int]:
    """Read a sidecar up to its tables: return header, counts, and the tables' expected CRC-32."""
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
    """Locations of a shard's samples, immutable and memory-mapped.

    An index takes 20 bytes per member, and 16 bytes plus the key per sample. The tables have the
    meaning that they have in `Samples`; every offset lies within the tar's `size_bytes`.

    Attributes:
        path: path of the sidecar.
        header: JSON object of the sidecar, with the tar's `size_bytes`.
    """

    path: Path
    header: dict[str, Any]
    starts: NumberTable
    ends: NumberTable
    extension_ids: NumberTable
    member_ends: NumberTable
    keys: memoryview
    key_ends: NumberTable
    extensions: list[str]
    faults: dict[int, tuple[Fault, int]]

    @classmethod
    def open(cls, path: Path, *, check_members: bool = True) -> Self:
        """Map and check a sidecar. Blocks. Raises CorruptShardError if it is damaged, OSError.

        Args:
            path: path of the sidecar.
            check_members: False for a caller that reads few members. It has to check these members
                itself, or to call `check_members()`.
        """
        with open(path, "rb") as file:
            header, counts, tables_crc = _read_head(file, path)
            begin = file.tell()
            # The file is read before it is mapped, since a disk error while reading is an
            # exception, but the same error in a mapping kills the process with SIGBUS.
            crc = 0
            while piece := file.read(_READ_BYTES):
                crc = zlib.crc32(piece, crc)
            if crc != tables_crc:
                raise _damaged(path, "the checksum of its tables does not match")
            # The tables are mapped rather than loaded: processes have many indexes open, and share
            # their pages. `tables` keeps the mapping after `mapped` is released.
            with memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)) as mapped:
                tables = mapped[begin:]
        index = cls._of_tables(header, counts, tables, path)
        try:
            index.check_samples()
            if check_members:
                index.check_members()
        except CorruptShardError:
            index.close()
            raise
        return index

    def close(self) -> None:
        """Release the tables, and with them the mapping; no table may be in use."""
        for table in (
            self.starts,
            self.ends,
            self.extension_ids,
            self.member_ends,
            self.keys,
            self.key_ends,
        ):
            table.release()

    def check_samples(self) -> None:
        """Raise CorruptShardError unless the samples partition the members and the keys."""
        extension_count = len(self.extensions)
        partitions_members = is_partition(self.member_ends, len(self.starts))
        partitions_keys = is_partition(self.key_ends, len(self.keys))
        are_faults_valid = all(
            sample < len(self) and extension_id < extension_count
            for sample, (_, extension_id) in self.faults.items()
        )
        if not (partitions_members and partitions_keys and are_faults_valid):
            raise self._contradiction()

    def check_members(self) -> None:
        """Raise CorruptShardError unless each member lies in the tar and has an extension."""
        lie_in_tar = are_ranges(self.starts, self.ends, self.header["size_bytes"])
        if not lie_in_tar or not are_below(self.extension_ids, len(self.extensions)):
            raise self._contradiction()

    @classmethod
    def _of_tables(
        cls,
        header: dict[str, Any],
        counts: _Counts,
        tables: memoryview,
        path: Path,
    ) -> Self:
        """Build the index from a sidecar's tables, without checking that the tables agree."""
        pieces = []  # a slice for each table, in the order of `table_sizes`
        start = 0
        for size_bytes in counts.table_sizes():
            pieces.append(tables[start : start + size_bytes])
            start += size_bytes
        *u64_pieces, extension_ids, keys, extensions = pieces
        starts, ends, member_ends, key_ends, extension_ends, faults = (
            piece.cast("Q") for piece in u64_pieces
        )

        fault_of_sample: dict[int, tuple[Fault, int]] = {}
        try:
            for first in range(0, len(faults), _NUMBERS_PER_FAULT):
                sample = faults[first]
                fault_of_sample[sample] = (Fault(faults[first + 1]), faults[first + 2])
        except ValueError as exn:
            raise _damaged(path, f"it names an unknown fault ({exn})") from exn
        return cls(
            path=path,
            header=header,
            starts=starts,
            ends=ends,
            extension_ids=extension_ids.cast("I"),
            member_ends=member_ends,
            keys=keys,
            key_ends=key_ends,
            extensions=_texts(bytes(extensions), extension_ends),
            faults=fault_of_sample,
        )

    def _contradiction(self) -> CorruptShardError:
        return _damaged(self.path, "its tables contradict each other or the size of the tar")

    def __len__(self) -> int:
        return len(self.member_ends)

    def __repr__(self) -> str:
        return (
            f"TarIndex(samples={len(self)}, members={len(self.starts)}, faults={len(self.faults)})"
        )


def _texts(joined: bytes, ends: NumberTable) -> list[str]:
    """Split concatenated texts, given the offset at which each text ends."""
    pieces = [joined[start:end] for start, end in pairwise((0, *ends))]
    return [piece.decode("utf-8", "surrogateescape") for piece in pieces]


def _damaged(path: Path, what: str) -> CorruptShardError:
    return CorruptShardError(f"the sidecar {path} is damaged: {what}")
