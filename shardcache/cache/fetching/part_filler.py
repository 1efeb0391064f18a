"""Fetching of the parts of an object that readers of ranges need, until the whole is fetched.

A range is a span of an object's bytes. A part is a piece of fixed size, in which objects are
fetched, kept and evicted; parts are numbered from 0. A file of parts (`PartFile`) is a sparse file
with the parts of one object that are cached. `Fetcher` calls `PartFiller.fill` before it downloads
a whole object: as long as there is no space for the whole, or nobody wants it, readers get the
ranges that they wait for.

The waits of all the object's readers are found through the claim (`KeyClaim`) on the object. When
a wait, a part or an error is added, the claim's signal `moved` is notified: the claim moves.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from shardcache.cache.fetching.reserving import WholeSpace
from shardcache.cache.space.residency import Residency, needed_now
from shardcache.cache.waiting.claims import KeyClaim
from shardcache.cache.waiting.stages import Stage
from shardcache.cache.waiting.transfer import Transfer
from shardcache.cache.waiting.waits import PostponedError, Wait
from shardcache.fetch.download import Downloader
from shardcache.fetch.limits.slot_claims import AskPriority
from shardcache.origin.base import Origin
from shardcache.origin.objects import RemoteObject
from shardcache.plan.object_parts import is_worth_the_whole, max_parts_per_request, runs
from shardcache.plan.reader_plan import AFTER_ALL_PLANS, NOW
from shardcache.shared.exceptions import CacheError, ShardChangedError
from shardcache.store.part_file import JOURNAL_BYTES, PartFile
from shardcache.store.store import Store


class PartFiller:
    """Fills files of parts with the ranges of objects that readers wait for.

    Args:
        part_bytes: size of the parts of a new file.
        max_share_of: returns, for an object's url, the share of its parts, from 0 to 1, above which
            the whole object is fetched.
    """

    def __init__(
        self,
        store: Store,
        residency: Residency,
        downloader: Downloader,
        part_bytes: int,
        max_share_of: Callable[[str], float],
    ) -> None:
        self._store = store
        self._residency = residency
        self._downloader = downloader
        self._part_bytes = part_bytes
        self._max_share_of = max_share_of

    async def fill(
        self,
        transfer: Transfer,
        claim: KeyClaim,
        origin: Origin,
        obj: RemoteObject,
        key: str,
    ) -> bool:
        """Fetch the ranges that readers wait for, until there is space for the whole object.

        The whole object is fetched if anybody wants it. It is also fetched if there is space for
        it, and so many of its parts are wanted that later requests for the others would cost more.

        Returns True once the space of the whole object is reserved; False once nobody wants any of
        its bytes. Raises as `Downloader.fetch_parts` and `Residency.reserve` do. Raises
        PostponedError if there is no space for the whole object, and no reader waits for any of its
        bytes.
        """
        whole = WholeSpace(self._residency, claim, key, obj.size_bytes)

        def open_file() -> Awaitable[PartFile]:
            return self._open_file(claim, obj, key)

        run = _FillRun(
            self._residency,
            self._downloader,
            transfer,
            claim,
            origin,
            whole,
            open_file,
            self._max_share_of(obj.url),
        )
        try:
            return await run.fill()
        except ShardChangedError:
            # The origin has another version now: give up the parts of this one.
            file = self._store.parts.get(key)
            if file is not None:
                self._residency.parts.hand_over(file)
            raise

    async def _open_file(self, claim: KeyClaim, obj: RemoteObject, key: str) -> PartFile:
        """Return the file of an object's parts; make one if there is none."""
        file = self._store.parts.get(key)
        if file is not None:
            if not file.is_confirmed:  # an earlier daemon has left it
                file.confirm(obj)
            return file
        assert claim.reservation is not None
        # A reader waits, so the space for the journal is needed now.
        await self._residency.reserve(claim, JOURNAL_BYTES, needed_now)
        file = await self._residency.parts.open(obj, self._part_bytes, claim.reservation)
        claim.reservation.keep(JOURNAL_BYTES)  # the file is on disk now
        return file


