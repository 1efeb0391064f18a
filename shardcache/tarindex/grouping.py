"""Grouping of members into samples by WebDataset's rules (webdataset 1.0.2, tariterators.py)."""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from shardcache.errors import TornSampleError
from shardcache.tarindex.key_splits import LAST_DOT, key_split_in
from shardcache.tarindex.members import Member, Tar
from shardcache.tarindex.packed_lines import split_lines
from shardcache.tarindex.tables import Fault, Samples, key_of

_METADATA = re.compile(rb"__[^/]*__($|/)")
_SLASH = ord("/")
_SHOWN_CHARS = 200
_MACOS_FOLDER = b"__MACOSX"
_MACOS_FILE = re.compile(rb"(?:^|/)(?:\._[^/]*|\.DS_Store)\Z")

# Keys that every sample has, or that have a meaning in WebDataset: no member may replace them.
_RESERVED = frozenset({"__key__", "__url__", "__bad__"})


def index_tar(
    path: Path,
    url: str,
    *,
    require_end: bool = True,
    ignore_trailing_data: bool = False,
    require_adjacent: bool = True,
) -> Samples:
    """Walk the tar at `path` and return its samples. Blocks.

    Symbolic links, directories, devices and `__x__` members are skipped, as in WebDataset, but for
    those with lines of samples (`split_lines`); so is what macOS adds (`is_of_macos`). A hard link,
    which WebDataset skips, has the content of the file that it is linked to. A sample with two
    members of the same extension, for which WebDataset raises, and one with a member whose content
    is not contiguous or not in the tar, are recorded as faults; the other samples stay usable.

    Raises OSError, UnsupportedShardError for too many lines, what iterating a `Tar` with these
    options raises, and with `require_adjacent` TornSampleError if members of one sample are not
    adjacent.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(at: int, min_bytes: int, max_bytes: int) -> bytes:
        return os.pread(fd, max_bytes, at)

    try:
        size_bytes = os.fstat(fd).st_size
        tar = Tar(
            read,
            size_bytes,
            url,
            require_end=require_end,
            ignore_trailing_data=ignore_trailing_data,
        )
        samples = group(split_lines(tar, read, url), splitter_of(url))
    finally:
        os.close(fd)
    if require_adjacent:
        Adjacency(samples).check(url)
    return samples


def group(members: Iterable[Member], split: "Splitter | None" = None) -> Samples:
    """Group consecutive members with the same key into samples."""
    grouping = Grouping(split)
    grouping.add(members)
    return grouping.finish()


class Grouping:
    """Incremental grouping: members are added as they are found.

    Args:
        split: splits the members' names; None for the first dot.

    Attributes:
        samples: those so far; the last one may be incomplete.
    """

    def __init__(self, split: "Splitter | None" = None) -> None:
        self.samples = Samples()
        self._split = split or split_name
        self._extensions = _Extensions(self.samples.extensions)
        self._current = b""

    @property
    def whole(self) -> int:
        """Number of complete samples: all but the last, until `finish`."""
        return len(self.samples.member_ends)

    def add(self, members: Iterable[Member]) -> None:
        """Add the members that follow in the tar."""
        # Locals, since a tar may have millions of members.
        samples = self.samples
        split = self._split
        extensions = self._extensions
        current = self._current
        hidden = current.endswith(b"/")  # the member before is a hidden file
        starts = samples.starts
        ends = samples.ends
        extension_ids = samples.extension_ids
        key_ends = samples.key_ends
        for name, start_byte, end_byte, flaw in members:
            key, extension = split(name)
            if not key or (name.startswith(b"__") and _METADATA.match(name)):
                continue

            if key != current or hidden:
                # Of the names that macOS adds, those of files are hidden: their key is the folder
                # with its slash.
                hidden = key[-1] == _SLASH
                if (hidden or _MACOS_FOLDER in key) and is_of_macos(name):
                    continue
                if key != current:
                    samples.begin(key)
                    current = key

            number = extensions.number(extension)
            fault = extensions.fault(number, len(key_ends), flaw)
            if fault is None:
                starts.append(start_byte)
                ends.append(end_byte)
                extension_ids.append(number)
            else:
                samples.faults.setdefault(len(samples) - 1, (fault, number))
        self._current = current

    def finish(self) -> Samples:
        """Complete the last sample at the end of the tar; return all samples."""
        self.samples.end()
        return self.samples


class Adjacency:
    """Finds samples of which the members are not adjacent: their key comes again, with others.

    With the same members, it is another sample of that key, as in WebDataset.

    Args:
        samples: to check; there may be more at each call.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._checked = 0  # number of samples
        # The first sample with each key; None while all are alike.
        self._firsts: dict[bytes, int] | None = None

    def check(self, url: str) -> None:
        """Look at the samples that have become complete since.

        Raises TornSampleError for the first that is torn.
        """
        torn = self.torn()
        if torn is not None:
            key, extension, at = torn
            raise TornSampleError(
                f"the key {key[:_SHOWN_CHARS]!r} appears again, with the member "
                f"{extension[:_SHOWN_CHARS]!r} at byte {at}: the members of a sample "
                "must be adjacent",
                url=url,
            )

    def torn(self) -> tuple[str, str, int] | None:
        """Return key, extension and offset of the first member of a part of a sample, if any."""
        samples = self._samples
        start = self._checked
        stop = len(samples.member_ends)
        if start == stop:
            return None
        self._checked = stop
        if self._firsts is None:
            if self._are_alike(start, stop):
                return None
            self._firsts = {}
            start = 0

        for number, key in self._keys(start, stop):
            first = self._firsts.setdefault(key, number)
            if first == number:
                continue
            extension = self._difference(first, number)
            if extension is not None:
                member = self._members(number).start
                return key_of(samples, number), extension, samples.starts[member]
        return None

    def _are_alike(self, start: int, stop: int) -> bool:
        """Return True if samples have the members of the first one, in its order.

        None of them is a part of another then.
        """
        samples = self._samples
        pattern = samples.extension_ids[: samples.member_ends[0]]
        begin = samples.member_ends[start - 1] if start else 0
        found = samples.extension_ids[begin : samples.member_ends[stop - 1]]
        # No sample has an extension twice: of this many members, each has all.
        return found == pattern * (stop - start)

    def _keys(self, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """Yield number and key of each sample."""
        ends = self._samples.key_ends
        base = ends[start - 1] if start else 0
        keys = bytes(self._samples.keys[base : ends[stop - 1]])
        begin = 0
        for number in range(start, stop):
            end = ends[number] - base
            yield number, keys[begin:end]
            begin = end

    def _members(self, number: int) -> range:
        ends = self._samples.member_ends
        return range(ends[number - 1] if number else 0, ends[number])

    def _difference(self, first: int, number: int) -> str | None:
        """Return the extension of the second sample's first member if their members differ."""
        some = self._extension_ids(first)
        others = self._extension_ids(number)
        # Without members, the sample is an error of its own.
        if not others or set(some) == set(others):
            return None
        return self._samples.extensions[others[0]]

    def _extension_ids(self, number: int) -> list[int]:
        return [self._samples.extension_ids[member] for member in self._members(number)]


def is_of_macos(name: bytes) -> bool:
    """Return True for what macOS adds: AppleDouble (`._NAME`), `.DS_Store`, folders `__MACOSX`.

    WebDataset takes these members for samples, some of them between two members of one.
    """
    if _MACOS_FOLDER in name and _MACOS_FOLDER in name.split(b"/"):
        return True
    return _MACOS_FILE.search(name) is not None


def split_name(name: bytes) -> tuple[bytes, bytes]:
    """Split a member's name at the first dot of its last component into key and extension.

    Both are empty without a dot. Exactly equivalent to matching `^((?:.*/|)[^.]+)[.]([^/]*)$`,
    including line feeds, which `.` does not match, and hidden files, but in linear time even on
    hostile names, where the regular expression backtracks.
    """
    stem, dotted, rest = name.partition(b".")
    if stem and dotted and b"/" not in rest:
        return stem, rest

    # Dots in folder names, and names that begin with a dot.
    line_end = name.find(b"\n")
    if line_end < 0:
        line_end = len(name)
    start = name.rfind(b"/", 0, line_end) + 1
    dot = name.find(b".", start)
    if dot == start > 0:  # a hidden file: its folder may be the key, unless that contains a dot
        start = name.rfind(b"/", 0, start - 1) + 1
        dot = name.find(b".", start)
    if dot <= start or name.find(b"/", dot) >= 0:
        return b"", b""
    return name[:dot], name[dot + 1 :]


def split_at_last_dot(name: bytes) -> tuple[bytes, bytes]:
    """Split a member's name at the last dot of its last component into key and extension.

    Both are empty without a dot, for a hidden file without another one, and for what macOS adds.
    """
    start = name.rfind(b"/") + 1
    dot = name.rfind(b".", start)
    if dot <= start or is_of_macos(name):
        return b"", b""
    return name[:dot], name[dot + 1 :]


Splitter = Callable[[bytes], tuple[bytes, bytes]]
"""Returns key and extension of a member's name; both are empty for one that is left out."""


def splitter_of(url: str) -> Splitter:
    """Return what splits the names of a shard's members, as its url says."""
    _, key_split = key_split_in(url)
    return split_at_last_dot if key_split == LAST_DOT else split_name


class _Extensions:
    """Numbers of lower-cased extensions, with the sample in which each was last seen."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._ids: dict[bytes, int] = {}
        self._ids_of_lowered: dict[str, int] = {}
        self._last_seen: list[int] = []
        self._reserved: set[int] = set()

    def number(self, extension: bytes) -> int:
        """Return the number of an extension, given as spelt in the tar."""
        known = self._ids.get(extension)
        if known is not None:
            return known
        lowered = extension.decode("utf-8", "surrogateescape").lower()
        number = self._ids_of_lowered.setdefault(lowered, len(self._names))
        if number == len(self._names):
            self._names.append(lowered)
            self._last_seen.append(-1)
            if lowered in _RESERVED:
                self._reserved.add(number)
        self._ids[extension] = number
        return number

    def fault(self, number: int, sample: int, flaw: Fault | None) -> Fault | None:
        """Record that a sample has an extension; return the fault that this causes, if any.

        Args:
            number: of the extension.
            sample: its number; samples come in order.
            flaw: what is wrong with the member itself.
        """
        if self._last_seen[number] == sample:
            return Fault.DUPLICATE
        self._last_seen[number] = sample
        if flaw is not None:
            return flaw
        if number in self._reserved:
            return Fault.RESERVED
        return None
