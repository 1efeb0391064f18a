"""An object of which some parts are cached, for those who read ranges of it."""

import time
from collections import Counter
from dataclasses import dataclass, field

from shardcache.origin.objects import RemoteObject
from shardcache.store.partial import Partial

FILE_BYTES = 4096
"""Space of a file of parts in addition to the parts: that of its journal."""

Span = tuple[int, int]
"""Start and end of a range of bytes."""


@dataclass(slots=True, eq=False)
class PartFile:
    """A sparse file with the parts of an object that were read, each of them verified.

    Attributes:
        partial: the file, and the parts that are in it.
        is_own: True while its parts are kept and evicted one by one; False once a transfer of the
            whole object has taken the file over.
        leases: by part, the number of readers that have it in use.
        used_at_s: time of the last use of a part, in seconds since the epoch.
        is_unconfirmed: True while the object is known only by an earlier daemon's journal.
    """

    partial: Partial
    is_own: bool = True
    leases: Counter[int] = field(default_factory=Counter)
    used_at_s: float = field(default_factory=time.time)
    is_unconfirmed: bool = False

    def confirm(self, obj: RemoteObject) -> None:
        """Record the object as the origin describes it, which is more than the journal has."""
        self.partial.obj = obj
        self.is_unconfirmed = False

    @property
    def version(self) -> str:
        """Version of the object."""
        return self.partial.obj.version

    def parts_of(self, span: Span) -> range:
        """Return the parts that have some of the bytes of a span, as far as the object goes."""
        start, end = span
        end = min(end, self.partial.obj.size_bytes)
        part_bytes = self.partial.part_bytes
        return range(start // part_bytes, -(-end // part_bytes))

    def has(self, span: Span) -> bool:
        """Return whether all bytes of a span, as far as the object goes, are in the file."""
        done = self.partial.done
        return all(part in done for part in self.parts_of(span))

    def end_in(self, span: Span) -> int:
        """Return the end of the bytes that are in the file without a gap, from a span's start."""
        start, end = span
        for part in self.parts_of(span):
            if part not in self.partial.done:
                return max(start, part * self.partial.part_bytes)
        return min(end, self.partial.obj.size_bytes)

    def key_of(self, part: int) -> str:
        """Return the key of a part; no shard has the same."""
        return f"{self.partial.key}/{part}"

    @property
    def kept_parts(self) -> list[int]:
        """The parts that take space: the finished ones, and those not checked since the restart."""
        return [*self.partial.done, *self.partial.unchecked]

    @property
    def kept_bytes(self) -> int:
        """Number of bytes that the file takes."""
        return FILE_BYTES + self.kept_parts_bytes

    @property
    def kept_parts_bytes(self) -> int:
        """Number of bytes of the parts that take space."""
        partial = self.partial
        kept_bytes = partial.part_bytes * (len(partial.done) + len(partial.unchecked))
        last = partial.count - 1  # it may be shorter
        if last in partial.done or last in partial.unchecked:
            kept_bytes -= partial.part_bytes - partial.size_of(last)
        return kept_bytes

    def forget(self, part: int) -> None:
        """Count a part as never fetched."""
        self.partial.done.pop(part, None)
        self.partial.unchecked.pop(part, None)


class GrantedFiles:
    """Closed files of which readers still hold parts: they may open them by path and inode.

    Filesystems reuse the numbers of inodes. Until the readers have released their parts, a new file
    at the path must not get the same number: they would take it for the old one, and read its
    holes.
    """

    def __init__(self) -> None:
        self._by_key: dict[str, list[PartFile]] = {}

    def add(self, file: PartFile) -> None:
        """Note that a reader holds parts of a closed file."""
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
        """Return the inodes of an object's files."""
        return frozenset(file.partial.inode for file in self._by_key.get(key, ()))


def part_of_key(key: str) -> tuple[str, int] | None:
    """Return the object's key and the number that a part's key consists of; None for a shard's."""
    object_key, slash, part = key.partition("/")
    if not slash:
        return None
    return object_key, int(part)
