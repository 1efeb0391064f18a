"""Objects of which some parts are cached, each in a file of its own."""

import asyncio

from shardcache.origin.objects import RemoteObject
from shardcache.store.folder.folder_contents import Leftover
from shardcache.store.folder.layout import Layout
from shardcache.store.keys import place_of, shard_key
from shardcache.store.leftovers import Leftovers
from shardcache.store.part_file import GrantedFiles, PartFile
from shardcache.store.partial import Partial
from shardcache.store.space import Reservation, Space


class CachedParts:
    """The files of parts of one cache folder, by the keys of the whole objects.

    Attributes:
        granted: files that were closed, and of which readers still hold parts.
    """

    def __init__(self, layout: Layout, space: Space, leftovers: Leftovers) -> None:
        self._layout = layout
        self._space = space
        self._leftovers = leftovers
        self._files: dict[str, PartFile] = {}
        self.granted = GrantedFiles()

    def get(self, key: str) -> PartFile | None:
        """Return the file for an object's key, if there is one."""
        return self._files.get(key)

    def __contains__(self, key: str) -> bool:
        return key in self._files

    def files(self) -> list[PartFile]:
        """Return all files."""
        return list(self._files.values())

    def restore(self, partial: Partial) -> None:
        """Add the file of parts that an earlier daemon has left. Blocks."""
        file = PartFile(partial, used_at_s=partial.path.stat().st_mtime, is_unconfirmed=True)
        self._files[partial.key] = file
        self._space.kept_bytes += file.kept_bytes

    async def open(
        self,
        obj: RemoteObject,
        part_bytes: int,
        reservation: Reservation,
    ) -> PartFile:
        """Open a file for the parts of an object; it takes over the parts of an idle partial.

        Raises DiskError.
        """
        key = shard_key(place_of(obj.url, is_file=True), obj.version)
        self._leftovers.adopt(key, reservation)
        granted_inodes = self.granted.inodes(key)
        partial = await asyncio.to_thread(
            Partial.open,
            self._layout,
            obj,
            part_bytes,
            is_file=True,
            is_sparse=True,
            granted_inodes=granted_inodes,
        )
        # The parts of the idle partial are kept ones from now on. FILE_BYTES are not: the caller
        # has reserved them, and turns them into kept ones.
        reservation.disown()
        file = PartFile(partial)
        self._files[key] = file
        self._space.kept_bytes += file.kept_parts_bytes
        return file

    def close(self, file: PartFile) -> Leftover:
        """Make a leftover of a file of parts, for a transfer of the whole, or to remove it."""
        del self._files[file.partial.key]
        file.is_own = False
        self._space.kept_bytes -= file.kept_bytes
        leftover = Leftover.of(file.partial.path)
        self._leftovers.keep(leftover)
        return leftover

    async def remove(self, file: PartFile) -> int:
        """Remove a file of parts that nobody has in use; return the number of bytes that it took.

        0 if some process still has it open. Raises DiskError.
        """
        kept_bytes = file.kept_bytes
        leftover = self.close(file)
        removed = await self._leftovers.remove(leftover.key)
        return kept_bytes if removed else 0

    async def drop(self, file: PartFile, part: int) -> None:
        """Free the space of a part that nobody has in use. Raises DiskError."""
        size_bytes = file.partial.size_of(part)
        file.forget(part)
        await asyncio.to_thread(file.partial.punch, part)
        self._space.kept_bytes -= size_bytes
