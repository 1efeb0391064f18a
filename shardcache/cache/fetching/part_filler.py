"""Fetching of the parts of an object that readers of ranges need, until the whole is fetched.

A range is a span of an object's bytes. A part is a piece of fixed size, in which objects are
fetched, kept and evicted; parts are numbered from 0. A file of parts (`PartFile`) is a sparse file
with the parts of one object that are cached. `Fetcher` calls `PartFiller.fill` before it downloads
a whole object: as long as there is no space for the whole, or nobody wants it, readers get the
ranges that they wait for.

The waits of all the object's readers are found through the claim (`KeyClaim`) on the object. When
a wait, a part or an error is added, the claim's signal `moved` is notified: the claim moves. A part
that arrives while all waits are served wakes only the waits for that part, as hundreds may wait for
ranges of one object.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from shardcache.cache.fetching.reserving import WholeSpace
from shardcache.cache.fetching.retained_parts import RetainedParts
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
            self._residency.parts.give_up_if_removed(file)
            if file.is_kept_by_part:
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
    `_opened` has the parts that are retained in that file, and is None until then.

    `_settled_at` is the count of `KeyClaim.moved` at which all waits were served. As long as the
    count is the same, they are: a new wait increases it, and so does the loss of a part.
    """

    _residency: Residency
    _downloader: Downloader
    _transfer: Transfer
    _claim: KeyClaim
    _origin: Origin
    _whole: WholeSpace
    _open_file: Callable[[], Awaitable[PartFile]]
    _max_share: float
    _opened: RetainedParts | None = None
    _fetching: set[int] = field(default_factory=set)  # parts that are being fetched
    _settled_at: int = -1
    # Returns the priority of the requests. All of them have the same function, by which the
    # scheduler of connections knows that they belong to one download.
    _priority: AskPriority = field(init=False)

    def __post_init__(self) -> None:
        # No plan says when a range is needed: it is needed now.
        self._priority = lambda: self._claim.priority(needed_now)

    @property
    def _retained(self) -> RetainedParts:
        """The retained parts, once the file of parts is open."""
        assert self._opened is not None  # `_request_ranges` opens it before it requests a part
        return self._opened

    @property
    def _file(self) -> PartFile:
        """The file of parts, once it is open."""
        return self._retained.file

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
            if self._opened is not None:
                self._opened.release_all()

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
            # 1. Readers that wait for ranges of this object get the parts that have arrived, before
            #    these could be evicted. Waits that are served were woken for each of theirs.
            if self._opened is not None:
                self._claim.offer_parts(self._opened.file)
                self._claim.moved.wake(self._unserved())
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
                self._settled_at = moves
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

        Returns False if nothing was left to do: all waits are served, or the claim has moved.
        """
        if self._opened is None:
            # A transfer that waits for the space of the whole object shows that as its stage.
            is_waiting_for_whole = self._claim.wanted_bytes > 0
            if not is_waiting_for_whole:
                self._transfer.stages.enter(Stage.NETWORK)
            file = await self._open_file()
            self._opened = RetainedParts(self._residency.parts, file)
            return True

        # 1. Parts that an earlier daemon has left need not be fetched if they are sound.
        unserved = self._unserved()
        if await self._check_restored(unserved):
            return True

        # 2. Missing parts are requested all at once, consecutive ones in one request. If most of
        #    the object's parts are wanted, the whole object is fetched instead.
        missing = self._missing(self._parts_of_all(unserved))
        if self._is_worth_the_whole(missing) and await self._whole.reserve_at_once():
            self._transfer.want_whole()
            return True
        # A wait that has joined since step 1 may be for parts that have to be checked. It is
        # requested in the next round.
        waiting = [wait for wait in self._unserved() if wait in unserved]
        if waiting:
            await self._request(waiting, group)

        # 3. Parts that will probably be read next are requested, too, if there is space for them
        #    without waiting.
        ahead = self._missing(self._parts_ahead())
        ahead = [part for part in ahead if part not in self._file.partial.unchecked]
        if ahead and await self._try_reserve_ahead(ahead):
            self._start_requests(ahead, group)
        return bool(waiting)

    async def _request(self, waits: Sequence[Wait], group: asyncio.TaskGroup) -> None:
        """Request the parts of waits, or of the most urgent wait if not all have space."""
        if not await self._try_request(waits, group):
            most_urgent = min(waits, key=_urgency)
            await self._request_in_turn(most_urgent, group)

    def _unserved(self) -> dict[Wait, None]:
        """Return the waits of which parts have yet to be requested, in the claim's order."""
        waits = self._claim.range_waits
        return dict.fromkeys(wait for wait in waits if not self._is_served(wait))

    def _is_served(self, wait: Wait) -> bool:
        """Return whether all parts of a wait have arrived, or are being fetched."""
        if wait not in self._retained:
            return False
        done = self._file.partial.done
        parts = self._retained.parts_of(wait)
        return all(part in done or part in self._fetching for part in parts)

    async def _try_request(self, waits: Sequence[Wait], group: asyncio.TaskGroup) -> bool:
        """Request the parts of waits, if there is space for all of them without waiting.

        Returns whether there was. The parts of each wait are then retained until the wait ends.
        """
        # Some of these waits may have all of their parts by now: these can end.
        self._claim.moved.wake(waits)
        missing = self._missing(self._parts_of_all(waits))
        if not await self._try_retain(waits, missing):
            for wait in waits:
                wait.enter(Stage.SPACE)
            return False
        for wait in waits:
            wait.enter(Stage.NETWORK)
        self._start_first_requests(waits, missing, group)
        self._start_requests(self._missing(missing), group)
        return True

    async def _try_retain(self, waits: Sequence[Wait], missing: Sequence[int]) -> bool:
        """Retain the parts of waits, if there is space for the missing ones without waiting.

        Returns whether there was. If not, no part is retained: a wait that has some of its parts
        and waits for the space of the others could deadlock with another such wait.
        """
        # The release of parts wakes all claims that wait for space. So a claim whose turn it is not
        # must not retain any: two such claims would wake each other, again and again.
        if missing and not self._residency.parts.may_take_space(self._claim):
            return False
        for wait in waits:
            self._retained.retain(wait)
        if not missing or await self._try_reserve(missing):
            return True
        for wait in waits:
            self._retained.release(wait)
        return False

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
            parts = self._retained.parts_of(wait)
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
        missing = self._missing(self._retained.parts_of(wait))
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

    def _parts_of_all(self, waits: Iterable[Wait]) -> Iterator[int]:
        """Yield the numbers of the parts that waits need; some of them repeatedly."""
        return chain.from_iterable(map(self._retained.parts_of, waits))

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

    async def _check_restored(self, waits: Iterable[Wait]) -> bool:
        """Check the parts that an earlier daemon has left, and that waits need now or next.

        Returns whether any was checked, and so may be what a wait lacks.
        """
        unchecked = self._file.partial.unchecked
        if not unchecked:
            return False  # a daemon that runs for long has none
        wanted = dict.fromkeys((*self._parts_of_all(waits), *self._parts_ahead()))
        parts = [part for part in wanted if part in unchecked]
        if not parts:
            return False
        await self._residency.parts.check_restored(self._file, parts)
        return not all(part in unchecked for part in parts)

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
            # If the file was closed, as another program has removed it, its parts do not count. The
            # space stays in the reservation, which is closed in the end.
            if self._file.is_kept_by_part:
                self._claim.reservation.keep(part_bytes)  # the part is on disk now
            self._residency.parts.arrived(self._file, part)
            waits = self._retained.arrived(part)
            self._transfer.done_bytes = partial.done_bytes
            self._part_arrived(waits)

    def _part_arrived(self, waits: Sequence[Wait]) -> None:
        """Wake the waits for a part that has arrived, and whoever else has to look again."""
        # 1. If not all waits are served, others may need the part, too.
        # 2. After the last part, `_fill_with` may return.
        is_settled = self._claim.moved.count == self._settled_at
        if is_settled and self._fetching:
            self._claim.moved.wake(waits)
        else:
            self._claim.moved.notify()


def _urgency(wait: Wait) -> tuple[float, int]:
    """Return the sort key of a wait for a range.

    Readers that have nothing else to read come first, the longest wait before the others. Of equal
    waits, the one for the range that starts first comes first.
    """
    assert wait.bytes is not None
    start, _ = wait.bytes
    since_s = math.inf if wait.idle_since_s is None else wait.idle_since_s
    return since_s, start
