"""Cached parts of objects that are read by ranges: the reasons that keep them, and eviction."""

import asyncio
import contextlib
import time
from collections.abc import Collection, Iterable, Iterator, Sequence

from shardcache.cache.planner import Planner
from shardcache.cache.waiting.claims import KeyClaim
from shardcache.cache.waiting.signals import Signal
from shardcache.origin.objects import RemoteObject
from shardcache.store.part_file import PartFile
from shardcache.store.space import Reservation
from shardcache.store.store import Store
from shardcache.telemetry.metrics import Counters


class PartResidency:
    """Parts of objects, each of which stays while a reader has it in use.

    Nothing else writes `PartFile.leases`, or tells the plan which parts are cached and evictable.
    Once a transfer of the whole has taken a file over (`is_own` is False), the plan knows nothing
    of its parts.

    Args:
        claims: keys of the objects that are being fetched.
        allocating: lock held while space is reserved, and so while anything is evicted.
    """

    def __init__(
        self,
        store: Store,
        planner: Planner,
        counters: Counters,
        changed: Signal,
        claims: Collection[str],
        allocating: asyncio.Lock,
    ) -> None:
        self._store = store
        self._planner = planner
        self._counters = counters
        self._changed = changed
        self._claims = claims
        self._allocating = allocating
        self._checking = asyncio.Lock()
        # Claims that wait for the space of a range, the longest wait first. The others let the
        # first have its space, or small ranges would forever take the space that a large one needs.
        self._turns: dict[KeyClaim, None] = {}

    async def open(
        self,
        obj: RemoteObject,
        part_bytes: int,
        reservation: Reservation,
    ) -> PartFile:
        """Return a file for parts of an object, with those that an earlier transfer has left.

        Raises DiskError.
        """
        async with self._allocating:  # so that those parts are not removed meanwhile
            file = await self._store.parts.open(obj, part_bytes, reservation)
        self.restored(file)
        return file

    def get(self, key: str) -> PartFile | None:
        """Return the file of an object's parts, if there is one."""
        return self._store.parts.get(key)

    @property
    def leased_bytes(self) -> int:
        """Size of the parts that readers have in use."""
        files = self._store.parts.files()
        return sum(file.partial.size_of(part) for file in files for part in file.leases)

    def restored(self, file: PartFile) -> None:
        """Add the parts that a file had when it was opened."""
        for part in file.kept_parts:
            self.arrived(file, part)

    def arrived(self, file: PartFile, part: int) -> None:
        """Add a part that was fetched by itself."""
        self._planner.now.arrived(file.key_of(part), file.partial.size_of(part))

    def lost(self, file: PartFile, part: int) -> None:
        """Remove a part that turned out to be damaged."""
        self._store.space.kept_bytes -= file.partial.size_of(part)
        self._planner.now.gone(file.key_of(part))

    def retain(self, file: PartFile, parts: Iterable[int]) -> None:
        """Keep parts until `release`. They count as used."""
        file.used_at_s = time.time()
        schedule = self._planner.now
        for part in parts:
            file.leases[part] += 1
            if file.is_own:
                key = file.key_of(part)
                schedule.found(key)
                schedule.held(key)
        if file.leases and not file.is_own:
            self._store.parts.granted.add(file)

    @contextlib.contextmanager
    def sparing(self, file: PartFile) -> Iterator[None]:
        """Evict no parts of a file during the block, in which space for the whole is reserved.

        Nobody is notified at its end: it is entered again and again while the whole waits.
        """
        parts = file.kept_parts
        file.leases.update(parts)
        for part in parts:
            self._planner.now.held(file.key_of(part))
        try:
            yield
        finally:
            self._end_leases(file, parts)

    @contextlib.contextmanager
    def in_turn(self, claim: KeyClaim) -> Iterator[None]:
        """Have a claim wait for space in its turn, during the block."""
        self._turns[claim] = None
        try:
            yield
        finally:
            del self._turns[claim]
            self._changed.notify()

    def is_turn_of(self, claim: KeyClaim) -> bool:
        """Return whether a claim may take space: no claim waits in turn, or this one is first."""
        return not self._turns or next(iter(self._turns)) is claim

    def used(self, file: PartFile, parts: Iterable[int]) -> None:
        """Count parts as used now, without retaining them: the caller reads them immediately."""
        file.used_at_s = time.time()
        schedule = self._planner.now
        for part in parts:
            schedule.found(file.key_of(part))

    def release(self, file: PartFile, parts: Iterable[int]) -> None:
        """End one `retain`."""
        self._end_leases(file, parts)
        self._changed.notify()

    def _end_leases(self, file: PartFile, parts: Iterable[int]) -> None:
        for part in parts:
            file.leases[part] -= 1
            if not file.leases[part]:
                del file.leases[part]
                if file.is_own:
                    self._planner.now.freed(file.key_of(part))
        if not (file.is_own or file.leases):
            self._store.parts.granted.remove(file)

    async def verify(self, file: PartFile) -> list[int]:
        """Compare the parts with the journal; drop and return damaged ones. Raises DiskError.

        They are fetched again when they are read next.
        """
        return [part for part in file.kept_parts if await self.verify_part(file, part)]

    async def verify_part(self, file: PartFile, part: int) -> bool:
        """Compare one part with the journal, as `verify` does; return whether it was damaged."""
        if part in file.partial.unchecked:
            damaged = await self.check_restored(file, [part])
            self._counters.corrupt += len(damaged)
            return bool(damaged)
        return await self._verify_checked(file, part)

    async def _verify_checked(self, file: PartFile, part: int) -> bool:
        """Compare a part with the journal again, after its first check."""
        done = file.partial.done
        if part not in done:
            return False  # evicted since
        seems_damaged = await self._differs_from_journal(file, part)
        if not seems_damaged or part not in done or not file.is_own:
            return False

        # It may have been evicted while it was read, which leaves a hole in the file. So it is read
        # again, and kept meanwhile.
        self.retain(file, [part])
        try:
            is_damaged = await self._differs_from_journal(file, part)
        finally:
            self.release(file, [part])
        if not is_damaged or not file.is_own:
            return False
        self.lost(file, part)
        file.forget(part)
        self._counters.corrupt += 1
        return True

    @staticmethod
    async def _differs_from_journal(file: PartFile, part: int) -> bool:
        crc = file.partial.done[part]
        return bool(await asyncio.to_thread(file.partial.damaged, {part: crc}))

    async def evict_all(self, file: PartFile) -> int:
        """Remove the parts of an object, unless some are in use; return the bytes freed."""
        async with self._allocating:
            is_there = self._store.parts.get(file.partial.key) is file
            if not is_there or file.leases or file.partial.key in self._claims:
                return 0
            for part in file.kept_parts:
                self._planner.now.gone(file.key_of(part))
            return await self._store.parts.remove(file)

    async def check_restored(self, file: PartFile, parts: Sequence[int]) -> list[int]:
        """Compare parts that an earlier daemon has left with its journal; return damaged ones.

        Those are dropped. Raises DiskError.
        """
        async with self._checking:  # once, for all readers that wait for the same parts
            unchecked = [part for part in parts if part in file.partial.unchecked]
            if not unchecked or not file.is_own:
                return []
            self.retain(file, unchecked)  # neither evicted nor granted meanwhile
            try:
                sound = await asyncio.to_thread(file.partial.check, unchecked)
            finally:
                self.release(file, unchecked)
            damaged = [part for part in unchecked if part not in sound]
            if file.is_own:
                for part in damaged:
                    self.lost(file, part)
            return damaged

    def give_up_if_removed(self, file: PartFile) -> None:
        """Give up a file that another program has removed; its parts are fetched again. Blocks."""
        if file.is_own and not file.partial.is_there():
            self.hand_over(file)

    def hand_over(self, file: PartFile) -> None:
        """Leave a file of parts to a transfer of the whole, or to whoever needs its space."""
        for part in file.kept_parts:
            self._planner.now.gone(file.key_of(part))
        if file.leases:
            self._store.parts.granted.add(file)
        self._store.parts.close(file)
        self._changed.notify()

    async def evict(self, key: str, part: int) -> bool:
        """Give up a part for its space; return False if it is in use. Called while allocating.

        A reader that asks for the part during this has to reserve space for it, so it waits until
        its bytes are gone.
        """
        file = self._store.parts.get(key)
        if file is None or file.leases[part]:
            return False
        self._planner.now.gone(file.key_of(part))
        await self._store.parts.drop(file, part)
        self._counters.evictions += 1
        if not file.kept_parts and key not in self._claims and file.is_own:
            self._store.parts.close(file)  # its empty file is removed as a leftover
        return True
