"""The published shards: adding, finding, checking and removing them."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from shardcache import tarindex
from shardcache.config import Amount
from shardcache.errors import CacheDirError, CorruptShardError, ShardError
from shardcache.store import partial as partials
from shardcache.store.catalogue import Catalogue
from shardcache.store.checksums import first_damaged_piece
from shardcache.store.files import disk_errors, free_bytes, fsync_path, total_bytes, unlink_quietly
from shardcache.store.layout import SIDECAR, TAR, Layout
from shardcache.store.openfiles import is_open_elsewhere
from shardcache.store.recovery import Leftover, find_leftovers, find_shards, quarantined
from shardcache.store.shard import Facts, Shard
from shardcache.store.space import Reservation, Space

_FOLDER_MODE = 0o2750  # set-group-id: files inherit the group that may read the cache
_SHARD_MODE = 0o440  # what is published is never written again


class Store:
    """One cache folder, held exclusively. Least recently used shards come first in `shards`."""

    def __init__(self, layout: Layout, space: Space, catalogue: Catalogue, lock_fd: int) -> None:
        self.layout = layout
        self.space = space
        self.catalogue = catalogue
        self.shards: OrderedDict[str, Shard] = OrderedDict()
        self.leftovers: dict[str, Leftover] = {}
        self._lock_fd = lock_fd

    def __repr__(self) -> str:
        used, capacity = self.space.used_bytes, self.space.capacity_bytes
        return f"Store({str(self.layout.root)!r}, shards={len(self.shards)}, used={used}/{capacity})"

    @classmethod
    def open(cls, root: Path, capacity: Amount, min_free: Amount, group: str | None = None) -> Self:
        """Take the folder and find what a former run left in it. Blocks.

        Raises CacheDirError when the folder cannot be written or another daemon holds it.
        """
        layout = Layout(root.absolute())
        with disk_errors(root):
            _make_folders(layout, group)
            lock_fd = _lock(layout.root)
            total = total_bytes(layout.root)
            space = Space(capacity.of(total), min_free.of(total))
            store = cls(layout, space, Catalogue.open(layout.catalogue), lock_fd)
            store._recover()
        return store

    def _recover(self) -> None:
        for shard in find_shards(self.layout):
            self.shards[shard.key] = shard
            self.space.kept_bytes += shard.kept_bytes
        for leftover in find_leftovers(self.layout):
            self.leave(leftover)

    def close(self) -> None:
        """Let go of the folder."""
        self.catalogue.close()
        os.close(self._lock_fd)

    def shortfall_bytes(self, wanted_bytes: int) -> int:
        """Return how many bytes must be removed before `wanted_bytes` may be promised."""
        return self.space.shortfall_bytes(wanted_bytes, free_bytes(self.layout.root))

    # Arriving shards

    def adopt(self, key: str, reservation: Reservation) -> None:
        """Move an idle partial's bytes, if there is one, into the reservation of the download that goes on with it."""
        leftover = self.leftovers.pop(key, None)
        if leftover is not None:
            reservation.adopt(leftover.size_bytes)

    def leave(self, leftover: Leftover) -> None:
        """Keep files that are no shard until their space is needed."""
        replaced = self.leftovers.pop(leftover.key, None)
        if replaced is not None:
            self.space.kept_bytes -= replaced.size_bytes
        self.leftovers[leftover.key] = leftover
        self.space.kept_bytes += leftover.size_bytes

    async def publish(self, key: str, tar_path: Path, sidecar_path: Path, facts: Facts) -> Shard:
        """Make a verified, indexed shard visible: bytes to disk first, names after, the tar's name last."""
        sidecar_bytes = await asyncio.to_thread(self._publish, key, tar_path, sidecar_path)
        shard = Shard(key, facts.size_bytes, sidecar_bytes, time.time(), facts=facts)
        self.shards[key] = shard
        return shard

    def _publish(self, key: str, tar_path: Path, sidecar_path: Path) -> int:
        with disk_errors(tar_path):
            fsync_path(tar_path)
            sidecar_bytes = sidecar_path.stat().st_size
            for path in (sidecar_path, tar_path):
                path.chmod(_SHARD_MODE)
            sidecar_path.rename(self.layout.sidecar(key))
            tar_path.rename(self.layout.tar(key))
            fsync_path(self.layout.bucket(key))
            partials.discard(self.layout, key)
        return sidecar_bytes

    # Published shards

    def touch(self, shard: Shard) -> None:
        """Note a use, now."""
        shard.used_at_s = time.time()
        if shard.key in self.shards:
            self.shards.move_to_end(shard.key)

    async def remember_use(self, shard: Shard) -> None:
        """Keep the time of last use over a restart, as the sidecar's modification time."""
        sidecar, used_at_s = self.layout.sidecar(shard.key), shard.used_at_s
        with contextlib.suppress(
            OSError
        ):  # evicted meanwhile, or a disk that fails: a time stamp is not worth an error
            await asyncio.to_thread(os.utime, sidecar, (used_at_s, used_at_s))

    async def facts(self, shard: Shard) -> Facts:
        """Return the sidecar's header; the first time, hold it against the file.

        Raises CorruptShardError when the two disagree.
        """
        if shard.facts is None:
            shard.facts = await asyncio.to_thread(self._read_facts, shard)
        return shard.facts

    def _read_facts(self, shard: Shard) -> Facts:
        path = self.layout.sidecar(shard.key)
        try:
            facts = Facts.from_json(tarindex.read_header(path))
        except (ShardError, OSError, KeyError, TypeError, ValueError) as exn:
            raise CorruptShardError(f"the sidecar {path} cannot be read ({exn})") from exn
        if facts.size_bytes != shard.size_bytes:
            raise CorruptShardError(
                f"{self.layout.tar(shard.key)} has {shard.size_bytes} bytes instead of {facts.size_bytes}",
                url=facts.url,
            )
        return facts

    async def check(self, shard: Shard) -> None:
        """Read the whole shard and its sidecar again. Raises CorruptShardError naming the first damaged piece."""
        facts = await self.facts(shard)
        await asyncio.to_thread(self._check, shard.key, facts)

    def _check(self, key: str, facts: Facts) -> None:
        tar = self.layout.tar(key)
        try:
            tarindex.TarIndex.open(self.layout.sidecar(key))
            damaged = first_damaged_piece(tar, facts.part_bytes, facts.part_crcs)
        except OSError as exn:
            raise CorruptShardError(f"the cached file {tar} cannot be read ({exn.strerror})", url=facts.url) from exn
        if damaged is not None:
            raise CorruptShardError(
                f"the cached file {tar} is damaged near byte {damaged * facts.part_bytes}", url=facts.url
            )

    async def remove(self, shard: Shard) -> bool:
        """Unlink a shard that no lease holds; False when some process still has it open."""
        del self.shards[shard.key]
        paths = (self.layout.tar(shard.key), self.layout.sidecar(shard.key))
        removed = False
        try:
            removed = await asyncio.to_thread(_unlink_unless_open, paths)
        finally:
            if removed:
                self.space.kept_bytes -= shard.kept_bytes
            else:
                self.shards[shard.key] = shard  # back in, as most recently used: it is, or the disk fails
        return removed

    async def remove_leftover(self, key: str) -> bool:
        """Remove an idle partial or a quarantined shard; False when some process still has it open."""
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
        """Take a damaged shard out of service; the file stays for a look until its space is needed."""
        if self.shards.get(shard.key) is not shard:
            return
        del self.shards[shard.key]
        leftover = await asyncio.to_thread(self._quarantine, shard)  # where it fails, the bytes stay counted
        self.space.kept_bytes -= shard.kept_bytes
        self.leave(leftover)

    def _quarantine(self, shard: Shard) -> Leftover:
        aside = self.layout.quarantine / (shard.key + TAR)
        with disk_errors(aside):
            if self.layout.tar(shard.key).exists():
                self.layout.tar(shard.key).rename(aside)
            if self.layout.sidecar(shard.key).exists():
                self.layout.sidecar(shard.key).rename(aside.with_suffix(SIDECAR))
        return quarantined(aside)

    def idle(self) -> Iterator[Shard]:
        """Yield the shards that no lease holds, least recently used first."""
        return (shard for shard in self.shards.values() if not shard.leases)


def _unlink_unless_open(paths: Sequence[Path]) -> bool:
    # Bytes that were unlinked while open would still be on the disk, and counted nowhere.
    with disk_errors(paths[0]):
        with contextlib.suppress(FileNotFoundError):
            if is_open_elsewhere(paths[0]):
                return False
        unlink_quietly(*paths)
    return True


def _make_folders(layout: Layout, group: str | None) -> None:
    for folder in layout.folders():
        folder.mkdir(parents=True, exist_ok=True, mode=0o750)
        if group is not None:
            shutil.chown(folder, group=group)
            folder.chmod(_FOLDER_MODE)


def _lock(root: Path) -> int:
    # The folder itself is locked: no lock file can be left behind, and the lock dies with the process.
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise CacheDirError(
            f"another daemon holds the cache folder {root}",
            remedy="stop the other daemon, or give this one its own --cache-dir",
        ) from None
    return fd
