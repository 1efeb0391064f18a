"""Members grouped into samples, by WebDataset's rules (webdataset 1.0.2, tariterators.py)."""

from __future__ import annotations

import enum
import os
import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from shardcache.tarindex.members import Member, Tar

_METADATA = re.compile(rb"__[^/]*__($|/)")

# Keys that a sample has of itself, or that WebDataset gives a meaning: no member may take their place.
_RESERVED = frozenset({"__key__", "__url__", "__bad__"})


class Fault(enum.IntEnum):
    """Why a sample cannot be given, though its shard is good."""

    DUPLICATE = 1
    RESERVED = 2
    SPARSE = 3

    def explain(self, key: str, extension: str) -> str:
        """Return one sentence about the sample `key` and the member that is to blame."""
        match self:
            case Fault.DUPLICATE:
                return f"the sample {key!r} has two members with the extension {extension!r}"
            case Fault.RESERVED:
                return f"the sample {key!r} has a member with the reserved extension {extension!r}"
            case Fault.SPARSE:
                return f"the member {extension!r} of the sample {key!r} is stored sparse, which cannot be mapped"


def _spans() -> array[int]:
    return array("Q")


def _numbers() -> array[int]:
    return array("I")


@dataclass(slots=True)
class Samples:
    """The samples of one tar, as flat tables.

    Attributes:
        starts, ends: offset in the tar, in bytes, of each member's first byte and of the byte behind its last.
        extension_ids: each member's number in `extensions`.
        member_ends: for each sample, the number of the member behind its last.
        keys, key_ends: all keys, joined, and where each ends.
        extensions: lower-cased, each once, in the order of appearance.
        faults: sample → why it is bad, and the number of the extension to blame.
    """

    starts: array[int] = field(default_factory=_spans)
    ends: array[int] = field(default_factory=_spans)
    extension_ids: array[int] = field(default_factory=_numbers)
    member_ends: array[int] = field(default_factory=_spans)
    keys: bytearray = field(default_factory=bytearray)
    key_ends: array[int] = field(default_factory=_spans)
    extensions: list[str] = field(default_factory=list)
    faults: dict[int, tuple[Fault, int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.key_ends)

    def begin(self, key: bytes) -> None:
        """End the present sample and begin another."""
        self.end()
        self.keys += key
        self.key_ends.append(len(self.keys))

    def end(self) -> None:
        """End the present sample, if there is one."""
        if len(self.member_ends) < len(self.key_ends):
            self.member_ends.append(len(self.starts))


def index_tar(path: Path, url: str, *, require_end: bool = True) -> Samples:
    """Walk the tar at `path` and return its samples. Blocks.

    Links, directories, devices and `__x__` members are left out, as WebDataset leaves them out. A sample with two
    members of one extension, over which WebDataset raises, and one with a sparse member, whose content lies nowhere
    in one piece, are recorded as faults: the others stay usable.

    Args:
        url: named in errors.
        require_end: whether a tar without an end-of-archive block is an error.

    Raises:
        NotATarError: the file is no tar.
        TruncatedShardError: it ends early.
        CorruptShardError: one of its headers is damaged.
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return group(Tar(fd, url, require_end=require_end))
    finally:
        os.close(fd)


def group(members: Iterable[Member]) -> Samples:
    """Group consecutive members with one key into samples."""
    samples = Samples()
    starts, ends, extension_ids, key_ends = samples.starts, samples.ends, samples.extension_ids, samples.key_ends
    extensions = _Extensions(samples.extensions)
    current = b""
    for name, start_byte, end_byte, sparse in members:
        key, extension = split_name(name)
        if not key or (name.startswith(b"__") and _is_metadata(name)):
            continue
        if key != current:
            samples.begin(key)
            current = key
        number = extensions.number(extension)
        fault = extensions.fault(number, len(key_ends), sparse)
        if fault is None:
            starts.append(start_byte)
            ends.append(end_byte)
            extension_ids.append(number)
        else:
            samples.faults.setdefault(len(samples) - 1, (fault, number))
    samples.end()
    return samples


def split_name(name: bytes) -> tuple[bytes, bytes]:
    """Split a member's name at the first dot of its last component; the key is empty where there is none.

    The same as matching `^((?:.*/|)[^.]+)[.]([^/]*)$`, to the letter: line feeds, which `.` does not match, and hidden
    files included. In linear time, which the regular expression's backtracking does not grant on hostile names.
    """
    stem, dotted, rest = name.partition(b".")
    if stem and dotted and b"/" not in rest:
        return stem, rest  # what follows is about dots in folders' names, and names that begin with one
    line_end = name.find(b"\n")
    start = name.rfind(b"/", 0, line_end if line_end >= 0 else len(name)) + 1
    dot = name.find(b".", start)
    if dot == start > 0:  # a hidden file: its folder, too, may be the key, unless a dot is in it
        start = name.rfind(b"/", 0, start - 1) + 1
        dot = name.find(b".", start)
    if dot <= start or name.find(b"/", dot) >= 0:
        return b"", b""
    return name[:dot], name[dot + 1 :]


def _is_metadata(name: bytes) -> bool:
    return (name.endswith(b"__") and b"/" not in name) or _METADATA.match(name) is not None


class _Extensions:
    """Numbers for lower-cased extensions, and what was seen of each in the present sample."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._ids: dict[bytes, int] = {}
        self._ids_of_lowered: dict[str, int] = {}
        self._last_seen: list[int] = []
        self._reserved: set[int] = set()

    def number(self, extension: bytes) -> int:
        """Return the number of an extension, spelt as in the tar."""
        known = self._ids.get(extension)
        return self._learn(extension) if known is None else known

    def _learn(self, extension: bytes) -> int:
        lowered = extension.decode("utf-8", "surrogateescape").lower()
        number = self._ids_of_lowered.setdefault(lowered, len(self._names))
        if number == len(self._names):
            self._names.append(lowered)
            self._last_seen.append(-1)
            if lowered in _RESERVED:
                self._reserved.add(number)
        self._ids[extension] = number
        return number

    def fault(self, number: int, sample: int, sparse: bool) -> Fault | None:
        """Note the extension in the sample, in the order of members; say what is wrong with that."""
        if self._last_seen[number] == sample:
            return Fault.DUPLICATE
        self._last_seen[number] = sample
        if sparse:
            return Fault.SPARSE
        return Fault.RESERVED if number in self._reserved else None