@dataclass(slots=True)
class _FillRun:
    """One call of `PartFiller.fill`, which fetches for the waits of one claim.

    `_open_file` returns the file of parts, which is opened once the first range is wanted;
    `_opened` is that file, or None until then. Parts are retained for a wait, so that none of them
    is evicted before the reader that waits has all of them.
    """

    _residency: Residency
    _downloader: Downloader
    _transfer: Transfer
    _claim: KeyClaim
    _origin: Origin
    _whole: WholeSpace
    _open_file: Callable[[], Awaitable[PartFile]]
    _max_share: float
    _opened: PartFile | None = None
    _fetching: set[int] = field(default_factory=set)  # parts that are being fetched
    _retained: dict[Wait, set[int]] = field(default_factory=dict)  # parts, by wait
    # Returns the priority of the requests. All of them have the same function, by which the
    # scheduler of connections knows that they belong to one download.
    _priority: AskPriority = field(init=False)

    def __post_init__(self) -> None:
        # No plan says when a range is needed: it is needed now.
        self._priority = lambda: self._claim.priority(needed_now)

    @property
    def _file(self) -> PartFile:
        """The file of parts, once it is open."""
        assert self._opened is not None  # `_request_ranges` opens it before it requests a part
        return self._opened

    async def fill(self) -> bool:
        """Fetch ranges until there is space for the whole object; see `PartFiller.fill`."""
        try:
            while await self._fill_group():
                # There was space for the whole object. The parts requested before have arrived
                # since then, but others may have been evicted, and need space again.
                if await self._whole.try_reserve():
                    return True
            return False
        finally:
            self._whole.end_wait()
            self._claim.arriving_bytes = 0  # requests that failed have left some
            for wait in list(self._retained):
                self._release_parts(wait)

    async def _fill_group(self) -> bool:
        """Run `_fill_with`, and wait for all of its requests. Raises the first of their errors.

        Returns what `_fill_with` does.
        """
        try:
            async with asyncio.TaskGroup() as group:
                return await self._fill_with(group)
        except BaseExceptionGroup as failures:
            first = failures.exceptions[0]
            raise first from first.__cause__  # callers need not know that there was a group

    async def _fill_with(self, group: asyncio.TaskGroup) -> bool:
        """Request ranges until nothing is wanted, or there is space for the whole object.

        Returns True once the space of the whole object is reserved, False once nothing is wanted.
        """
        while True:
            # 1. Readers that wait for ranges of this object get the parts that have arrived.
            if self._opened is not None:
                self._claim.offer_parts(self._opened)
            # Let their tasks run: readers that have what they waited for end their waits.
            await asyncio.sleep(0)
            moves = self._claim.moved.count  # how often the claim has moved so far

            # 2. If the whole object is wanted, it is fetched as soon as there is space for it.
            if self._claim.wants_whole:
                self._transfer.want_whole()
                if self._transfer.stages.present is Stage.ASKING:  # no ranges are being fetched
                    self._transfer.stages.enter(Stage.SPACE)
                if await self._whole.try_reserve():
                    return True

            # 3. Until there is space for the whole object, readers get the ranges of it that they
            #    wait for. The steps begin again if some were requested, or the claim has moved
            #    during the steps above: a wait below would not notice that.
            if self._claim.range_waits and await self._request_ranges(group):
                continue
            if self._claim.moved.count != moves:
                continue

            # 4. Nothing can be requested now: wait for space, or for the parts being fetched.
            if self._claim.wants_whole:
                await self._wait_for_whole()
            elif self._fetching:
                await self._claim.moved.wait()
            else:
                return False

    async def _wait_for_whole(self) -> None:
        """Wait until there may be space for the whole object, or the claim moves.

        If there cannot be space, only the whole object is given up. Ranges of it are still fetched
        if readers wait for them, and the error is raised if not.
        """
        try:
            await self._whole.wait(self._transfer.ref.url)
        except (CacheError, PostponedError) as exn:
            self._whole.end_wait()
            if not self._claim.range_waits and not self._fetching:
                raise
            self._claim.give_up_whole(exn)

    async def _request_ranges(self, group: asyncio.TaskGroup) -> bool:
        """Request the parts that readers wait for, or take a step towards that.

        Returns False if nothing was left to do: all waits have their parts, or those are being
        fetched.
        """
        if self._opened is None:
            # A transfer that waits for the space of the whole object shows that as its stage.
            is_waiting_for_whole = self._claim.wanted_bytes > 0
            if not is_waiting_for_whole:
                self._transfer.stages.enter(Stage.NETWORK)
            self._opened = await self._open_file()
            return True

        # 1. Parts that an earlier daemon has left need not be fetched if they are sound.
        await self._check_restored()

        # 2. Missing parts are requested all at once, consecutive ones in one request. If most of
        #    the object's parts are wanted, the whole object is fetched instead.
        missing = self._missing(self._awaited_parts())
        if self._is_worth_the_whole(missing) and await self._whole.reserve_at_once():
            self._transfer.want_whole()
            return True
        has_requested = await self._request_needed(group)

        # 3. Parts that will probably be read next are requested, too, if there is space for them
        #    without waiting.
        ahead = self._missing(self._parts_ahead())
        if ahead and await self._try_reserve_ahead(ahead):
            self._start_requests(ahead, group)
        return has_requested

    async def _request_needed(self, group: asyncio.TaskGroup) -> bool:
        """Request the parts of all waits, or of the most urgent wait if not all have space.

        Returns False if no wait had parts to be requested.
        """
        waiting = [wait for wait in self._claim.range_waits if not self._is_served(wait)]
        if not waiting:
            return False
        if not await self._try_request(waiting, group):
            waiting.sort(key=_urgency)
            await self._request_in_turn(waiting[0], group)
        return True

    def _is_served(self, wait: Wait) -> bool:
        """Return whether all parts of a wait have arrived, or are being fetched."""
        return wait in self._retained and not self._missing(self._parts_of(wait))

    async def _try_request(self, waits: Sequence[Wait], group: asyncio.TaskGroup) -> bool:
        """Request the parts of waits, if there is space for all of them without waiting.

        Returns whether there was. The parts of each wait are then retained until the wait ends. If
        there is no space, none of them is retained: a wait that has some of its parts and waits for
        the space of the others could deadlock with another such wait.
        """
        for wait in waits:
            self._retain_parts(wait)
        wanted = chain.from_iterable(self._parts_of(wait) for wait in waits)
        missing = self._missing(wanted)
        if missing and not await self._try_reserve(missing):
            for wait in waits:
                self._release_parts(wait)
                wait.enter(Stage.SPACE)
            return False
        for wait in waits:
            wait.enter(Stage.NETWORK)
        self._start_first_requests(waits, missing, group)
        self._start_requests(self._missing(missing), group)
        return True

    def _start_first_requests(
        self,
        waits: Sequence[Wait],
        missing: Collection[int],
        group: asyncio.TaskGroup,
    ) -> None:
        """Request the first parts of waits whose ranges are read in order, each part by itself.

        Such a wait ends as soon as the first byte of its range arrives. But the parts of one
        request count as arrived together.

        Args:
            waits: the waits.
            missing: the missing parts of these waits.
            group: runs the requests.
        """
        for wait in waits:
            parts = self._parts_of(wait)
            if not wait.in_order or not parts:
                continue
            first = parts[0]
            is_requested = first in self._fetching  # for another of these waits
            if first in missing and not is_requested:
                self._start_requests([first], group)

    async def _request_in_turn(self, wait: Wait, group: asyncio.TaskGroup) -> None:
        """Request the parts of one wait as soon as there is space for them.

        Claims take turns at this: the one that has waited for longest takes space for a range
        before all others. Returns also if the wait has ended, or ends with an error, as there can
        be no space for it.
        """
        missing = self._missing(self._parts_of(wait))
        size_bytes = self._size_of(missing)
        with self._residency.parts.in_line(self._claim), self._claim.waiting_for_space(size_bytes):
            while wait in self._claim.waits and not await self._try_request([wait], group):
                try:
                    self._residency.check_possible(size_bytes, self._transfer.ref.url)
                    await self._residency.wait_for_change(self._claim)
                except CacheError as exn:
                    wait.error = exn
                    self._claim.moved.notify()
                    return

    # Parts that are retained until their readers have them

    def _retain_parts(self, wait: Wait) -> None:
        """Retain the cached parts of a wait until the wait ends.

        `_fetch` retains each further part when it arrives.
        """
        if wait not in self._retained:
            self._retained[wait] = set()
            wait.on_end = lambda: self._release_parts(wait)
        done = self._file.partial.done
        self._retain_more(wait, [part for part in self._parts_of(wait) if part in done])

    def _retain_more(self, wait: Wait, parts: Iterable[int]) -> None:
        """Retain further parts for a wait, except those that are retained for it already."""
        retained = self._retained[wait]
        new = [part for part in parts if part not in retained]
        retained.update(new)
        self._residency.parts.retain(self._file, new)

    def _release_parts(self, wait: Wait) -> None:
        """Release the parts of a wait. No-op if none are retained for it."""
        retained = self._retained.pop(wait, None)
        wait.on_end = None
        if retained:
            self._residency.parts.release(self._file, retained)

    def _parts_of(self, wait: Wait) -> range:
        """Return the numbers of the parts that a wait needs; none for a wait for the whole."""
        return range(0) if wait.bytes is None else self._file.parts_of(wait.bytes)

    def _awaited_parts(self) -> Iterator[int]:
        """Yield the numbers of the parts that readers wait for."""
        for wait in self._claim.range_waits:
            yield from self._parts_of(wait)

    def _parts_ahead(self) -> Iterator[int]:
        """Yield the numbers of the parts that readers will probably read next."""
        for wait in self._claim.range_waits:
            if wait.ahead is not None:
                yield from self._file.parts_of(wait.ahead)

    def _missing(self, wanted: Iterable[int]) -> list[int]:
        """Return those of the wanted parts that have not arrived, and are not being fetched."""
        done = self._file.partial.done
        missing = (part for part in wanted if part not in done)
        return [part for part in dict.fromkeys(missing) if part not in self._fetching]

    def _start_requests(self, parts: list[int], group: asyncio.TaskGroup) -> None:
        """Request parts for which space is reserved."""
        for run in runs(parts, self._max_parts_per_request()):
            self._fetching.update(run)
            self._claim.arriving_bytes += self._size_of(run)
            group.create_task(self._fetch(run))

    def _max_parts_per_request(self) -> int:
        """Return the maximum number of consecutive parts that one request fetches."""
        if self._origin.tier is not None:
            # One node of the tier caches a part, under the range of the request for it. So all
            # nodes must request the part by the same range, which is the part alone.
            return 1
        return max_parts_per_request(self._file.partial.part_bytes)

    async def _check_restored(self) -> None:
        """Check the wanted parts that an earlier daemon has left."""
        unchecked = self._file.partial.unchecked
        wanted = dict.fromkeys((*self._awaited_parts(), *self._parts_ahead()))
        parts = [part for part in wanted if part in unchecked]
        if not parts:
            return
        await self._residency.parts.check_restored(self._file, parts)

    def _is_worth_the_whole(self, missing: list[int]) -> bool:
        """Return whether to fetch the whole object, as many of its parts would be cached then."""
        partial = self._file.partial
        wanted_count = len(partial.done) + len(self._fetching) + len(missing)
        may_fit = self._whole.may_fit
        return is_worth_the_whole(
            wanted_count, partial.part_count, self._max_share, may_fit=may_fit
        )

    def _size_of(self, parts: Iterable[int]) -> int:
        """Return the size of parts together, in bytes."""
        return sum(map(self._file.partial.size_of, parts))

    async def _try_reserve(self, parts: Sequence[int]) -> bool:
        """Reserve space for parts, if that takes no waiting; return whether it was reserved."""
        return await self._residency.reserve_at_once(self._claim, self._size_of(parts), NOW)

    async def _try_reserve_ahead(self, parts: Sequence[int]) -> bool:
        """Reserve space, as `_try_reserve` does, for parts that no reader has asked for yet."""
        size_bytes = self._size_of(parts)
        if size_bytes > self._residency.ahead.limit_bytes:
            return False
        return await self._residency.reserve_at_once(self._claim, size_bytes, AFTER_ALL_PLANS)

    async def _fetch(self, parts: range) -> None:
        """Fetch parts in one request. Retain each part that arrives for the waits that need it."""
        partial = self._file.partial
        finished = self._downloader.fetch_parts(
            self._origin,
            partial,
            parts,
            priority=self._priority,
            unfinished=self._transfer.unfinished,
        )
        async for part in finished:
            part_bytes = partial.size_of(part)
            self._fetching.discard(part)
            self._claim.arriving_bytes -= part_bytes
            assert self._claim.reservation is not None
            self._claim.reservation.keep(part_bytes)  # it is on disk now
            self._residency.parts.arrived(self._file, part)
            for wait in self._retained:
                if part in self._parts_of(wait):
                    self._retain_more(wait, [part])
            self._transfer.set_done(partial.done_bytes)


def _urgency(wait: Wait) -> tuple[float, int]:
    """Return the sort key of a wait for a range.

    Readers that have nothing else to read come first, the longest wait before the others. Of equal
    waits, the one for the range that starts first comes first.
    """
    assert wait.bytes is not None
    start, _ = wait.bytes
    since_s = math.inf if wait.idle_since_s is None else wait.idle_since_s
    return since_s, start
