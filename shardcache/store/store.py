"""The cache store: publishing, finding, verifying and removing shards.

The daemon has one `Store` for its cache folder. Fetches publish shards with it, leases look shards
up, and the evictor removes them. A published shard is a tar, or another file, with its sidecar: a
small file with the shard's facts (url, version, checksums) and the index of its samples. A partial
is the file of a shard or object that is being fetched; it is idle if no transfer is using it.
Leftovers are idle partials and quarantined shards, which are removed first when space is needed.
A shard is in service while it is in `Store.shards`, so that readers can get it.
"""

import asyncio
import contextlib
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import structlog

from shardcache.config.amounts import DiskAmount
from shardcache.shared.exceptions import CorruptShardError, ExhaustedError
from shardcache.shared.units import size
from shardcache.store.cached_parts import CachedParts
from shardcache.store.catalogue import Catalogue
from shardcache.store.disk.disk_errors import disk_errors
from shardcache.store.disk.file_operations import fsync_path, unlink_quietly
from shardcache.store.disk.finishing import finished
from shardcache.store.disk.mounts import free_bytes
from shardcache.store.disk.open_files import unlink_unless_open
from shardcache.store.folder.cache_folder import CacheFolder
from shardcache.store.folder.folder_contents import Leftover, find_leftovers, find_shards
from shardcache.store.folder.layout import SIDECAR, TAR, Layout
from shardcache.store.folder.name_links import NameLinks
from shardcache.store.leftovers import Leftovers
from shardcache.store.partial import Partial, discard
from shardcache.store.shard import Facts, Shard, UnpublishedFiles
from shardcache.store.space import Space
from shardcache.store.verification import Scrub, check_sidecar, read_facts

log = structlog.get_logger()

_SHARD_MODE = 0o440  # published files are never written again

# Maximum number of shards that are published at the same time. More would not finish sooner on one
# disk, and each takes a thread that other work may need.
_MAX_PUBLISHED_AT_ONCE = 8
# Minimum time between two writes of a shard's last use to disk.
_USE_SAVE_INTERVAL_S = 60.0


