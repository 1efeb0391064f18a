"""Members grouped into samples, by WebDataset's rules (webdataset 1.0.2, tariterators.py)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from shardcache.tarindex.members import Member, Tar
from shardcache.tarindex.tables import Fault, Samples

_METADATA = re.compile(rb"__[^/]*__($|/)")

# Keys that a sample has of itself, or that WebDataset gives a meaning: no member may take their place.
_RESERVED = frozenset({"__key__", "__url__", "__bad__"})


def index_tar(path: Path, url: str, *, require_end: bool = True, ignore_trailing_data: bool = False) -> Samples:
    """Walk the tar at `path` and return its samples. Blocks.

    Links, directories, devices and `__x__` members are left out, as WebDataset leaves them out. A sample with two
    members of one extension, over which WebDataset raises, and one with a sparse member, whose content lies nowhere
    in one piece, are recorded as faults: the others stay usable.

    Args:
        url: named in errors.
        require_end: refuse a tar without an end-of-archive block.
        ignore_trailing_data: accept a tar with data behind that block.

    Raises:
        NotATarError: the file is no tar.
        TruncatedShardError: it ends early.
        TrailingDataError: data follow its end.
        CorruptShardError: one of its headers is damaged.
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(at: int, least_bytes: int, most_bytes: int) -> bytes:
        return os.pread(fd, most_bytes, at)

    try:
        size_bytes = os.fstat(fd).st_size
        tar = Tar(read, size_bytes, url, require_end=require_end, ignore_trailing_data=ignore_trailing_data)
        return group(tar)
    finally:
        os.close(fd)


def group(members: Iterable[Member]) -> Samples:
    """Group consecutive members with one key into samples."""
    grouping = Grouping()
    grouping.add(members)
    return grouping.finish()


class Grouping:
    """Samples in the making: members go in as they are found, and samples can be read off as they become whole.

    Attributes:
        samples: the tables so far; the last sample in them may not be whole.
    """

    def __init__(self) -> None:
        self.samples = Samples()
        self._extensions = _Extensions(self.samples.extensions)
        self._current = b""

    @property
    def whole(self) -> int:
        """How many samples no further member can change: all but the last, until `finish`."""
        return len(self.samples.member_ends)

    def add(self, members: Iterable[Member]) -> None:
        """Go on with the members that come next in the tar."""
        samples, extensions, current = self.samples, self._extensions, self._current
        starts, ends, extension_ids, key_ends = samples.starts, samples.ends, samples.extension_ids, samples.key_ends
        for name, start_byte, end_byte, sparse in members:
            key, extension = split_name(name)
            if not key or (name.startswith(b"__") and _METADATA.match(name)):
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
        self._current = current

    def finish(self) -> Samples:
        """End the last sample, for the tar has ended; return them all."""
        self.samples.end()
        return self.samples


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
