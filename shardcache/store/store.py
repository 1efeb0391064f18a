"""The cache store: its bytes, and publishing, finding, verifying and removing shards."""

import asyncio
import contextlib
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import structlog

from shardcache.config import Amount
from shardcache.errors import CorruptShardError, ExhaustedError, ShardError
from shardcache.store import disk
from shardcache.store import partial as partials
from shardcache.store.catalogue import Catalogue
from shardcache.store.folder import SIDECAR, TAR, CacheFolder, Layout, Leftover, find_leftovers, find_shards
from shardcache.store.names import NameLinks
from shardcache.store.shard import Facts, Scrub, Shard, Unpublished, check_index
from shardcache.tarindex.tables import read_header
from shardcache.units import size

log = structlog.get_logger()

_SHARD_MODE = 0o440  # published files are never written again
# More would end no sooner, on the same disk. Each takes a thread, of which other work needs some.
_MAX_PUBLISHED_AT_ONCE = 8
_MIN_FREE_BYTES = 64 * 1024  # with less free space, not even the cache's own state can be written


def footprint_bytes(size_bytes: int) -> int:
    """Return the bytes to reserve for a shard of known size, with an estimate for its sidecar and journal."""
    return size_bytes + size_bytes // 32 + 64 * 1024


def typical_sidecar_bytes(samples: int) -> int:
    """Return the size of the sidecar of a shard with this number of samples, of two members and a short key each."""
    header_bytes, key_bytes, members = 640, 12, 2
    return header_bytes + samples * (key_bytes + 16 + 20 * members)


@dataclass(slots=True)
class Space:
    """The cache's bytes under its own limits: kept, reserved and still available.

    Space is reserved before a byte is fetched, as in bazel-remote's disk cache, so that published, arriving and
    quarantined files together never exceed the capacity.
    """

    capacity_bytes: int
    min_free_bytes: int = 0  # that the filesystem must keep free
    kept_bytes: int = 0  # published shards with their sidecars, idle partials and quarantine
    reserved_bytes: int = 0  # open reservations, whether already on disk or not
    unwritten_bytes: int = 0  # the part of `reserved_bytes` that the filesystem does not yet count as used
    pinned_bytes: int = 0  # the part of `kept_bytes` that is pinned
    disk_limit_bytes: int = sys.maxsize  # size that other files on the disk leave to the cache, when last measured

    @property
    def used_bytes(self) -> int:
        """All bytes that count against the capacity."""
        return self.kept_bytes + self.reserved_bytes

    def measure(self, disk_free_bytes: int) -> None:
        """Update `disk_limit_bytes`, which changes with other files only, not with the cache's own."""
        self.disk_limit_bytes = self.used_bytes - self.unwritten_bytes + disk_free_bytes - self.min_free_bytes

    def effective_bytes(self, allocating_bytes: int = 0) -> int:
        """Return what the disk can hold of the capacity; `allocating_bytes` may have been on it when last measured."""
        return max(0, min(self.capacity_bytes, self.disk_limit_bytes + allocating_bytes))

    @property
    def explanation(self) -> str:
        """The effective capacity in words, with its cause."""
        if self.effective_bytes() < self.capacity_bytes:
            return f"other files on the disk limit the cache to {size(self.effective_bytes())}"
        return f"the cache's capacity is {size(self.capacity_bytes)}"

    @property
    def remedy(self) -> str:
        """Advice for those to whom the effective capacity is too small."""
        is_limited = self.effective_bytes() < self.capacity_bytes
        return "remove other files from the cache's disk, or lower --min-free" if is_limited else "raise --capacity"

    def shortfall_bytes(self, wanted_bytes: int) -> int:
        """Return how many bytes must be evicted before `wanted_bytes` can be reserved; 0 if none."""
        return max(0, self.used_bytes + wanted_bytes - min(self.capacity_bytes, self.disk_limit_bytes))

    @property
    def crowding_bytes(self) -> int:
        """Bytes to evict so that `min_free_bytes` and a small reserve of the filesystem are free."""
        return max(0, self.used_bytes + _MIN_FREE_BYTES - self.disk_limit_bytes)


