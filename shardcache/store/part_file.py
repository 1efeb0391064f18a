"""An object of which some parts are cached, for readers of byte ranges.

`CachedParts` has a `PartFile` for each of these objects. A part is finished if its bytes are in the
file and verified. A part is unchecked if an earlier daemon has finished it, and its bytes have not
been compared with its checksum since the restart. Both are kept parts, as they take space.
"""

import time
from collections import Counter
from dataclasses import dataclass, field

from shardcache.origin.objects import RemoteObject
from shardcache.store.partial import Partial

JOURNAL_BYTES = 4096
"""Space that counts for a part file's journal, in addition to the file's parts."""

Span = tuple[int, int]
"""Start and end of a range of bytes; the end is excluded."""


@dataclass(slots=True, eq=False)
class PartFile:
    """A sparse file with those parts of an object that were read.

    Attributes:
        partial: the file, and its finished and unchecked parts.
        is_kept_by_part: True while the parts are kept and evicted one by one; False once the file
            was closed, to be removed or to be resumed by a transfer of the whole object.
        leases: by part, the number of readers that have the part in use.
        used_at_s: time of the last use of a part, in seconds since the epoch.
        is_confirmed: False while the object is known only by the journal of an earlier daemon,
            until the origin describes it (`confirm`).
    """

    partial: Partial
    is_kept_by_part: bool = True
    leases: Counter[int] = field(default_factory=Counter)
    used_at_s: float = field(default_factory=time.time)
    is_confirmed: bool = True

    def confirm(self, obj: RemoteObject) -> None:
        """Replace the object by the origin's description, with properties that no journal has."""
        self.partial.obj = obj
        self.is_confirmed = True

    @property
    def version(self) -> str:
        """Version of the object."""
        return self.partial.obj.version

    def parts_of(self, span: Span) -> range:
        """Return the parts that contain bytes of a span, up to the object's end."""
        start, end = span
        end = min(end, self.partial.obj.size_bytes)
        part_bytes = self.partial.part_bytes
        return range(start // part_bytes, -(-end // part_bytes))

    def has(self, span: Span) -> bool:
        """Return whether all bytes of a span are in the file, up to the object's end."""
        done = self.partial.done
        return all(part in done for part in self.parts_of(span))

    def first_missing_byte(self, span: Span) -> int:
        """Return the offset of the first byte of a span that is not in the file.

        If none is missing, the result is the end of the span or of the object, whichever is first.
        """
        start, end = span
        for part in self.parts_of(span):
            if part not in self.partial.done:
                return max(start, part * self.partial.part_bytes)
        return min(end, self.partial.obj.size_bytes)

    def key_of(self, part: int) -> str:
        """Return the key by which a part is leased and evicted, unlike any key of a shard."""
        return part_key(self.partial.key, part)

    @property
    def kept_parts(self) -> list[int]:
        """Numbers of the finished and the unchecked parts, which take space."""
        return [*self.partial.done, *self.partial.unchecked]

    @property
    def kept_bytes(self) -> int:
        """Number of bytes that the kept parts and the journal take."""
        return JOURNAL_BYTES + self.kept_parts_bytes

    @property
    def kept_parts_bytes(self) -> int:
        """Number of bytes that the kept parts take."""
        partial = self.partial
        return partial.size_of_all(partial.done) + partial.size_of_all(partial.unchecked)

    def forget(self, part: int) -> None:
        """Treat a part as if it was never fetched."""
        self.partial.done.pop(part, None)
        self.partial.unchecked.pop(part, None)


class GrantedFiles:
    """Part files that were closed although readers have been granted parts of them.

    These readers may still open a file by its path, and recognise it by its inode number.
    Filesystems reuse these numbers. So until the readers have released their parts, a new file at
    the path must not get the same number: they would take it for the old file, and read its holes.
    """

    def __init__(self) -> None:
        self._by_key: dict[str, list[PartFile]] = {}

    def add(self, file: PartFile) -> None:
        """Add a file that is closed while a reader holds parts of it."""
        files = self._by_key.setdefault(file.partial.key, [])
        if file not in files:
            files.append(file)

    def remove(self, file: PartFile) -> None:
        """Forget a file once no reader holds parts of it. No-op for a file that was not added."""
        files = self._by_key.get(file.partial.key, [])
        if file in files:
            files.remove(file)
        if not files:
            self._by_key.pop(file.partial.key, None)

    def inodes(self, key: str) -> frozenset[int]:
        """Return the inode numbers of these files, for the object with a key."""
        return frozenset(file.partial.inode for file in self._by_key.get(key, ()))


def part_key(object_key: str, part: int) -> str:
    """Return the key of a part in the schedule, given the key of its object."""
    return f"{object_key}/{part}"


def split_part_key(key: str) -> tuple[str, int] | None:
    """Split the key of a part into the object's key and the part's number.

    Returns None for the key of a shard.
    """
    object_key, slash, part = key.partition("/")
    if not slash:
        return None
    return object_key, int(part)
