"""Cached parts of objects that are read by ranges: the reasons that keep them, and eviction.

A part is a piece of fixed size of an object; a file of parts (`PartFile`) has the cached parts of
one object, and a journal with the checksum of each. Parts that an earlier daemon has left are
unchecked until their bytes have been compared with the journal.

Each part has its own leases, and its own key in the schedule, and is evicted by itself. To retain a
part means to add a lease to it. A transfer of the whole object takes the file over: the file is
closed, and its parts then belong to that transfer.

`Residency` does the same for whole shards, and evicts both.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from shardcache.cache.planner import Planner
from shardcache.cache.waiting.claims import KeyClaim
from shardcache.cache.waiting.signals import Signal
from shardcache.origin.objects import RemoteObject
from shardcache.shared.exceptions import DiskError
from shardcache.store.part_file import PartFile
from shardcache.store.space import Reservation
from shardcache.store.store import Store
from shardcache.telemetry.metrics import Counters


class PartResidency:
    """Parts of objects, each of which stays while a reader has it in use.

    Only this class writes `PartFile.leases`, and tells the schedule which parts are cached and
    which of them may be evicted. The schedule knows nothing about the parts of a file that is
    closed; its `is_kept_by_part` is False.

    Args:
        store: the cache folder.
        planner: has the schedule.
        counters: the daemon's counters.
        changed: notified when more parts may be evictable.
        claims: the claims of the objects that are being fetched, by key; always up to date.
        allocating: lock that is held while space is reserved, and so while anything is evicted.
    """

    def __init__(
        self,
        store: Store,
        planner: Planner,
        counters: Counters,
        changed: Signal,
        claims: Mapping[str, KeyClaim],
        allocating: asyncio.Lock,
    ) -> None:
        self._store = store
        self._granted_files = store.parts.granted
        self._planner = planner
        self._counters = counters
        self._changed = changed
        self._claims = claims
        self._allocating = allocating
        self._checking = asyncio.Lock()  # held while restored parts are compared with the journal
        # Claims that wait for the space of a range, the longest wait first. No other claim takes
        # space for a range before the first one has its own: otherwise, small ranges would forever
        # take the space that a large range needs.
        self._line: dict[KeyClaim, None] = {}

    async def open(
        self,
        obj: RemoteObject,
        part_bytes: int,
        reservation: Reservation,
    ) -> PartFile:
        """Return a file for parts of an object, with the parts that an earlier transfer has left.

        Raises DiskError.
        """
        # The lock keeps the parts of the earlier transfer from being removed in the meantime.
        async with self._allocating:
            file = await self._store.parts.open(obj, part_bytes, reservation)
        self.opened(file)
        return file

    def get(self, key: str) -> PartFile | None:
        """Return the file of an object's parts, if there is one."""
        return self._store.parts.get(key)

    @property
    def leased_bytes(self) -> int:
        """Size of the parts that readers have in use."""
        files = self._store.parts.files()
        return sum(file.partial.size_of(part) for file in files for part in file.leases)

    def opened(self, file: PartFile) -> None:
        """Add the parts that a file has when it is opened."""
        for part in file.kept_parts:
            self.arrived(file, part)

    def arrived(self, file: PartFile, part: int) -> None:
        """Add a part that was fetched by itself. No-op if the file was closed in the meantime."""
        if not file.is_kept_by_part:
            return
        key = file.key_of(part)
        self._planner.schedule.arrived(key, file.partial.size_of(part))
        if file.leases[part]:  # the part was lost while readers had it in use
            self._planner.schedule.held(key)

    async def _lose(self, file: PartFile, part: int) -> None:
        """Remove a part that turned out to be damaged, and free its space. Raises DiskError.

        The caller holds the lock for allocating space, as for `evict`. The bytes of a part that
        readers have in use stay until the part is fetched again, in the same place.
        """
        self._planner.schedule.gone(file.key_of(part))
        if file.leases[part]:
            file.forget(part)
            self._store.space.kept_bytes -= file.partial.size_of(part)
            self._have_waits_checked(file)
        else:
            await self._store.parts.drop(file, part)

    def _have_waits_checked(self, file: PartFile) -> None:
        """Have all who wait for ranges of an object, or fetch these, look again at its parts."""
        claim = self._claims.get(file.partial.key)
        if claim is not None:
            claim.moved.notify()

    def retain(self, file: PartFile, parts: Iterable[int]) -> None:
        """Keep parts from eviction until `release`, and count them as used now."""
        file.used_at_s = time.time()
        schedule = self._planner.schedule
        for part in parts:
            file.leases[part] += 1
            if file.is_kept_by_part:
                key = file.key_of(part)
                schedule.used(key)
                schedule.held(key)
        if file.leases and not file.is_kept_by_part:
            # The reader may open the file only later, by its path and inode number: no other file
            # may have both before then.
            self._granted_files.add(file)

    @contextlib.contextmanager
    def sparing(self, file: PartFile) -> Iterator[None]:
        """Keep all parts of a file during the block, in which space for the whole is reserved.

        The end of the block notifies nobody: the block is entered again and again while the whole
        object waits for space, and each notification would cause the next attempt.
        """
        parts = file.kept_parts
        file.leases.update(parts)  # one lease more on each
        for part in parts:
            self._planner.schedule.held(file.key_of(part))
        try:
            yield
        finally:
            self._end_leases(file, parts)

    @contextlib.contextmanager
    def in_line(self, claim: KeyClaim) -> Iterator[None]:
        """Keep a claim in line during the block, in which it waits for the space of a range."""
        self._line[claim] = None
        try:
            yield
        finally:
            del self._line[claim]
            self._changed.notify()

    def may_take_space(self, claim: KeyClaim) -> bool:
        """Return whether a claim may take space: it is the first in line, or none is in line."""
        return not self._line or next(iter(self._line)) is claim

    def used(self, file: PartFile, parts: Iterable[int]) -> None:
        """Count parts as used now, without retaining them: the caller reads them immediately."""
        file.used_at_s = time.time()
        schedule = self._planner.schedule
        for part in parts:
            schedule.used(file.key_of(part))

    def release(self, file: PartFile, parts: Iterable[int]) -> None:
        """End one `retain`."""
        self._end_leases(file, parts)
        self._close_if_empty(file)
        self._changed.notify()

    def _end_leases(self, file: PartFile, parts: Iterable[int]) -> None:
        """Remove a lease from each part; parts without any may be evicted."""
        for part in parts:
            file.leases[part] -= 1
            if not file.leases[part]:
                del file.leases[part]
                if file.is_kept_by_part:
                    self._planner.schedule.freed(file.key_of(part))
        if not (file.is_kept_by_part or file.leases):
            self._granted_files.remove(file)

    async def verify(self, file: PartFile) -> list[int]:
        """Compare all parts with their checksums in the journal; drop and return the damaged ones.

        Damaged parts are fetched again when a reader needs them. Raises DiskError.
        """
        return [part for part in file.kept_parts if await self.verify_part(file, part)]

    async def verify_part(self, file: PartFile, part: int) -> bool:
        """Compare one part with its checksum, as `verify` does; return whether it was damaged."""
        # The part may be from an earlier daemon, and not have been checked since.
        if part in file.partial.unchecked:
            damaged = await self.check_restored(file, [part])
            self._counters.corrupt += len(damaged)
            return bool(damaged)
        return await self._verify_checked(file, part)

    async def _verify_checked(self, file: PartFile, part: int) -> bool:
        """Compare a part that was checked before; return whether it was damaged."""
        done = file.partial.done
        if part not in done:
            return False  # the part was evicted in the meantime
        seems_damaged = await self._differs_from_journal(file, part)
        if not seems_damaged:
            return False
        if part not in done or not file.is_kept_by_part:
            return False  # it was evicted, or the file was closed, during the check

        # The part was not retained, so it may have been evicted and fetched again during the
        # check, which saw a hole in the file. So it is retained, and compared once more.
        self.retain(file, [part])
        try:
            is_damaged = await self._differs_from_journal(file, part)
        finally:
            self.release(file, [part])
        if not is_damaged:
            return False
        async with self._allocating:
            # The part may have been evicted, or the file closed, during the wait for the lock.
            if part not in done or not file.is_kept_by_part:
                return False
            await self._lose(file, part)
        self._counters.corrupt += 1
        return True

    @staticmethod
    async def _differs_from_journal(file: PartFile, part: int) -> bool:
        """Return whether a part's bytes differ from its checksum in the journal."""
        crc = file.partial.done[part]
        return bool(await asyncio.to_thread(file.partial.damaged_parts, {part: crc}))

    async def evict_all(self, file: PartFile) -> int:
        """Remove all parts of an object; return the number of bytes freed.

        No-op, which returns 0, if some parts are in use, or the object is being fetched.
        """
        async with self._allocating:
            key = file.partial.key
            is_open = self._store.parts.get(key) is file
            if not is_open or file.leases or key in self._claims:
                return 0
            for part in file.kept_parts:
                self._planner.schedule.gone(file.key_of(part))
            return await self._store.parts.remove(file)

    async def check_restored(self, file: PartFile, parts: Sequence[int]) -> list[int]:
        """Compare parts that an earlier daemon has left with the checksums in its journal.

        Damaged parts are dropped, and their numbers are returned. Raises DiskError.
        """
        # Several readers may wait for the same parts. Those that waited for the lock find the parts
        # checked.
        async with self._checking:
            unchecked = [part for part in parts if part in file.partial.unchecked]
            if not unchecked or not file.is_kept_by_part:
                return []
            self.retain(file, unchecked)  # the parts must not be evicted during the check
            try:
                sound = await asyncio.to_thread(file.partial.sound_parts, unchecked)
            finally:
                self.release(file, unchecked)
            file.partial.settle(list(sound), sound)
            self._have_waits_checked(file)
            damaged = [part for part in unchecked if part not in sound]
            if damaged:
                await self._lose_restored(file, damaged)
            return damaged

    async def _lose_restored(self, file: PartFile, damaged: Sequence[int]) -> None:
        """Remove parts that an earlier daemon has left, and that turned out to be damaged."""
        async with self._allocating:
            # The parts stay unchecked until here: if the file was closed during the check, they
            # were among its kept parts, and so were removed from the schedule. Some may have been
            # evicted during the wait for the lock.
            #
            # They are lost one by one. If this is cancelled or the disk fails, the others are still
            # unchecked, and are compared again by whoever wants them. Whoever fetches a lost part
            # again needs the lock to reserve its space, and so waits until its bytes are gone.
            for part in damaged:
                if file.is_kept_by_part and part in file.partial.unchecked:
                    await self._lose(file, part)

    def give_up_if_removed(self, file: PartFile) -> None:
        """Give up a file if another program has removed it; its parts are fetched again. Blocks."""
        if file.is_kept_by_part and not file.partial.has_file():
            self.hand_over(file)

    def hand_over(self, file: PartFile) -> None:
        """Close a file of parts, which becomes a leftover on disk.

        A transfer of the whole object continues with it, or it is removed once space is needed.
        Readers that hold parts of it can still read them.
        """
        for part in file.kept_parts:
            self._planner.schedule.gone(file.key_of(part))
        if file.leases:
            self._granted_files.add(file)
        self._store.parts.close(file)
        self._changed.notify()

    async def evict(self, key: str, part: int) -> bool:
        """Remove a part to free its space; return False if it is in use.

        The caller holds the lock for allocating space. A reader that asks for the part during the
        removal has to reserve space first, for which it needs that lock: so it waits until the
        bytes are gone.

        Args:
            key: key of the object.
            part: number of the part.
        """
        file = self._store.parts.get(key)
        if file is None or file.leases[part]:
            return False
        self._planner.schedule.gone(file.key_of(part))
        try:
            await self._store.parts.drop(file, part)
        finally:
            self._close_if_empty(file)
        self._counters.evictions += 1
        return True

    def _close_if_empty(self, file: PartFile) -> None:
        """Close a file without parts, which becomes a leftover, and is removed as such.

        Otherwise, its journal would take space that nothing can free: only parts are evicted.
        """
        partial = file.partial
        is_empty = not (partial.done or partial.unchecked)
        # A transfer of the object still uses the file.
        is_in_use = partial.key in self._claims
        if is_empty and not is_in_use and not file.leases and file.is_kept_by_part:
            with contextlib.suppress(DiskError):  # the file is gone, or the next write will fail
                self._store.parts.close(file)
