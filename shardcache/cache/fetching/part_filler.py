"""Fetching of the parts of an object that readers of ranges wait for, and of no others."""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from shardcache.cache.space.residency import NOW, Residency
from shardcache.cache.waiting.claims import KeyClaim
from shardcache.cache.waiting.signals import Signal
from shardcache.cache.waiting.stages import Stage
from shardcache.cache.waiting.transfer import Transfer
from shardcache.errors import ShardChangedError
from shardcache.fetch.download import Downloader
from shardcache.origin.base import Origin
from shardcache.origin.objects import RemoteObject
from shardcache.store.part_file import FILE_BYTES, PartFile
from shardcache.store.space import Reservation, footprint_bytes
from shardcache.store.store import Store

# Neighbouring parts are one request up to this size: beyond it, another connection is faster.
_MAX_REQUEST_BYTES = 4 * 1024 * 1024


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
    ) -> None:
        """Fetch what readers wait for, until nothing is left of it, or the whole object is wanted.

        It is once so many of its parts are wanted that the others cost less than later requests.
        Raises as `Downloader.fetch_parts` and `Residency.reserve` do.
        """
        reservation = Reservation(self._store.space)
        claim.reservation = reservation
        try:
            file = await self._open(claim, reservation, obj, key)
            await self._fill(transfer, claim, origin, file)
        finally:
            reservation.close()
            self._changed.notify()

    async def _fill(
        self,
        transfer: Transfer,
        claim: KeyClaim,
        origin: Origin,
        file: PartFile,
    ) -> None:
        max_parts = self._max_parts(file)
        run = _FillRun(self._residency, self._downloader, transfer, claim, origin, file, max_parts)
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
        count = file.partial.count
        if not self._residency.may_fit(footprint_bytes(file.partial.obj.size_bytes)):
            return count
        return count * self._max_share


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

    async def fill(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                await self._fill(group)
        except BaseExceptionGroup as failures:
            first = failures.exceptions[0]
            raise first from first.__cause__

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
            if self._is_worth_the_whole(missing):
                self._transfer.is_whole = True
                continue
            if missing:
                await self._reserve(missing)
                self._begin(missing, group)

            # 4. What will probably be read next, if there is space for it without waiting.
            ahead = self._missing(self._ahead())
            if ahead and await self._can_reserve(ahead):
                self._begin(ahead, group)
            if missing:
                continue
            if self._fetching:
                await self._transfer.moved.wait()
            else:
                return

    def _needed(self) -> Iterator[int]:
        """Yield the parts that readers wait for."""
        for wait in self._claim.waits:
            if wait.bytes is not None:
                yield from self._file.parts_of(wait.bytes)

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
        for run in _runs(parts, self._max_parts_per_request()):
            self._fetching.update(run)
            group.create_task(self._fetch(run))

    def _max_parts_per_request(self) -> int:
        if self._origin.tier is not None:
            # A part has one owner, which keeps it by its range, whichever node asks for it with
            # whichever neighbours.
            return 1
        return max(1, _MAX_REQUEST_BYTES // self._file.partial.part_bytes)

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

    async def _can_reserve(self, parts: list[int]) -> bool:
        size_bytes = sum(map(self._file.partial.size_of, parts))
        return await self._residency.reserve_at_once(self._claim, size_bytes)

    async def _reserve(self, parts: list[int]) -> None:
        size_bytes = sum(map(self._file.partial.size_of, parts))
        self._transfer.stages.enter(Stage.SPACE)
        await self._residency.reserve(self._claim, size_bytes, lambda: NOW)
        self._transfer.stages.enter(Stage.NETWORK)

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
            self._transfer.set_done(len(partial.done) * partial.part_bytes)


def _runs(parts: list[int], max_parts: int) -> Iterator[range]:
    """Yield parts that follow each other, at most `max_parts` at a time."""
    run = range(0)
    for part in parts:
        if part == run.stop and 0 < len(run) < max_parts:
            run = range(run.start, part + 1)
            continue
        if run:
            yield run
        run = range(part, part + 1)
    if run:
        yield run