@dataclass(slots=True)
class Reservation:
    """One transfer's reservation within the promised bytes; ended by exactly one call of `close`."""

    space: Space
    size_bytes: int = 0
    unwritten_bytes: int = 0

    def grow(self, size_bytes: int) -> None:
        """Reserve more bytes; the caller has checked that the shortfall for them is 0."""
        self.size_bytes += size_bytes
        self.unwritten_bytes += size_bytes
        self.space.reserved_bytes += size_bytes
        self.space.unwritten_bytes += size_bytes

    def adopt(self, kept_bytes: int) -> None:
        """Take over bytes that are already on disk, such as those of an idle partial."""
        self.space.kept_bytes -= kept_bytes
        self.space.reserved_bytes += kept_bytes
        self.size_bytes += kept_bytes

    def written(self, size_bytes: int) -> None:
        """Record that reserved bytes are now on disk."""
        self.unwritten_bytes -= size_bytes
        self.space.unwritten_bytes -= size_bytes

    def close(self, kept_bytes: int = 0) -> None:
        """Release the reservation, except `kept_bytes`, which stay on disk and count as kept."""
        self.space.reserved_bytes -= self.size_bytes
        self.space.unwritten_bytes -= self.unwritten_bytes
        self.space.kept_bytes += kept_bytes
        self.size_bytes = self.unwritten_bytes = 0


