"""The cache store: publishing, finding, verifying and removing shards."""

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
from shardcache.errors import CorruptShardError, ExhaustedError
from shardcache.shared.units import size
from shardcache.store.cached_parts import CachedParts
from shardcache.store.catalogue import Catalogue
from shardcache.store.disk.disk_errors import disk_errors
from shardcache.store.disk.file_operations import fsync_path, unlink_quietly
from shardcache.store.disk.mounts import free_bytes
from shardcache.store.disk.open_files import unlink_unless_open
from shardcache.store.folder.cache_folder import CacheFolder
from shardcache.store.folder.folder_contents import Leftover, find_leftovers, find_shards
from shardcache.store.folder.layout import SIDECAR, TAR, Layout
from shardcache.store.folder.name_links import NameLinks
from shardcache.store.leftovers import Leftovers
from shardcache.store.partial import Partial, discard
from shardcache.store.shard import Facts, Shard, Unpublished
from shardcache.store.space import Space
from shardcache.store.verification import Scrub, check_sidecar, read_facts

log = structlog.get_logger()

_SHARD_MODE = 0o440  # published files are never written again

# More would not finish sooner on one disk, and each takes a thread that other work may need.
_MAX_PUBLISHED_AT_ONCE = 8
# Minimum time between two records of a shard's last use.
_USE_SAVED_S = 1.0


