"""Where a download puts its parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from shardcache.origin.base import RemoteObject


class Sink(Protocol):
    """A file that is filled part by part, in any order; `store.partial.Partial` is one.

    Attributes:
        obj: what is downloaded.
        part_bytes: size of every part but the last.
        path: the file itself, which may be read once no part is missing.
    """

    @property
    def obj(self) -> RemoteObject: ...  # noqa: D102

    @property
    def part_bytes(self) -> int: ...  # noqa: D102

    @property
    def path(self) -> Path: ...  # noqa: D102

    def missing(self) -> list[int]:
        """Return the numbers of the parts still to be written, in order."""

    async def write(self, index: int, data: memoryview, seen: Callable[[memoryview], object]) -> None:
        """Put a part in its place, over what may be there, and show each block of it to `seen`, in order.

        Raises DiskFullError, CacheDirError.
        """

    def crcs(self) -> list[int]:
        """Return the CRC32C of every part, in order; only when none is missing."""
