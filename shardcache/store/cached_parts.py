"""Objects of which some parts are cached, each object in a file of its own.

Readers of byte ranges need only some parts of an object, which may never be cached as a whole. The
object then has a `PartFile`: a sparse file whose parts arrive and are evicted one by one, with a
journal of the parts that are in it. On disk, it is a `Partial`, as is the file of an interrupted
download. A partial that nobody is using is idle: it is a leftover, until a transfer or a part file
takes it over.
"""

import asyncio

from shardcache.origin.objects import RemoteObject
from shardcache.store.disk.disk_errors import disk_errors
from shardcache.store.disk.finishing import finished
from shardcache.store.folder.folder_contents import Leftover
from shardcache.store.folder.layout import Layout
from shardcache.store.keys import file_key
from shardcache.store.leftovers import Leftovers
from shardcache.store.part_file import GrantedFiles, PartFile
from shardcache.store.partial import Partial
from shardcache.store.space import Reservation, Space


class CachedParts:
    """The part files of one cache folder, by the cache keys of the whole objects.

    Attributes:
        granted: part files that were closed although readers have been granted parts of them.
    """

    def __init__(self, layout: Layout, space: Space, leftovers: Leftovers) -> None:
        self._layout = layout
        self._space = space
        self._leftovers = leftovers
        self._files: dict[str, PartFile] = {}
        self.granted = GrantedFiles()

    def get(self, key: str) -> PartFile | None:
        """Return the part file for an object's key, if there is one."""
        return self._files.get(key)

    def __contains__(self, key: str) -> bool:
        return key in self._files

    def files(self) -> list[PartFile]:
        """Return all part files."""
        return list(self._files.values())

    def restore(self, partial: Partial) -> None:
        """Add the part file that an earlier daemon has left. Blocks."""
        file = PartFile(partial, used_at_s=partial.path.stat().st_mtime, is_confirmed=False)
        self._files[partial.key] = file
        self._space.kept_bytes += file.kept_bytes

    async def open(
        self,
        obj: RemoteObject,
        part_bytes: int,
        reservation: Reservation,
    ) -> PartFile:
        """Open a part file for an object.

        If an interrupted download has left an idle partial of the same version, its finished parts
        become parts of this file.

        Args:
            part_bytes: size of the parts of a new file.
            reservation: the caller's reservation, with `JOURNAL_BYTES` for the new file's journal.

        Raises DiskError.
        """
        key = file_key(obj.url, obj.version)
        # The idle partial, if there is one, stops being a leftover, so that nobody removes the file
        # while it is opened. The reservation has its bytes in the meantime.
        self._leftovers.adopt(key, reservation)
        partial = await asyncio.to_thread(
            Partial.open,
            self._layout,
            obj,
            part_bytes,
            is_file=True,
            is_sparse=True,
            granted_inodes=self.granted.inodes(key),
        )
        file = PartFile(partial)
        self._files[key] = file
        # The bytes of the idle partial are kept bytes again, now of this file's parts. The caller
        # turns the reserved `JOURNAL_BYTES` into kept bytes.
        reservation.disown()
        self._space.kept_bytes += file.kept_parts_bytes
        return file

    def close(self, file: PartFile) -> Leftover:
        """Turn a part file into a leftover, and return the leftover. Raises DiskError.

        A transfer of the whole object can then resume the file, or the file can be removed.
        """
        del self._files[file.partial.key]
        file.is_kept_by_part = False
        self._space.kept_bytes -= file.kept_bytes
        with disk_errors(file.partial.path):
            leftover = Leftover.of(file.partial.path)
        self._leftovers.keep(leftover)
        return leftover

    async def remove(self, file: PartFile) -> int:
        """Remove a part file that no reader has in use; return the number of bytes freed.

        If some process still has the file open, the file stays as a leftover, and the result is 0.
        Raises DiskError.
        """
        kept_bytes = file.kept_bytes
        leftover = self.close(file)
        removed = await self._leftovers.remove(leftover.key)
        return kept_bytes if removed else 0

    async def drop(self, file: PartFile, part: int) -> None:
        """Remove a part that no reader has in use, and free its space. Raises DiskError.

        If the task is cancelled, it ends after the removal: otherwise the thread could punch the
        hole when the part has already been fetched again.
        """
        size_bytes = file.partial.size_of(part)
        file.forget(part)
        try:
            await finished(asyncio.to_thread(file.partial.free_part, part))
        finally:
            # If the space could not be freed, the part is not a kept part all the same. Its bytes
            # count like those of other files on the disk, until the part is fetched again or the
            # file is closed.
            self._space.kept_bytes -= size_bytes