class Store:
    """One cache folder, locked exclusively.

    Attributes:
        layout: the paths in the folder.
        folder: the lock on the folder, and its recovery if the folder is lost.
        space: the accounting of the cache's bytes.
        catalogue: the database of sample counts, listings and versions.
        shards: the published shards, by key, from least to most recently used.
        leftovers: idle partials and quarantined shards.
        parts: objects of which some parts are cached.
    """

    def __init__(
        self,
        layout: Layout,
        space: Space,
        catalogue: Catalogue,
        folder: CacheFolder,
    ) -> None:
        self.layout = layout
        self.folder = folder
        self.space = space
        self.catalogue = catalogue
        self.shards: OrderedDict[str, Shard] = OrderedDict()
        self.leftovers = Leftovers(space)
        self.parts = CachedParts(layout, space, self.leftovers)
        self._links = NameLinks(layout)
        # Damaged shards that are out of service, but not yet moved to quarantine.
        self._damaged: dict[str, Shard] = {}
        self._removing: set[str] = set()  # keys of shards whose files are being unlinked
        # Held while the files of published shards are moved to quarantine, and while a sidecar is
        # replaced, so that no sidecar is replaced during the move.
        self._changing_published = asyncio.Lock()
        self._publishing = asyncio.Semaphore(_MAX_PUBLISHED_AT_ONCE)

    def __repr__(self) -> str:
        root = str(self.layout.root)
        used = size(self.space.used_bytes)
        capacity = size(self.space.capacity_bytes)
        return f"Store({root!r}, shards={len(self.shards)}, used={used} of {capacity})"

    @classmethod
    def open(
        cls,
        root: Path,
        capacity: DiskAmount,
        min_free: DiskAmount,
        group: str | None = None,
    ) -> Self:
        """Lock the folder and recover its contents. Blocks.

        Args:
            capacity: maximum size of the cache.
            min_free: space that must stay free on the filesystem.
            group: the group that may read the cache; None for the process's own.

        Raises CacheDirError, CacheFormatError, DiskError.
        """
        layout = Layout(root.absolute())
        folder = CacheFolder.take(layout, group)
        with disk_errors(root):
            _sync_folders(layout)
            space = _space_on_disk(layout, capacity, min_free)
            store = cls(layout, space, Catalogue(layout.catalogue), folder)
            store._recover()
        return store

    def _recover(self) -> None:
        """Add the shards, parts and leftovers that the last daemon left in the folder. Blocks."""
        for shard in find_shards(self.layout):
            self.restore(shard)
        for leftover in find_leftovers(self.layout):
            partial = Partial.recover(self.layout, leftover.key)
            if partial is None:
                # The attempt to recover its parts may have changed the journal's size.
                self.leftovers.keep(Leftover.of(leftover.paths[0]))
            else:
                self.parts.restore(partial)
        self._links.sweep(self.shards)

    def close(self) -> None:
        """Close the catalogue and unlock the folder."""
        self.catalogue.close()
        self.folder.close()

    def measured_space(self) -> Space:
        """Measure how much space other files leave to the cache; return the updated accounting.

        Raises DiskError.
        """
        self.space.measure(free_bytes(self.layout.root))
        return self.space

    # Arriving shards

    async def seal(self, tar: Path, sidecar: Path, facts: Facts) -> UnpublishedFiles:
        """Make the files of a verified, indexed shard read-only, as published files are.

        Raises DiskError.
        """
        return await asyncio.to_thread(self._seal, tar, sidecar, facts)

    def _seal(self, tar: Path, sidecar: Path, facts: Facts) -> UnpublishedFiles:
        with disk_errors(tar):
            for path in (sidecar, tar):
                path.chmod(_SHARD_MODE)
            return UnpublishedFiles(tar, sidecar, tar.stat().st_ino, facts)

    async def publish(self, key: str, files: UnpublishedFiles) -> Shard:
        """Publish a shard: make its files durable, and give them their final names.

        The bytes are synced before the files are renamed, so that a published file is always whole
        after a crash. The tar is renamed last, so that it never lacks its sidecar. The shard's
        bytes count as kept once the caller closes its reservation. Raises DiskError.
        """
        async with self._publishing:
            if key in self._damaged:
                # The damaged files of this key are moved before the new files take their names.
                # Otherwise the new files would be moved to quarantine later.
                await self.quarantine_damaged()
            sidecar_bytes = await asyncio.to_thread(self._publish, key, files)
        shard = Shard(key, files.facts.size_bytes, sidecar_bytes, time.time(), facts=files.facts)
        self.shards[key] = shard
        return shard

    def _publish(self, key: str, files: UnpublishedFiles) -> int:
        """Sync and rename the files, as `publish` describes. Blocks.

        Return the size of the sidecar in bytes.
        """
        tar = self.layout.tar(key)
        sidecar = self.layout.sidecar(key)
        with disk_errors(files.tar):
            self._sync(key, files)
            try:
                sidecar_bytes = files.sidecar.stat().st_size
                files.sidecar.rename(sidecar)
                files.tar.rename(tar)
                fsync_path(self.layout.shard_folder(key))
            except OSError:
                # A shard that is only half published must not stay: its bytes would not be
                # accounted for.
                with contextlib.suppress(OSError):
                    unlink_quietly(tar, sidecar)
                raise
        discard(self.layout, key)
        return sidecar_bytes

    def _sync(self, key: str, files: UnpublishedFiles) -> None:
        """Flush both files to the disk. If that fails, discard them, and raise OSError."""
        try:
            fsync_path(files.tar)
            fsync_path(files.sidecar)
        except OSError:
            # The kernel reports a failed write only once, and then treats the pages as clean. So
            # the next sync of the same files would succeed, and the bytes in memory would match
            # their checksums, though the disk lacks them. They have to be fetched again.
            discard(self.layout, key)
            raise

    async def add_index(self, shard: Shard, sidecar_path: Path, facts: Facts) -> None:
        """Add an index to a published shard that was fetched as a plain file.

        Args:
            sidecar_path: a sidecar with the index, which replaces the shard's present sidecar.
            facts: the facts in the new sidecar.

        Raises DiskError.
        """
        async with self._changing_published:
            if not self._is_in_service(shard):
                return  # the shard was evicted in the meantime, or is damaged
            added_bytes = await asyncio.to_thread(self._replace_sidecar, shard, sidecar_path)
            shard.sidecar_bytes += added_bytes
            shard.facts = facts
            self.space.kept_bytes += added_bytes
            if shard.pinned:
                self.space.pinned_bytes += added_bytes

    def _replace_sidecar(self, shard: Shard, sidecar_path: Path) -> int:
        """Replace a published sidecar; return by how many bytes the new one is larger. Blocks."""
        with disk_errors(sidecar_path):
            fsync_path(sidecar_path)
            sidecar_path.chmod(_SHARD_MODE)
            sidecar_path.rename(self.layout.sidecar(shard.key))
            fsync_path(self.layout.shard_folder(shard.key))
            return self.layout.sidecar(shard.key).stat().st_size - shard.sidecar_bytes

    def _is_in_service(self, shard: Shard) -> bool:
        """Return False once a shard has been evicted, or found to be damaged."""
        return self.shards.get(shard.key) is shard

    # Published shards

    def touch(self, shard: Shard) -> None:
        """Mark a shard as used now."""
        shard.used_at_s = time.time()
        if shard.key in self.shards:
            self.shards.move_to_end(shard.key)

    async def remember_use(self, shard: Shard) -> None:
        """Persist a shard's time of last use, at most once a minute.

        The time is stored as the modification time of the sidecar.
        """
        if shard.used_at_s - shard.use_saved_s < _USE_SAVE_INTERVAL_S:
            return
        shard.use_saved_s = shard.used_at_s
        sidecar = self.layout.sidecar(shard.key)
        times_s = (shard.used_at_s, shard.used_at_s)
        # An error means that the shard was evicted or the disk is failing. Losing the time of last
        # use only makes the order of eviction less exact.
        with contextlib.suppress(OSError):
            await asyncio.to_thread(os.utime, sidecar, times_s)

    async def facts(self, shard: Shard) -> Facts:
        """Return the facts in a shard's sidecar, which are read once and then kept in memory.

        When they are read, the size in them is compared with the tar's. On later calls, only the
        tar's existence is checked. Raises CorruptShardError, ExhaustedError.
        """
        if shard.facts is None:
            shard.facts = await asyncio.to_thread(self._read_facts, shard)
            return shard.facts

        if not self._is_in_service(shard):
            return shard.facts  # an evicted shard has no tar any more, which is no damage
        tar = self.layout.tar(shard.key)
        # os.path.exists is used because Path.exists raises an error on EIO. It runs on the event
        # loop, as it is usually a lookup in the kernel's dentry cache, which does not block.
        if not os.path.exists(tar):  # noqa: ASYNC240, PTH110
            raise CorruptShardError(
                f"the cached file {tar} cannot be read: it no longer exists",
                url=shard.facts.url,
            )
        return shard.facts

    def _read_facts(self, shard: Shard) -> Facts:
        """Read the facts from a shard's sidecar, and compare their size with the tar's. Blocks."""
        tar = self.layout.tar(shard.key)
        sidecar = self.layout.sidecar(shard.key)
        return read_facts(tar, sidecar, shard.size_bytes)

    async def named_path(self, shard: Shard, facts: Facts) -> Path:
        """Return a path of a shard that ends with its object's name.

        Some libraries recognise a file's format by its name.
        """
        return await asyncio.to_thread(self._links.link, shard.key, facts)

    async def readable_facts(self, shards: Sequence[Shard]) -> list[Facts]:
        """Return the facts of those of the shards whose sidecars can be read."""
        return await asyncio.to_thread(self._readable_facts, shards)

    def _readable_facts(self, shards: Sequence[Shard]) -> list[Facts]:
        facts: list[Facts] = []
        for shard in shards:
            # The error is raised later, to the reader that requests the shard.
            with contextlib.suppress(CorruptShardError, ExhaustedError):
                facts.append(self._read_facts(shard))
        return facts

    def is_suspect(self, shard: Shard) -> bool:
        """Return True if a reader has reported damage to a shard, or its index is missing."""
        if shard.suspicion:
            return True
        is_indexed = shard.facts is not None and shard.facts.samples is not None
        if not is_indexed:
            return False
        # `os.path.exists` is used for the same reason as in `facts`.
        has_sidecar = os.path.exists(self.layout.sidecar(shard.key))  # noqa: PTH110
        return not has_sidecar

    async def check_sidecar(self, shard: Shard, facts: Facts) -> None:
        """Check the sidecar of a shard. Raises CorruptShardError, ExhaustedError."""
        try:
            await asyncio.to_thread(check_sidecar, self.layout.sidecar(shard.key), facts)
        except FileNotFoundError as exn:
            raise CorruptShardError(
                f"the sidecar {exn.filename} no longer exists",
                url=facts.url,
            ) from exn

    async def check_tar(self, shard: Shard, facts: Facts) -> None:
        """Verify the whole tar, or file, of a shard against given facts; ignore its sidecar.

        Raises as `check` does.
        """
        scrub = Scrub(self.layout.tar(shard.key), sidecar=None, facts=facts)
        await self._verify(scrub, facts)

    async def check(self, shard: Shard) -> None:
        """Verify the whole shard and its sidecar.

        Raises CorruptShardError, which names the first damaged part; ExhaustedError.
        """
        facts = await self.facts(shard)
        await self._verify(self.scrub(shard.key, facts), facts)

    async def _verify(self, scrub: Scrub, facts: Facts) -> None:
        """Run a scrub in a thread; a missing file counts as damage."""
        try:
            await asyncio.to_thread(scrub.run)
        except FileNotFoundError as exn:
            cause = f"the cached file {exn.filename} cannot be read ({exn.strerror})"
            raise CorruptShardError(cause, url=facts.url) from exn

    def scrub(self, key: str, facts: Facts) -> Scrub:
        """Return a `Scrub` of a shard and its sidecar, which verifies them step by step."""
        return Scrub(self.layout.tar(key), self.layout.sidecar(key), facts)

    async def remove(self, shard: Shard) -> bool:
        """Unlink the files of a shard without leases; return False if a process has it open.

        If the files cannot be removed, the shard is in service again. If the task is cancelled, it
        ends after the removal. Raises DiskError.
        """
        del self.shards[shard.key]
        self._removing.add(shard.key)
        return await finished(self._remove(shard))

    async def _remove(self, shard: Shard) -> bool:
        """Unlink the files of a shard that is out of service, and account for the result."""
        removed = False
        try:
            removed = await asyncio.to_thread(self._unlink, shard.key)
        finally:
            self._removing.discard(shard.key)
            if removed:
                self.space.kept_bytes -= shard.kept_bytes
            else:
                # The shard goes to the end of the order, as if it was used just now. So the evictor
                # tries all others first.
                self.shards[shard.key] = shard
        return removed

    def _unlink(self, key: str) -> bool:
        """Unlink a shard's files; return False if a process has the tar open. Blocks."""
        paths = (self.layout.tar(key), self.layout.sidecar(key))
        removed = unlink_unless_open(paths)
        if removed:
            self._links.remove(key)
        return removed

    def is_linked(self, shard: Shard) -> bool:
        """Return True if a shard has a hard link outside the folder."""
        # An error means that the shard has just been removed, or that the disk is failing.
        with contextlib.suppress(OSError):
            return self.layout.tar(shard.key).stat().st_nlink > 1
        return False

    async def quarantine(self, shard: Shard) -> None:
        """Take a corrupt shard out of service, and move it to quarantine.

        If it cannot be moved now, the next call of `quarantine_damaged` moves it. Raises DiskError.
        """
        if not self._is_in_service(shard):
            return
        del self.shards[shard.key]
        self._damaged[shard.key] = shard
        await self.quarantine_damaged()

    async def quarantine_damaged(self) -> None:
        """Move all shards that are known to be corrupt to quarantine.

        They stay there until their space is needed. Raises DiskError.
        """
        async with self._changing_published:
            for key, shard in list(self._damaged.items()):
                leftover = await asyncio.to_thread(self._move_to_quarantine, shard)
                was_forgotten = self._damaged.pop(key, None) is None
                if was_forgotten:
                    # The folder was deleted in the meantime, and `forget` has subtracted the bytes.
                    continue
                self.space.kept_bytes -= shard.kept_bytes
                self.leftovers.keep(leftover)

    def _move_to_quarantine(self, shard: Shard) -> Leftover:
        """Move a shard's existing files to quarantine; return them as a leftover. Blocks."""
        tar = self.layout.tar(shard.key)
        sidecar = self.layout.sidecar(shard.key)
        quarantined_tar = self.layout.quarantine / (shard.key + TAR)
        with disk_errors(quarantined_tar):
            if tar.exists():
                tar.rename(quarantined_tar)
            if sidecar.exists():
                sidecar.rename(quarantined_tar.with_suffix(SIDECAR))
            self._links.remove(shard.key)
            for folder in (self.layout.quarantine, self.layout.shard_folder(shard.key)):
                fsync_path(folder)  # a power loss must not undo the renames
        return Leftover.of(quarantined_tar)

    # Changes to the folder by others

    def known_keys(self) -> frozenset[str]:
        """Return the keys of all shards that use space.

        These include shards that are not in service: damaged ones, and those being removed.
        """
        return frozenset(self.shards) | frozenset(self._damaged) | frozenset(self._removing)

    def forget(self, key: str) -> bool:
        """Stop accounting for a shard or leftover whose files are gone.

        Return False if there is no shard or leftover with this key.
        """
        shard = self.shards.pop(key, None)
        if shard is None:
            shard = self._damaged.pop(key, None)
        if shard is not None:
            self.space.kept_bytes -= shard.kept_bytes
            return True

        return self.leftovers.forget(key)

    def restore(self, shard: Shard) -> None:
        """Add a shard whose files were found in the folder, so that readers can get it."""
        self.shards[shard.key] = shard
        self.space.kept_bytes += shard.kept_bytes


def _sync_folders(layout: Layout) -> None:
    """Make the folders of the shards durable: a power loss could remove one with its shards."""
    for parent in (layout.shards, layout.root):
        # An error is ignored: cached shards can be served from a disk that fails to sync.
        with contextlib.suppress(OSError):
            fsync_path(parent)


def _space_on_disk(layout: Layout, capacity: DiskAmount, min_free: DiskAmount) -> Space:
    """Return an empty accounting, with its limits in bytes.

    Args:
        capacity: the capacity in bytes, or as a share of the filesystem.
        min_free: the free space to keep, in bytes or as a share of the filesystem.
    """
    stat = os.statvfs(layout.root)
    total_bytes = stat.f_blocks * stat.f_frsize
    warning = capacity.excess_warning(total_bytes)
    if warning:
        log.warning(
            warning,
            remedy="lower --capacity, or set a share of the filesystem such as 80%",
        )
    return Space(capacity.of(total_bytes), min_free.of(total_bytes))