class Store:
    """One cache folder, locked exclusively. `shards` is ordered from least to most recently used."""

    def __init__(self, layout: Layout, space: Space, catalogue: Catalogue, folder: CacheFolder) -> None:
        self.layout = layout
        self.folder = folder
        self.space = space
        self.catalogue = catalogue
        self.shards: OrderedDict[str, Shard] = OrderedDict()
        self._links = NameLinks(layout)
        self.leftovers: dict[str, Leftover] = {}
        self._condemned: dict[str, Shard] = {}  # damaged and out of service, not yet moved to quarantine
        self._removing: set[str] = set()  # keys of shards whose files are being unlinked
        self._setting_aside = asyncio.Lock()
        self._publishing = asyncio.Semaphore(_MAX_PUBLISHED_AT_ONCE)

    def __repr__(self) -> str:
        used, capacity = self.space.used_bytes, self.space.capacity_bytes
        return f"Store({str(self.layout.root)!r}, shards={len(self.shards)}, used={size(used)} of {size(capacity)})"

    @classmethod
    def open(cls, root: Path, capacity: Amount, min_free: Amount, group: str | None = None) -> Self:
        """Lock the folder and recover its contents. Blocks. Raises CacheDirError, CacheFormatError, DiskError."""
        layout = Layout(root.absolute())
        folder = CacheFolder.take(layout, group)
        with disk.disk_errors(root):
            for parent in (layout.shards, layout.root):
                # A power loss must not remove a bucket with its shards; a failing disk can still be served from.
                with contextlib.suppress(OSError):
                    disk.fsync_path(parent)
            stat = os.statvfs(layout.root)
            total = stat.f_blocks * stat.f_frsize
            space = Space(capacity.of(total), min_free.of(total))
            if warning := capacity.excess(total):
                log.warning(warning, remedy="lower --capacity, or set a share of the filesystem such as 80%")
            store = cls(layout, space, Catalogue(layout.catalogue), folder)
            for shard in find_shards(layout):
                store.restore(shard)
            for leftover in find_leftovers(layout):
                store.leave(leftover)
            store._links.sweep(store.shards)
        return store

    def close(self) -> None:
        """Close the catalogue and unlock the folder."""
        self.catalogue.close()
        self.folder.close()

    def measured(self) -> Space:
        """Return the accounting, after measuring what other files on the disk leave to the cache. Raises DiskError."""
        self.space.measure(disk.free_bytes(self.layout.root))
        return self.space

    # Arriving shards

    def adopt(self, key: str, reservation: Reservation) -> None:
        """Move the bytes of the key's idle partial, if any, into the reservation of the download that resumes it."""
        leftover = self.leftovers.pop(key, None)
        if leftover is not None:
            reservation.adopt(leftover.size_bytes)

    def leave(self, leftover: Leftover) -> None:
        """Keep a leftover until its space is needed."""
        replaced = self.leftovers.pop(leftover.key, None)
        if replaced is not None:
            self.space.kept_bytes -= replaced.size_bytes
        self.leftovers[leftover.key] = leftover
        self.space.kept_bytes += leftover.size_bytes

    async def seal(self, tar: Path, sidecar: Path, facts: Facts) -> Unpublished:
        """Give the files of a verified, indexed shard the mode of published ones. Raises DiskError."""
        return await asyncio.to_thread(self._seal, tar, sidecar, facts)

    def _seal(self, tar: Path, sidecar: Path, facts: Facts) -> Unpublished:
        with disk.disk_errors(tar):
            for path in (sidecar, tar):
                path.chmod(_SHARD_MODE)
            return Unpublished(tar, sidecar, tar.stat().st_ino, facts)

    async def publish(self, key: str, files: Unpublished) -> Shard:
        """Publish a shard: sync its bytes to disk first, then rename, the tar last. Raises DiskError."""
        async with self._publishing:
            if key in self._condemned:
                await self.set_aside()  # doing it later would move the new files
            sidecar_bytes = await asyncio.to_thread(self._publish, key, files)
        shard = Shard(key, files.facts.size_bytes, sidecar_bytes, time.time(), facts=files.facts)
        self.shards[key] = shard
        return shard

    def _publish(self, key: str, files: Unpublished) -> int:
        tar, sidecar = self.layout.tar(key), self.layout.sidecar(key)
        with disk.disk_errors(files.tar):
            self._sync(key, files)
            try:
                sidecar_bytes = files.sidecar.stat().st_size
                files.sidecar.rename(sidecar)
                files.tar.rename(tar)
                disk.fsync_path(self.layout.bucket(key))
            except OSError:
                with contextlib.suppress(OSError):
                    disk.unlink_quietly(tar, sidecar)  # published midway, they would not be accounted for
                raise
        partials.discard(self.layout, key)
        return sidecar_bytes

    def _sync(self, key: str, files: Unpublished) -> None:
        try:
            disk.fsync_path(files.tar)
            disk.fsync_path(files.sidecar)
        except OSError:
            # The kernel reports lost pages once, and takes them for clean then: the next sync of
            # the same files would succeed, and the bytes in memory match their checksums. They
            # have to be fetched again.
            partials.discard(self.layout, key)
            raise

    async def add_index(self, shard: Shard, sidecar_path: Path, facts: Facts) -> None:
        """Replace the sidecar of a shard that was fetched as a plain file. Raises DiskError."""
        async with self._setting_aside:
            if self.shards.get(shard.key) is not shard:
                return  # damaged, and out of service since
            added_bytes = await asyncio.to_thread(self._replace_sidecar, shard, sidecar_path)
            shard.sidecar_bytes += added_bytes
            shard.facts = facts
            self.space.kept_bytes += added_bytes
            self.space.pinned_bytes += added_bytes if shard.pinned else 0

    def _replace_sidecar(self, shard: Shard, sidecar_path: Path) -> int:
        with disk.disk_errors(sidecar_path):
            disk.fsync_path(sidecar_path)
            sidecar_path.chmod(_SHARD_MODE)
            sidecar_path.rename(self.layout.sidecar(shard.key))
            disk.fsync_path(self.layout.bucket(shard.key))
            return self.layout.sidecar(shard.key).stat().st_size - shard.sidecar_bytes

    # Published shards

    def touch(self, shard: Shard) -> None:
        """Mark a shard as used now."""
        shard.used_at_s = time.time()
        if shard.key in self.shards:
            self.shards.move_to_end(shard.key)

    async def remember_use(self, shard: Shard) -> None:
        """Persist the time of last use as the sidecar's modification time."""
        sidecar, used_at_s = self.layout.sidecar(shard.key), shard.used_at_s
        with contextlib.suppress(OSError):  # evicted, or a failing disk: a timestamp is not worth an error
            await asyncio.to_thread(os.utime, sidecar, (used_at_s, used_at_s))

    async def facts(self, shard: Shard) -> Facts:
        """Return the sidecar's facts, compared with the tar at first. Raises CorruptShardError, ExhaustedError."""
        if shard.facts is None:
            shard.facts = await asyncio.to_thread(self._read_facts, shard)
            return shard.facts
        tar = self.layout.tar(shard.key)
        # os.path.exists, since Path.exists raises on EIO. On the event loop, since it is usually a dentry cache lookup.
        if self.shards.get(shard.key) is shard and not os.path.exists(tar):  # noqa: ASYNC240, PTH110
            raise CorruptShardError(f"the cached file {tar} cannot be read: it no longer exists", url=shard.facts.url)
        return shard.facts

    def _read_facts(self, shard: Shard) -> Facts:
        path = self.layout.sidecar(shard.key)
        try:
            with disk.damage_errors(path):
                facts = Facts.from_json(read_header(path))
        except (ShardError, OSError, KeyError, TypeError, ValueError, OverflowError) as exn:
            raise CorruptShardError(f"the sidecar {path} cannot be read ({exn})") from exn
        if facts.size_bytes != shard.size_bytes:
            raise CorruptShardError(
                f"{self.layout.tar(shard.key)} has {shard.size_bytes} bytes instead of {facts.size_bytes}",
                url=facts.url,
            )
        return facts

    async def named_path(self, shard: Shard, facts: Facts) -> Path:
        """Return a path of a shard that ends with its object's name, for libraries that go by it."""
        return await asyncio.to_thread(self._links.path, shard.key, facts)

    async def peek(self, shards: Sequence[Shard]) -> list[Facts | None]:
        """Return the facts of shards, read in one thread call; None for unreadable sidecars: readers get the error."""

        def peek(shard: Shard) -> Facts | None:
            with contextlib.suppress(CorruptShardError, ExhaustedError):
                return self._read_facts(shard)
            return None

        return await asyncio.to_thread(lambda: [*map(peek, shards)])

    def is_suspect(self, shard: Shard) -> bool:
        """Return True if a reader has reported damage, or the index is missing."""
        if shard.suspicion or shard.facts is None or shard.facts.samples is None:
            return bool(shard.suspicion)
        return not os.path.exists(self.layout.sidecar(shard.key))  # noqa: PTH110  # as in `facts`

    async def check_index(self, shard: Shard, facts: Facts) -> None:
        """Check the sidecar of a shard. Raises CorruptShardError, ExhaustedError."""
        try:
            await asyncio.to_thread(check_index, self.layout.sidecar(shard.key), facts)
        except FileNotFoundError as exn:
            raise CorruptShardError(f"the sidecar {exn.filename} no longer exists", url=facts.url) from exn

    async def check_tar(self, shard: Shard, facts: Facts) -> None:
        """Verify the whole tar, or file, of a shard, whatever its sidecar holds. Raises as `check` does."""
        await self._verify(Scrub(self.layout.tar(shard.key), None, facts), facts)

    async def check(self, shard: Shard) -> None:
        """Verify the whole shard and its sidecar. Raises CorruptShardError, which names the first damaged piece."""
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
            else:
                self.shards[shard.key] = shard  # as most recently used: it is in use, or the disk fails
        return removed

    def _remove(self, key: str) -> bool:
        paths = (self.layout.tar(key), self.layout.sidecar(key))
        removed = _unlink_unless_open(paths)
        if removed:
            self._links.remove(key)
        return removed

    def is_linked(self, shard: Shard) -> bool:
        """Return True if a shard has a hard link outside the folder."""
        with contextlib.suppress(OSError):  # it has just been removed, or the disk is failing
            return self.layout.tar(shard.key).stat().st_nlink > 1
        return False

    async def remove_leftover(self, key: str) -> bool:
        """Remove an idle partial or a quarantined shard; return False if some process still has it open."""
        leftover = self.leftovers.pop(key)
        removed = False
        try:
            removed = await asyncio.to_thread(_unlink_unless_open, leftover.paths)
        finally:
            if removed:
                self.space.kept_bytes -= leftover.size_bytes
            else:
                self.leftovers[key] = leftover
        return removed

    async def quarantine(self, shard: Shard) -> None:
        """Take a corrupt shard out of service, and move it, if need be later, by `set_aside`. Raises DiskError."""
        if self.shards.get(shard.key) is not shard:
            return
        del self.shards[shard.key]
        self._condemned[shard.key] = shard
        await self.set_aside()

    async def set_aside(self) -> None:
        """Move all corrupt shards to quarantine, where they stay until their space is needed. Raises DiskError."""
        async with self._setting_aside:
            for key, shard in list(self._condemned.items()):
                leftover = await asyncio.to_thread(self._quarantine, shard)
                if self._condemned.pop(key, None) is not None:  # else the folder was deleted in the meantime
                    self.space.kept_bytes -= shard.kept_bytes
                    self.leave(leftover)

    def _quarantine(self, shard: Shard) -> Leftover:
        aside = self.layout.quarantine / (shard.key + TAR)
        with disk.disk_errors(aside):
            if self.layout.tar(shard.key).exists():
                self.layout.tar(shard.key).rename(aside)
            if self.layout.sidecar(shard.key).exists():
                self.layout.sidecar(shard.key).rename(aside.with_suffix(SIDECAR))
            self._links.remove(shard.key)
            for folder in (self.layout.quarantine, self.layout.bucket(shard.key)):
                disk.fsync_path(folder)  # a power loss must not undo the renames
        return Leftover.of(aside)

    # Changes to the folder by others

    def known(self) -> frozenset[str]:
        """Return the keys of all shards that are accounted for, including damaged ones and those being removed."""
        return frozenset(self.shards) | frozenset(self._condemned) | frozenset(self._removing)

    def forget(self, key: str) -> bool:
        """Stop accounting for a shard or leftover whose files are gone; return False if it is unknown."""
        kept: Shard | None = self.shards.pop(key, None) or self._condemned.pop(key, None)
        leftover = self.leftovers.pop(key, None) if kept is None else None
        self.space.kept_bytes -= kept.kept_bytes if kept else leftover.size_bytes if leftover else 0
        return bool(kept or leftover)

    def restore(self, shard: Shard) -> None:
        """Serve a shard whose files were found in the folder."""
        self.shards[shard.key] = shard
        self.space.kept_bytes += shard.kept_bytes


def _unlink_unless_open(paths: Sequence[Path]) -> bool:
    # Unlinking an open file would not free its bytes, and they would not be accounted for.
    with disk.disk_errors(paths[0]):
        with contextlib.suppress(FileNotFoundError):
            if disk.is_open_elsewhere(paths[0]):
                return False
        disk.unlink_quietly(*paths)
    return True
