"""Grouping of members into samples by WebDataset's rules (webdataset 1.0.2, tariterators.py).

The daemon calls `index_tar` once a shard has arrived, and uses `Grouping` and `Adjacency` while it
is still arriving. A member's name is split into a key and an extension; consecutive members with
the same key are one sample. A sample is torn if its members are not adjacent in the tar. A fault is
the reason why a sample is unusable, although its shard is intact.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from shardcache.shared.exceptions import TornSampleError
from shardcache.shared.tarindex.key_splits import LAST_DOT, key_split_in
from shardcache.shared.tarindex.members import Member, Tar
from shardcache.shared.tarindex.packed_lines import split_lines
from shardcache.shared.tarindex.tables import Fault, Samples, key_of, members_of

_ABOUT_TAR = re.compile(rb"__[^/]*__($|/)")  # WebDataset's members about the whole tar
_SLASH = ord("/")
_SHOWN_CHARS = 200
_MACOS_FOLDER = b"__MACOSX"
_MACOS_FILE = re.compile(rb"(?:^|/)(?:\._[^/]*|\.DS_Store)\Z")

# Fields that every sample has, or that have a meaning in WebDataset: no member may have one of them
# as its extension.
_RESERVED = frozenset({"__key__", "__url__", "__bad__"})

Splitter = Callable[[bytes], tuple[bytes, bytes]]
"""Returns key and extension of a member's name; both are empty for a member that is left out."""


