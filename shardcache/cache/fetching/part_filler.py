"""Fetching of the parts of an object that readers of ranges wait for, and of no others."""

import asyncio
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from shardcache.cache.space.residency import NOW, Residency
from shardcache.cache.waiting.claims import KeyClaim
from shardcache.cache.waiting.signals import Signal
from shardcache.cache.waiting.stages import Stage
from shardcache.cache.waiting.transfer import Transfer
from shardcache.cache.waiting.waits import Wait
from shardcache.errors import ShardChangedError
from shardcache.fetch.download import Downloader
from shardcache.origin.base import Origin
from shardcache.origin.objects import RemoteObject
from shardcache.plan.object_parts import max_parts, max_parts_per_request, runs
from shardcache.store.part_file import FILE_BYTES, PartFile
from shardcache.store.space import Reservation, footprint_bytes
from shardcache.store.store import Store


class PartFiller:
    """Fills files of parts, for transfers of which only ranges are wanted.

    Args:
        part_bytes: size of the parts of a new file.
        max_share: the share of an object's parts from which the whole is fetched.
    """

    def __init__(
        self,
        store: Store,
        residency: Residency,
        downloader: Downloader,
        changed: Signal,
        part_bytes: int,
        max_share: float,
    ) -> None:
        self._store = store
        self._residency = residency
        self._downloader = downloader
        self._changed = changed
        self._part_bytes = part_bytes
        self._max_share = max_share

    async def fill(
        self,
        transfer: Transfer,
        claim: KeyClaim,
        origin: Origin,
        obj: RemoteObject,
        key: str,
        reservation: Reservation,
    ) -> None:
        """Fetch what readers wait for, until nothing is left of it, or the whole object is wanted.

        It is once so many of its parts are wanted that the others cost less than later requests,
        and there is space for these. Closes the reservation, unless the whole is wanted. Raises as
        `Downloader.fetch_parts` and `Residency.reserve` do.
        """
        is_whole = False
        try:
            file = await self._open(claim, reservation, obj, key)
            await self._fill(transfer, claim, origin, file)
            is_whole = claim.wants_whole
        finally:
            if not is_whole:
                reservation.close()
            self._changed.notify()

    async def _fill(
        self,
        transfer: Transfer,
        claim: KeyClaim,
        origin: Origin,
        file: PartFile,
    ) -> None:
        limit = self._max_parts(file)
        run = _FillRun(self._residency, self._downloader, transfer, claim, origin, file, limit)
        try:
            await run.fill()
        except ShardChangedError:
            self._residency.parts.hand_over(file)  # of another version now
            raise

    async def _open(
        self,
        claim: KeyClaim,
        reservation: Reservation,
        obj: RemoteObject,
        key: str,
    ) -> PartFile:
        """Return the file of an object's parts."""
        file = self._store.part_files.get(key)
        if file is not None:
            if file.is_left:
                file.confirm(obj)
            return file
        await self._residency.reserve(claim, FILE_BYTES, lambda: NOW)
        file = await self._residency.parts.open(obj, self._part_bytes)
        reservation.keep(FILE_BYTES)
        return file

    def _max_parts(self, file: PartFile) -> float:
        """Return the number of parts up to which an object is fetched by parts."""
        partial = file.partial
        may_fit = self._residency.may_fit(footprint_bytes(partial.obj.size_bytes))
        return max_parts(partial.count, self._max_share, may_fit=may_fit)


