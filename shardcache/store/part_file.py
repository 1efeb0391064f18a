"""An object of which some parts are cached, for those who read ranges of it."""

import time
from collections import Counter
from dataclasses import dataclass, field

from shardcache.origin.objects import RemoteObject
from shardcache.store.partial import Partial

FILE_BYTES = 4096
"""Space of a file of parts besides these, which is that of its journal."""

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
        is_left: True while only an earlier daemon's journal says what the object is.
    """

    partial: Partial
    is_own: bool = True
    leases: Counter[int] = field(default_factory=Counter)
    used_at_s: float = field(default_factory=time.time)
    is_left: bool = False

    def confirm(self, obj: RemoteObject) -> None:
        """Note what the origin says of the object, of which an earlier daemon left the parts."""
        self.partial.obj = obj
        self.is_left = False

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
        """Return where the bytes from the start of a span on end that are in the file."""
        start, end = span
        for part in self.parts_of(span):
            if part not in self.partial.done:
                return max(start, part * self.partial.part_bytes)
        return min(end, self.partial.obj.size_bytes)

    def key_of(self, part: int) -> str:
        """Return the name of a part among all that is cached."""
        return f"{self.partial.key}/{part}"

    @property
    def kept(self) -> list[int]:
        """The parts that take space: those in it, and what an earlier daemon has left unchecked."""
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
        """Take a part for one that was never fetched."""
        self.partial.done.pop(part, None)
        self.partial.unchecked.pop(part, None)


class GrantedFiles:
    """Closed files of which readers hold parts, that they may still open by path and inode.

    Filesystems use the number of an inode again, so no later file at the path may have it before
    the readers have released their parts: they would read its holes.
    """

    def __init__(self) -> None:
        self._by_key: dict[str, list[PartFile]] = {}

    def add(self, file: PartFile) -> None:
        """Note that a reader holds parts of a closed file."""
        files = self._by_key.setdefault(file.partial.key, [])
        if file not in files:
            files.append(file)

    def remove(self, file: PartFile) -> None:
        """Forget a file, of which no reader holds any more parts. No-op for any other."""
        files = self._by_key.get(file.partial.key, [])
        if file in files:
            files.remove(file)
        if not files:
            self._by_key.pop(file.partial.key, None)

    def inodes(self, key: str) -> frozenset[int]:
        """Return the inodes of an object's files."""
        return frozenset(file.partial.inode for file in self._by_key.get(key, ()))


def part_of_key(key: str) -> tuple[str, int] | None:
    """Return the object's key and the part's number of a part's name; None for a shard's key."""
    object_key, slash, part = key.partition("/")
    return (object_key, int(part)) if slash else None