def index_tar(
    path: Path,
    url: str,
    *,
    require_end: bool = True,
    ignore_trailing_data: bool = False,
    require_adjacent: bool = True,
) -> Samples:
    """Walk the tar at `path` and return its samples. Blocks.

    Symbolic links, directories, devices and `__x__` members are skipped, as in WebDataset, except
    members with lines of samples (`split_lines`). Members that macOS adds are skipped, too
    (`is_of_macos`). A hard link, which WebDataset skips, has the content of the file that it is
    linked to.

    Two kinds of samples are recorded with a fault, and the others stay usable: samples with two
    members of the same extension, for which WebDataset raises; and samples with a member whose
    content is not contiguous, or not in the tar.

    Raises OSError, UnsupportedShardError for too many lines, and what iterating a `Tar` raises.

    Args:
        path: path of the tar.
        url: url of the shard, which decides the key split, and is named in errors.
        require_end: True to reject a tar without an end-of-archive block.
        ignore_trailing_data: True to accept a tar with data after the end-of-archive block.
        require_adjacent: True to raise TornSampleError if the members of a sample are not adjacent.
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


def group(members: Iterable[Member], split: Splitter | None = None) -> Samples:
    """Group consecutive members with the same key into samples."""
    grouping = Grouping(split)
    grouping.add(members)
    return grouping.finish()


class Grouping:
    """Incremental grouping: members are added as they are found.

    Args:
        split: splits the members' names; None to split them at the first dot.

    Attributes:
        samples: the samples found so far; the last sample may be incomplete.
    """

    def __init__(self, split: Splitter | None = None) -> None:
        self.samples = Samples()
        self._split = split or split_name
        self._extensions = _Extensions(self.samples.extensions)
        self._current_key = b""

    def add(self, members: Iterable[Member]) -> None:
        """Add the members that follow in the tar."""
        # Local variables are faster than attributes, and a tar may have millions of members.
        samples = self.samples
        split = self._split
        extensions = self._extensions
        current_key = self._current_key
        sample = len(samples) - 1  # number of the current sample
        is_hidden = current_key.endswith(b"/")  # True if the previous member is a hidden file
        starts = samples.starts
        ends = samples.ends
        extension_ids = samples.extension_ids
        for name, start_byte, end_byte, member_fault in members:
            key, extension = split(name)
            # Members without a key are left out, and those about the whole tar. `startswith` is
            # tried first, as it is much faster than the regular expression.
            if not key or (name.startswith(b"__") and _ABOUT_TAR.match(name)):
                continue

            if key != current_key or is_hidden:
                # Files that macOS adds are hidden, or in its folder. To save time, only the first
                # member of a sample is tested, and each hidden file: all hidden files of a folder
                # have the same key, the folder's path with its slash.
                is_hidden = key[-1] == _SLASH
                if (is_hidden or _MACOS_FOLDER in key) and is_of_macos(name):
                    continue
                if key != current_key:
                    samples.begin(key)
                    current_key = key
                    sample += 1

            extension_id = extensions.id_of(extension)
            fault = extensions.record(extension_id, sample, member_fault)
            if fault is None:
                starts.append(start_byte)
                ends.append(end_byte)
                extension_ids.append(extension_id)
            else:
                samples.faults.setdefault(sample, (fault, extension_id))
        self._current_key = current_key

    def finish(self) -> Samples:
        """Complete the last sample at the end of the tar; return all samples."""
        self.samples.end()
        return self.samples


class TornMember(NamedTuple):
    """A member that belongs to an earlier sample of its tar, although other samples lie between.

    Attributes:
        key: key of the sample.
        extension: extension of the member.
        start: offset of the member's content in the tar.
    """

    key: str
    extension: str
    start: int


class Adjacency:
    """Finds torn samples: samples whose key appears again later in the tar, with other members.

    If a key appears again with the same members, it is another sample with that key, as in
    WebDataset.

    Args:
        samples: the samples to check; more may be added between two calls.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._checked_samples = 0  # number of samples that earlier calls have checked
        # By key, the number of the first sample that has it. None as long as all samples have the
        # same extensions: no sample is then torn, and the keys need not be remembered.
        self._first_samples: dict[bytes, int] | None = None

    def check(self, url: str) -> None:
        """Check the samples that have become complete since the previous call.

        Raises TornSampleError for the first one whose members are not adjacent.
        """
        torn = self.find_torn()
        if torn is not None:
            raise TornSampleError(
                f"the key {torn.key[:_SHOWN_CHARS]!r} appears again, with the member "
                f"{torn.extension[:_SHOWN_CHARS]!r} at byte {torn.start}: the members of a sample "
                "must be adjacent",
                url=url,
            )

    def find_torn(self) -> TornMember | None:
        """Return the first member that belongs to an earlier sample.

        Only samples that have become complete since the previous call are searched. Returns None if
        none of them continues an earlier sample.
        """
        samples = self._samples
        start = self._checked_samples
        stop = len(samples.member_ends)
        if start == stop:
            return None
        self._checked_samples = stop
        if self._first_samples is None:
            if self._are_alike(start, stop):
                return None
            self._first_samples = {}
            start = 0

        for number, key in self._keys(start, stop):
            first = self._first_samples.setdefault(key, number)
            if first == number:
                continue
            extension = self._extension_if_torn(first, number)
            if extension is not None:
                member = members_of(samples, number).start
                return TornMember(key_of(samples, number), extension, samples.starts[member])
        return None

    def _are_alike(self, start: int, stop: int) -> bool:
        """Return whether samples `start` to `stop`, exclusive, have the extensions of sample 0.

        The extensions must be in the same order. If so, none of these samples continues another.
        """
        samples = self._samples
        pattern = samples.extension_ids[: samples.member_ends[0]]
        begin = samples.member_ends[start - 1] if start else 0
        extension_ids = samples.extension_ids[begin : samples.member_ends[stop - 1]]
        # If the lists are equal, all members have extensions of the pattern. No sample has an
        # extension twice, so no sample has more members than the pattern. As the total is the
        # number of samples times the pattern's length, each sample has exactly the pattern.
        return extension_ids == pattern * (stop - start)

    def _keys(self, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """Yield number and key of each sample from `start` up to `stop`, exclusive."""
        ends = self._samples.key_ends
        base = ends[start - 1] if start else 0
        keys = bytes(self._samples.keys[base : ends[stop - 1]])
        begin = 0
        for number in range(start, stop):
            end = ends[number] - base
            yield number, keys[begin:end]
            begin = end

    def _extension_if_torn(self, first: int, second: int) -> str | None:
        """Return the extension of the second sample's first member, if it continues the first one.

        Returns None if both samples have the same extensions, so that they are two samples.
        """
        first_ids = self._extension_ids(first)
        second_ids = self._extension_ids(second)
        # Members with a fault are not in the tables: if all members of the second sample have one,
        # that is reported as an error elsewhere.
        if not second_ids or set(first_ids) == set(second_ids):
            return None
        return self._samples.extensions[second_ids[0]]

    def _extension_ids(self, number: int) -> list[int]:
        samples = self._samples
        return [samples.extension_ids[member] for member in members_of(samples, number)]


def is_of_macos(name: bytes) -> bool:
    """Return whether a member is a file that macOS adds to archives.

    These are AppleDouble files (`._NAME`), `.DS_Store`, and files in a folder `__MACOSX`.
    WebDataset takes them for samples, even between two members of another sample.
    """
    # The first test is fast and excludes almost all names; the second compares whole components.
    if _MACOS_FOLDER in name and _MACOS_FOLDER in name.split(b"/"):
        return True
    return _MACOS_FILE.search(name) is not None


def split_name(name: bytes) -> tuple[bytes, bytes]:
    """Split a member's name at the first dot of its last component into key and extension.

    Key and extension are empty for a name without a dot. The result is that of the expression
    `^((?:.*/|)[^.]+)[.]([^/]*)$` in WebDataset, also for hidden files and for line feeds, which `.`
    does not match. Unlike the expression, which backtracks, the function takes linear time even on
    hostile names.
    """
    stem, dot_or_nothing, extension = name.partition(b".")
    if stem and dot_or_nothing and b"/" not in extension:
        return stem, extension

    # Slow path, for dots in the names of folders, and for names that begin with a dot.
    line_end = name.find(b"\n")
    if line_end < 0:
        line_end = len(name)
    start = name.rfind(b"/", 0, line_end) + 1
    dot = name.find(b".", start)
    if start > 0 and dot == start:
        # A hidden file: its folder may be the key, unless that contains a dot.
        start = name.rfind(b"/", 0, start - 1) + 1
        dot = name.find(b".", start)
    if dot <= start or name.find(b"/", dot) >= 0:
        return b"", b""
    return name[:dot], name[dot + 1 :]


def split_at_last_dot(name: bytes) -> tuple[bytes, bytes]:
    """Split a member's name at the last dot of its last component into key and extension.

    Key and extension are empty for a name without a dot, a hidden file whose name has no other dot,
    and a file that macOS adds.
    """
    start = name.rfind(b"/") + 1
    dot = name.rfind(b".", start)
    if dot <= start or is_of_macos(name):
        return b"", b""
    return name[:dot], name[dot + 1 :]


def splitter_of(url: str) -> Splitter:
    """Return the function that splits the names of a shard's members, as its url says."""
    _, key_split = key_split_in(url)
    return split_at_last_dot if key_split == LAST_DOT else split_name


class _Extensions:
    """Ids of lower-cased extensions, with the sample in which each was last seen.

    Args:
        names: the lower-cased extensions, by id; new ones are appended.
    """

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._ids: dict[bytes, int] = {}  # ids by the extension as spelt in the tar
        self._ids_of_lowered: dict[str, int] = {}
        self._last_samples: list[int] = []  # by id, the last sample with it; -1 for none
        self._reserved_ids: set[int] = set()

    def id_of(self, extension: bytes) -> int:
        """Return the id of an extension, given as spelt in the tar."""
        known_id = self._ids.get(extension)
        if known_id is not None:
            return known_id
        lowered = extension.decode("utf-8", "surrogateescape").lower()
        new_id = len(self._names)
        extension_id = self._ids_of_lowered.setdefault(lowered, new_id)
        if extension_id == new_id:
            self._names.append(lowered)
            self._last_samples.append(-1)
            if lowered in _RESERVED:
                self._reserved_ids.add(extension_id)
        self._ids[extension] = extension_id
        return extension_id

    def record(self, extension_id: int, sample: int, member_fault: Fault | None) -> Fault | None:
        """Record that a sample has a member with an extension; return the sample's fault, if any.

        Args:
            extension_id: id of a member's extension.
            sample: number of the member's sample, at least that of the previous call.
            member_fault: fault of the member by itself, such as a sparse file; None for none.
        """
        if self._last_samples[extension_id] == sample:
            return Fault.DUPLICATE
        self._last_samples[extension_id] = sample
        if member_fault is not None:
            return member_fault
        if extension_id in self._reserved_ids:
            return Fault.RESERVED
        return None