@dataclass(slots=True)
class _FillRun:
    """One transfer's fetching into a file of parts."""

    _residency: Residency
    _downloader: Downloader
    _transfer: Transfer
    _claim: KeyClaim
    _origin: Origin
    _file: PartFile
    _max_parts: float
    _fetching: set[int] = field(default_factory=set)
    _kept: dict[Wait, set[int]] = field(default_factory=dict)  # parts, by who waits for them

    async def fill(self) -> None:
        self._transfer.stages.enter(Stage.NETWORK)
        try:
            async with asyncio.TaskGroup() as group:
                await self._fill(group)
        except BaseExceptionGroup as failures:
            first = failures.exceptions[0]
            raise first from first.__cause__
        finally:
            for wait in list(self._kept):
                self._let_go(wait)

    async def _fill(self, group: asyncio.TaskGroup) -> None:
        while True:
            # 1. Whoever waits for this object finds what is there of it.
            for transfer in self._claim.transfers:
                transfer.part_file = self._file
                transfer.moved.notify()
            # Readers that have what they waited for end their waits.
            await asyncio.sleep(0)
            if self._claim.wants_whole:
                return

            # 2. What an earlier daemon has left is as good as new, if it is sound.
            await self._check_left()

            # 3. What is missing is requested at once, neighbours together.
            missing = self._missing(self._needed())
            if self._is_worth_the_whole(missing) and await self._reserve_whole():
                self._transfer.is_whole = True
                continue
            is_served = await self._serve_waits(group)

            # 4. What will probably be read next, if there is space for it without waiting.
            ahead = self._missing(self._ahead())
            if ahead and await self._can_reserve_ahead(ahead):
                self._begin(ahead, group)
            if not is_served:
                continue
            if self._fetching:
                await self._transfer.moved.wait()
            else:
                return

    async def _serve_waits(self, group: asyncio.TaskGroup) -> bool:
        """Request the parts of all waits, or of the most urgent; return True if there were none."""
        waiting = [wait for wait in self._claim.waits if not self._is_served(wait)]
        if not waiting:
            return True
        if not await self._serve(waiting, group):
            waiting.sort(key=_urgency)
            await self._serve_in_turn(waiting[0], group)
        return False

    def _is_served(self, wait: Wait) -> bool:
        """Return whether all parts of a wait are there, or being fetched."""
        if wait.bytes is None:
            return True
        return wait in self._kept and not self._missing(self._file.parts_of(wait.bytes))

    async def _serve(self, waits: Sequence[Wait], group: asyncio.TaskGroup) -> bool:
        """Request the parts of waits, if there is space for all of them without waiting.

        All of them are kept then until their wait ends: no wait has some of its parts, and waits
        for the space of the others.
        """
        for wait in waits:
            self._keep(wait)
        wanted = chain.from_iterable(self._parts_of(wait) for wait in waits)
        missing = self._missing(wanted)
        if missing and not await self._can_reserve(missing):
            for wait in waits:
                self._let_go(wait)
            return False
        self._begin(missing, group)
        return True

    async def _serve_in_turn(self, wait: Wait, group: asyncio.TaskGroup) -> None:
        """Request the parts of one wait as soon as there is space for them."""
        missing = self._missing(self._parts_of(wait))
        size_bytes = self._size_of(missing)
        with self._residency.parts.in_turn(self._claim), self._claim.waiting_for_space(size_bytes):
            while wait in self._claim.waits and not await self._serve([wait], group):
                self._residency.check_possible(size_bytes, self._transfer.ref.url)
                await self._residency.change(self._claim)

    # Parts that are kept until their readers have them

    def _keep(self, wait: Wait) -> None:
        """Keep the parts of a wait, those that are there and those that arrive, until it ends."""
        if wait not in self._kept:
            self._kept[wait] = set()
            wait.ended = lambda: self._let_go(wait)
        there = self._file.partial.done
        self._keep_parts(wait, [part for part in self._parts_of(wait) if part in there])

    def _keep_parts(self, wait: Wait, parts: Iterable[int]) -> None:
        kept = self._kept[wait]
        new = [part for part in parts if part not in kept]
        kept.update(new)
        self._residency.parts.retain(self._file, new)

    def _let_go(self, wait: Wait) -> None:
        kept = self._kept.pop(wait, None)
        wait.ended = None
        if kept:
            self._residency.parts.release(self._file, kept)

    def _parts_of(self, wait: Wait) -> range:
        return range(0) if wait.bytes is None else self._file.parts_of(wait.bytes)

    def _needed(self) -> Iterator[int]:
        """Yield the parts that readers wait for."""
        for wait in self._claim.waits:
            yield from self._parts_of(wait)

    def _ahead(self) -> Iterator[int]:
        """Yield the parts that they will probably read next."""
        for wait in self._claim.waits:
            if wait.ahead is not None:
                yield from self._file.parts_of(wait.ahead)

    def _missing(self, wanted: Iterable[int]) -> list[int]:
        """Return the parts that are not there, and that nobody fetches yet."""
        there = self._file.partial.done
        missing = (part for part in wanted if part not in there)
        return [part for part in dict.fromkeys(missing) if part not in self._fetching]

    def _begin(self, parts: list[int], group: asyncio.TaskGroup) -> None:
        """Request parts, for which there is space."""
        for run in runs(parts, self._max_parts_per_request()):
            self._fetching.update(run)
            group.create_task(self._fetch(run))

    def _max_parts_per_request(self) -> int:
        if self._origin.tier is not None:
            # A part has one owner, which keeps it by its range, whichever node asks for it with
            # whichever neighbours.
            return 1
        return max_parts_per_request(self._file.partial.part_bytes)

    async def _check_left(self) -> None:
        """Check the wanted parts that an earlier daemon has left."""
        left = self._file.partial.unchecked
        wanted = dict.fromkeys((*self._needed(), *self._ahead()))
        parts = [part for part in wanted if part in left]
        if not parts:
            return
        await self._residency.parts.check_left(self._file, parts)

    def _is_worth_the_whole(self, missing: list[int]) -> bool:
        parts = len(self._file.partial.done) + len(self._fetching) + len(missing)
        return parts > self._max_parts

    def _size_of(self, parts: Iterable[int]) -> int:
        return sum(map(self._file.partial.size_of, parts))

    async def _can_reserve(self, parts: Sequence[int]) -> bool:
        return await self._residency.reserve_at_once(self._claim, self._size_of(parts))

    async def _can_reserve_ahead(self, parts: Sequence[int]) -> bool:
        size_bytes = self._size_of(parts)
        return await self._residency.reserve_at_once(self._claim, size_bytes, is_speculative=True)

    async def _reserve_whole(self) -> bool:
        """Reserve the space of all other parts, if that takes no waiting.

        It is not worth waiting for: others, each of whom has some parts, might wait as well.
        """
        file = self._file
        size_bytes = footprint_bytes(file.partial.obj.size_bytes)
        size_bytes -= file.kept_bytes + self._claim.reserved_bytes
        kept = file.kept  # and so not evicted for the others
        self._residency.parts.retain(file, kept)
        try:
            return await self._residency.reserve_at_once(self._claim, max(0, size_bytes))
        finally:
            self._residency.parts.release(file, kept)

    async def _fetch(self, parts: range) -> None:
        partial = self._file.partial
        finished = self._downloader.fetch_parts(
            self._origin,
            partial,
            parts,
            priority=lambda: self._claim.priority(lambda: NOW),
            coming=self._transfer.coming,
        )
        async for part in finished:
            self._fetching.discard(part)
            assert self._claim.reservation is not None
            self._claim.reservation.keep(partial.size_of(part))
            self._residency.parts.arrived(self._file, part)
            for wait in self._kept:
                if part in self._parts_of(wait):
                    self._keep_parts(wait, [part])
            self._transfer.set_done(len(partial.done) * partial.part_bytes)


def _urgency(wait: Wait) -> tuple[float, int]:
    """Sort key of waits: those of readers that have nothing to read, the longest first."""
    since_s = math.inf if wait.since_s is None else wait.since_s
    start = 0 if wait.bytes is None else wait.bytes[0]
    return since_s, start