class Store:
    """One cache folder, locked exclusively.

    Attributes:
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
        self._damaged: dict[str, Shard] = {}  # out of service, and not yet moved to quarantine
        self._removing: set[str] = set()  # keys of shards whose files are being unlinked
        # Held while files of a published shard move to quarantine, or its sidecar is replaced.
        self._changing_published = asyncio.Lock()
        self._publishing = asyncio.Semaphore(_MAX_PUBLISHED_AT_ONCE)

    def __repr__(self) -> str:
        root = str(self.layout.root)
        used = size(self.space.used_bytes)
        capacity = size(self.space.capacity_bytes)
        return f"Store({root!r}, shards={len(self.shards)}, used={used} of {capacity})"

    @classmethod
    def open(
        cls, root: Path, capacity: DiskAmount, min_free: DiskAmount, group: str | None = None
    ) -> Self:
        """Lock the folder and recover its contents. Blocks.

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
                self.leftovers.keep(leftover)
            else:
                self.parts.restore(partial)
        self._links.sweep(self.shards)

    def close(self) -> None:
        """Close the catalogue and unlock the folder."""
        self.catalogue.close()
        self.folder.close()

    def measured(self) -> Space:
        """Return the accounting, after measuring what other files on the disk leave to the cache.

        Raises DiskError.
        """
        self.space.measure(free_bytes(self.layout.root))
        return self.space

    # Arriving shards

    async def seal(self, tar: Path, sidecar: Path, facts: Facts) -> Unpublished:
        """Give a verified, indexed shard's files the mode of published ones. Raises DiskError."""
        return await asyncio.to_thread(self._seal, tar, sidecar, facts)

    def _seal(self, tar: Path, sidecar: Path, facts: Facts) -> Unpublished:
        with disk_errors(tar):
            for path in (sidecar, tar):
                path.chmod(_SHARD_MODE)
            return Unpublished(tar, sidecar, tar.stat().st_ino, facts)

    async def publish(self, key: str, files: Unpublished) -> Shard:
        """Publish a shard: sync its bytes to disk first, then rename, the tar last.

        Raises DiskError.
        """
        async with self._publishing:
            if key in self._damaged:
                await self.set_aside()  # now: later, it would move the new files
            sidecar_bytes = await asyncio.to_thread(self._publish, key, files)
        shard = Shard(key, files.facts.size_bytes, sidecar_bytes, time.time(), facts=files.facts)
        self.shards[key] = shard
        return shard

    def _publish(self, key: str, files: Unpublished) -> int:
        tar = self.layout.tar(key)
        sidecar = self.layout.sidecar(key)
        with disk_errors(files.tar):
            self._sync(key, files)
            try:
                sidecar_bytes = files.sidecar.stat().st_size
                files.sidecar.rename(sidecar)
                files.tar.rename(tar)
                fsync_path(self.layout.bucket(key))
            except OSError:
                # Published midway, they would not be accounted for.
                with contextlib.suppress(OSError):
                    unlink_quietly(tar, sidecar)
                raise
        discard(self.layout, key)
        return sidecar_bytes

    def _sync(self, key: str, files: Unpublished) -> None:
        """Flush both files to the disk. If that fails, discard them, and raise OSError."""
        try:
            fsync_path(files.tar)
            fsync_path(files.sidecar)
        except OSError:
            # The kernel reports lost pages once, and then treats them as clean: the next sync of
            # the same files would succeed, and the bytes in memory match their checksums. They
            # have to be fetched again.
            discard(self.layout, key)
            raise

    async def add_index(self, shard: Shard, sidecar_path: Path, facts: Facts) -> None:
        """Give an index to a shard that was fetched as a plain file. Raises DiskError.

        Args:
            sidecar_path: the sidecar with the index, which replaces the shard's own.
            facts: the facts in it.
        """
        async with self._changing_published:
            if not self._is_in_service(shard):
                return  # it turned out to be damaged in the meantime
            added_bytes = await asyncio.to_thread(self._replace_sidecar, shard, sidecar_path)
            shard.sidecar_bytes += added_bytes
            shard.facts = facts
            self.space.kept_bytes += added_bytes
            if shard.pinned:
                self.space.pinned_bytes += added_bytes

    def _replace_sidecar(self, shard: Shard, sidecar_path: Path) -> int:
        """Publish another sidecar; return by how many bytes it is larger than the old one."""
        with disk_errors(sidecar_path):
            fsync_path(sidecar_path)
            sidecar_path.chmod(_SHARD_MODE)
            sidecar_path.rename(self.layout.sidecar(shard.key))
            fsync_path(self.layout.bucket(shard.key))
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
        """Persist the time of last use, at most once a second: it is the sidecar's mtime."""
        if shard.used_at_s - shard.use_saved_s < _USE_SAVED_S:
            return
        shard.use_saved_s = shard.used_at_s
        sidecar = self.layout.sidecar(shard.key)
        times_s = (shard.used_at_s, shard.used_at_s)
        with contextlib.suppress(OSError):  # evicted, or a failing disk: not worth an error
            await asyncio.to_thread(os.utime, sidecar, times_s)

    async def facts(self, shard: Shard) -> Facts:
        """Return the sidecar's facts. When they are first read, they are compared with the tar.

        Raises CorruptShardError, ExhaustedError.
        """
        if shard.facts is None:
            shard.facts = await asyncio.to_thread(self._read_facts, shard)
            return shard.facts

        if not self._is_in_service(shard):
            return shard.facts  # evicted: a missing tar is not damage then
        tar = self.layout.tar(shard.key)
        # os.path.exists, since Path.exists raises on EIO. On the event loop, since it is usually a
        # dentry cache lookup.
        if not os.path.exists(tar):  # noqa: ASYNC240, PTH110
            raise CorruptShardError(
                f"the cached file {tar} cannot be read: it no longer exists",
                url=shard.facts.url,
            )
        return shard.facts

    def _read_facts(self, shard: Shard) -> Facts:
        key = shard.key
        return read_facts(self.layout.tar(key), self.layout.sidecar(key), shard.size_bytes)

    async def named_path(self, shard: Shard, facts: Facts) -> Path:
        """Return a path of a shard that ends with its object's name.

        Some libraries recognise the format by the name.
        """
        return await asyncio.to_thread(self._links.path, shard.key, facts)

    async def peek(self, shards: Sequence[Shard]) -> list[Facts | None]:
        """Return the facts of shards, read in one thread call; None for unreadable sidecars.

        Their readers get the error.
        """
        return await asyncio.to_thread(lambda: [self._peek(shard) for shard in shards])

    def _peek(self, shard: Shard) -> Facts | None:
        with contextlib.suppress(CorruptShardError, ExhaustedError):
            return self._read_facts(shard)
        return None

    def is_suspect(self, shard: Shard) -> bool:
        """Return True if a reader has reported damage, or the sidecar of an index is missing."""
        if shard.suspicion:
            return True
        is_indexed = shard.facts is not None and shard.facts.samples is not None
        if not is_indexed:
            return False
        has_sidecar = os.path.exists(self.layout.sidecar(shard.key))  # noqa: PTH110  # as in `facts`
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
        """Verify the whole tar, or file, of a shard, whatever its sidecar holds.

        Raises as `check` does.
        """
        await self._verify(Scrub(self.layout.tar(shard.key), sidecar=None, facts=facts), facts)

    async def check(self, shard: Shard) -> None:
        """Verify the whole shard and its sidecar.

        Raises CorruptShardError, which names the first damaged part.
        """
        facts = await self.facts(shard)
        await self._verify(self.scrub(shard.key, facts), facts)

    async def _verify(self, scrub: Scrub, facts: Facts) -> None:
        try:
            await asyncio.to_thread(scrub.run)
        except FileNotFoundError as exn:
            cause = f"the cached file {exn.filename} cannot be read ({exn.strerror})"
            raise CorruptShardError(cause, url=facts.url) from exn

    def scrub(self, key: str, facts: Facts) -> Scrub:
        """Return the verification of a shard in steps."""
        return Scrub(self.layout.tar(key), self.layout.sidecar(key), facts)

    async def remove(self, shard: Shard) -> bool:
        """Unlink a shard without leases; return False if some process still has it open."""
        del self.shards[shard.key]
        self._removing.add(shard.key)
        removed = False
        try:
            removed = await asyncio.to_thread(self._remove, shard.key)
        finally:
            self._removing.discard(shard.key)
            if removed:
                self.space.kept_bytes -= shard.kept_bytes
            else:  # it is in use, or the disk fails: it counts as used just now
                self.shards[shard.key] = shard
        return removed

    def _remove(self, key: str) -> bool:
        paths = (self.layout.tar(key), self.layout.sidecar(key))
        removed = unlink_unless_open(paths)
        if removed:
            self._links.remove(key)
        return removed

    def is_linked(self, shard: Shard) -> bool:
        """Return True if a shard has a hard link outside the folder."""
        with contextlib.suppress(OSError):  # it has just been removed, or the disk is failing
            return self.layout.tar(shard.key).stat().st_nlink > 1
        return False

    async def quarantine(self, shard: Shard) -> None:
        """Take a corrupt shard out of service, and move it to quarantine.

        If it cannot be moved now, the next `set_aside` moves it. Raises DiskError.
        """
        if not self._is_in_service(shard):
            return
        del self.shards[shard.key]
        self._damaged[shard.key] = shard
        await self.set_aside()

    async def set_aside(self) -> None:
        """Move all corrupt shards to quarantine, where they stay until their space is needed.

        Raises DiskError.
        """
        async with self._changing_published:
            for key, shard in list(self._damaged.items()):
                leftover = await asyncio.to_thread(self._quarantine, shard)
                if self._damaged.pop(key, None) is None:
                    continue  # the folder was deleted in the meantime
                self.space.kept_bytes -= shard.kept_bytes
                self.leftovers.keep(leftover)

    def _quarantine(self, shard: Shard) -> Leftover:
        """Move those of a shard's files that exist; return what they are from now on."""
        tar = self.layout.tar(shard.key)
        sidecar = self.layout.sidecar(shard.key)
        aside = self.layout.quarantine / (shard.key + TAR)
        with disk_errors(aside):
            if tar.exists():
                tar.rename(aside)
            if sidecar.exists():
                sidecar.rename(aside.with_suffix(SIDECAR))
            self._links.remove(shard.key)
            for folder in (self.layout.quarantine, self.layout.bucket(shard.key)):
                fsync_path(folder)  # a power loss must not undo the renames
        return Leftover.of(aside)

    # Changes to the folder by others

    def known(self) -> frozenset[str]:
        """Return the keys of all shards that use space, damaged and half removed ones as well."""
        return frozenset(self.shards) | frozenset(self._damaged) | frozenset(self._removing)

    def forget(self, key: str) -> bool:
        """Stop accounting for a shard or leftover whose files are gone; False if it is unknown."""
        shard = self.shards.pop(key, None)
        if shard is None:
            shard = self._damaged.pop(key, None)
        if shard is not None:
            self.space.kept_bytes -= shard.kept_bytes
            return True

        return self.leftovers.forget(key)

    def restore(self, shard: Shard) -> None:
        """Serve a shard whose files were found in the folder."""
        self.shards[shard.key] = shard
        self.space.kept_bytes += shard.kept_bytes


def _sync_folders(layout: Layout) -> None:
    """Make sure that a power loss does not remove a bucket with its shards."""
    for parent in (layout.shards, layout.root):
        with contextlib.suppress(OSError):  # a failing disk can still be served from
            fsync_path(parent)


def _space_on_disk(layout: Layout, capacity: DiskAmount, min_free: DiskAmount) -> Space:
    """Return an empty accounting, with limits that may be shares of the filesystem."""
    stat = os.statvfs(layout.root)
    total_bytes = stat.f_blocks * stat.f_frsize
    warning = capacity.excess(total_bytes)
    if warning:
        log.warning(
            warning,
            remedy="lower --capacity, or set a share of the filesystem such as 80%",
        )
    return Space(capacity.of(total_bytes), min_free.of(total_bytes))
