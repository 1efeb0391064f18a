"""Leftovers: idle partials and quarantined shards, which are removed first when space is needed.

An idle partial is the file of an interrupted download that no transfer is using; a later fetch can
resume it. A quarantined shard is corrupt, and kept for inspection. The store has one `Leftovers`,
from which the evictor removes.
"""

import asyncio

from shardcache.store.disk.finishing import finished
from shardcache.store.disk.open_files import unlink_unless_open
from shardcache.store.folder.folder_contents import Leftover
from shardcache.store.space import Reservation, Space


class Leftovers:
    """The leftovers of one cache folder, whose bytes count as kept.

    Attributes:
        by_key: the leftovers by `Leftover.key`, oldest first.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self.by_key: dict[str, Leftover] = {}

    @property
    def size_bytes(self) -> int:
        """Number of bytes of all leftovers together."""
        return sum(leftover.size_bytes for leftover in self.by_key.values())

    def keep(self, leftover: Leftover) -> None:
        """Keep a leftover, in place of one with the same key, until its space is needed."""
        self.forget(leftover.key)
        self.by_key[leftover.key] = leftover
        self._space.kept_bytes += leftover.size_bytes

    def adopt(self, key: str, reservation: Reservation) -> None:
        """Move the bytes of a key's idle partial into the reservation of the fetch that resumes it.

        The partial is then no longer a leftover. Nothing is done if there is no idle partial.
        """
        leftover = self.by_key.pop(key, None)
        if leftover is not None:
            reservation.adopt(leftover.size_bytes)

    async def remove(self, key: str) -> bool:
        """Remove the files of a leftover; return False if a process has its first file open.

        A leftover that cannot be removed is kept. If the task is cancelled, it ends after the
        removal. Raises DiskError.
        """
        leftover = self.by_key.pop(key)  # nobody may adopt it while its files are removed
        return await finished(self._remove(leftover))

    async def _remove(self, leftover: Leftover) -> bool:
        """Unlink the files of a leftover, and account for the result."""
        removed = False
        try:
            removed = await asyncio.to_thread(unlink_unless_open, leftover.paths)
        finally:
            if removed:
                self._space.kept_bytes -= leftover.size_bytes
            else:
                self.by_key[leftover.key] = leftover
        return removed

    def forget(self, key: str) -> bool:
        """Stop accounting for a leftover whose files are gone; return False if there is none."""
        leftover = self.by_key.pop(key, None)
        if leftover is None:
            return False
        self._space.kept_bytes -= leftover.size_bytes
        return True
