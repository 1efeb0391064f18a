"""The file that a download fills."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from shardcache.errors import ShardcacheError
from shardcache.origin.base import RemoteObject
from shardcache.transport.parts import Parts, PartSums


class Sink(Protocol):
    """A file that is filled part by part, in any order, such as `store.partial.Partial`.

    Attributes:
        obj: the object that is downloaded.
        part_bytes: size of every part but the last.
        path: the file itself, readable once no part is missing.
    """

    @property
    def obj(self) -> RemoteObject: ...  # noqa: D102

    @property
    def part_bytes(self) -> int: ...  # noqa: D102

    @property
    def path(self) -> Path: ...  # noqa: D102

    def missing(self) -> list[int]:
        """Return the numbers of the parts still to be written, in order."""

    def parts(self, first: int, count: int) -> Parts:
        """Return the `Parts` for writing consecutive parts."""

    def record(self, sums: PartSums) -> None:
        """Record a finished part."""

    def disk_error(self, exn: OSError) -> ShardcacheError:
        """Return the error for a write that failed."""

    def crcs(self) -> list[int]:
        """Return the CRC32C of every part, in order; only when none is missing."""
