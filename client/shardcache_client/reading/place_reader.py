"""Reads the samples at the places of a rank's epoch, from the shards that it holds for as long as they are needed."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, TypeAlias

from shardcache.errors import CapacityError, DiskFullError, OriginError, SampleError, ShardError, ShardTimeoutError
from shardcache_client.daemon.session import Session
from shardcache_client.files import WHOLE, Sample, View
from shardcache_client.order.manifest import Manifest, Plan
from shardcache_client.order.rank_epoch import Place, RankEpoch, Run, Visit
from shardcache_client.reading.leased_shard import LeasedShard, ShardWindow

if TYPE_CHECKING:
    from shardcache_client.sharing.handover import Handover

# Errors of a single shard. Any other would affect the next shard as well.
SHARD_ERRORS = (OriginError, ShardError, CapacityError, DiskFullError, ShardTimeoutError)

Read: TypeAlias = "Sample | Exception"
"""A sample, or the error of the sample or its shard."""

# Visits of a plan. The daemon keeps it in memory, and knows the next part while it serves this one.
PLANNED = 4_000

# Limit on open requests: the daemon stops reading from a session with too many, and a wide window needs many shards.
MAX_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class SampleForm:
    """The form in which a dataset's samples are read."""

    manifest: Manifest
    view_of: Callable[[int, str | None], View] = lambda shard, column: WHOLE
    handover: Handover | None = None
    sources: Sequence[str] = ()  # names of a mixture's sources, which its samples get
    firsts: Sequence[int] = ()  # number in the manifest of each source's first shard

    def name(self, sample: Sample, shard: int) -> None:
        """Give a sample of a mixture the name of its source."""
        if self.sources:
            sample["__source__"] = self.sources[bisect_right(self.firsts, shard) - 1]


@dataclass(slots=True, eq=False)
class _Held:
    """A shard that is held for a visit."""

    visit: Visit
    leased_shard: LeasedShard
    read: Callable[[int], Sample]
    is_open: bool = False
    error: Exception | None = None  # for which it could not be opened, or read on


class PlaceReader:
    """The samples at the places of a rank's epoch, read in ascending order.

    Args:
        session: to be used by one thread at a time.
        epoch: of the rank.
        number: of the epoch, as the daemon's plan names it.
        following: returns the shards of the next epoch. It must not refer to the session, which keeps it.
        check: is called now and then in a wait, and may raise to end it.
        is_shared: True if other processes read other places of this epoch, each by its own session.

    Raises NoDaemonError if the daemon stays away for longer than the session's patience.
    """

    def __init__(
        self,
        session: Session,
        form: SampleForm,
        epoch: RankEpoch,
        number: int,
        following: Callable[[], Iterator[int]],
        check: Callable[[], None] = lambda: None,
        *,
        is_shared: bool = False,
    ) -> None:
        self._session = session
        self._form = form
        self._epoch = epoch
        self._number = number
        self._following = following
        self._check = check
        self._is_shared = is_shared
        self._window: ShardWindow | None = None
        self._visits: Iterator[Visit] = iter(())  # of the plan, still to begin
        self._next: Visit | None = None
        self._planned_until = 0  # the place up to which the plan reaches
        self._held: list[_Held] = []
        self._held_by_shard: dict[int, _Held] = {}
        self._change = 0  # the next place at which a shard is needed, or no longer

    def __repr__(self) -> str:
        return f"PlaceReader({self._epoch!r}, held={len(self._held)})"

    def between(self, start: int, stop: int) -> list[Read]:
        """Return what is read at the places from `start` to `stop`; see `reads`."""
        return list(self.reads(start, stop))

    def reads(self, start: int, stop: int) -> Iterator[Read]:
        """Yield what is read at the places from `start` to `stop`; places may be left out, but not returned to."""
        if self._epoch.has_runs:
            return self._in_order(start, stop)
        return self._by_place(start, stop)

    def _in_order(self, start: int, stop: int) -> Iterator[Read]:
        number = start
        for run in self._epoch.runs(start, stop):
            if number >= self._change:
                self._move_on(number)
            yield from self._run(self._opened(run.shard), run)
            number += run.end - run.first

    def _run(self, held: _Held, run: Run) -> Iterator[Read]:
        """Yield what is read of a run; of a whole shard without a call for each sample."""
        at = run.first
        while at < run.end:
            if held.error is not None:
                yield held.error
                at += 1
                continue
            try:
                if held.leased_shard.is_whole and not held.leased_shard.beside:
                    for sample in held.leased_shard.whole.samples(at, run.end):
                        at += 1
                        yield sample
                else:
                    sample = held.read(at)
                    at += 1
                    yield sample
            except SampleError as exn:
                at += 1
                yield exn.with_traceback(None)
            except SHARD_ERRORS as exn:
                held.error = exn.with_traceback(None)

    def _opened(self, shard: int) -> _Held:
        held = self._held_by_shard[shard]
        if not held.is_open:
            self._open(held)
        return held

    def _by_place(self, start: int, stop: int) -> Iterator[Read]:
        name = self._form.name if self._form.sources else None
        for number, place in enumerate(self._epoch.places(start, stop), start):
            if number >= self._change:
                self._move_on(number)
            held = self._held_by_shard[place.shard]
            if not held.is_open:
                self._open(held)
            if held.error is not None:
                yield held.error
                continue
            try:
                sample = held.read(place.number)
            except SampleError as exn:
                yield exn.with_traceback(None)
                continue
            except SHARD_ERRORS as exn:
                held.error = exn.with_traceback(None)
                yield held.error
                continue
            if name is not None:
                name(sample, place.shard)
            yield sample

    def close(self) -> None:
        """Release all shards."""
        if self._window is not None:
            self._window.empty()
        self._held.clear()
        self._held_by_shard.clear()

    def _plan(self, start: int) -> None:
        """Declare the shards of the places from `start` on, as many as a plan has."""
        self.close()
        some = list(islice(self._epoch.visits(start), PLANNED + 1))
        visits = some[:PLANNED]
        self._planned_until = some[PLANNED].first if len(some) > PLANNED else len(self._epoch)
        after = self._following
        if self._planned_until < len(self._epoch):
            after = partial(_shards_from, self._epoch, self._planned_until)
        plan = Plan.of(self._form.manifest, self._number, (visit.shard for visit in visits), after)
        self._session.declare(plan)
        form = self._form
        # The samples of an arriving shard are there in file order; any other order needs the whole shard.
        partial_reads = None if self._epoch.is_in_file_order else False
        self._window = ShardWindow(
            self._session, plan, partial=partial_reads, handover=form.handover, view_of=form.view_of
        )
        self._session.on_wait = self._on_wait
        self._visits = iter(visits)
        self._next = next(self._visits, None)

    def _on_wait(self) -> None:
        self._check()
        if self._window is not None:
            self._window.let_go()

    def _move_on(self, number: int) -> None:
        """Release the shards that are no longer needed at a place, and take those that are."""
        if number >= self._planned_until:
            self._plan(number)
        assert self._window is not None
        for held in [each for each in self._held if each.visit.end <= number]:
            self._held.remove(held)
            self._window.give_back(held.leased_shard)
        new = []
        while self._next is not None and self._next.first <= number:
            new.append(self._next)
            self._next = next(self._visits, None)
        for waiting, visit in zip(range(len(new), 0, -1), new, strict=True):
            self._window.ask(min(waiting, MAX_AT_ONCE))
            self._take(self._window, visit, number)
        self._held_by_shard = {held.visit.shard: held for held in reversed(self._held)}
        ends = (held.visit.end for held in self._held)
        starts = (self._planned_until if self._next is None else self._next.first,)
        self._change = min(chain(ends, starts))

    def _take(self, window: ShardWindow, visit: Visit, number: int) -> None:
        """Take the next shard of the plan; one that was left out is given back unopened."""
        count = self._form.manifest[visit.shard].samples
        is_fresh = visit.is_whole and not self._is_shared
        leased_shard = window.take(visit.shard, count, is_fresh=is_fresh)
        if visit.end <= number:
            window.give_back(leased_shard)
        else:
            self._held.append(_Held(visit, leased_shard, leased_shard.sample))

    def _open(self, held: _Held) -> None:
        assert self._window is not None
        held.is_open = True
        try:
            held.leased_shard.open()
            if held.leased_shard.is_whole:
                held.read = held.leased_shard.cutter()
        except SHARD_ERRORS as exn:
            # Its traceback would keep the session of a reader that is gone.
            held.error = exn.with_traceback(None)
        self._window.ask(1)  # ahead, once nothing else is waited for


def _shards_from(epoch: RankEpoch, start: int) -> Iterator[int]:
    """Yield the shards of the plan from a place on."""
    return (visit.shard for visit in islice(epoch.visits(start), PLANNED))


class LoneReader:
    """Reads single places, such as those of substitutes, through a session that is opened when one is needed.

    The shard of the last one is kept open: the next one is often beside it.
    """

    def __init__(self, open_session: Callable[[], Session], form: SampleForm) -> None:
        self._open_session = open_session
        self._form = form
        self._session: Session | None = None
        self._window: ShardWindow | None = None
        self._shard = -1
        self._leased: LeasedShard | None = None
        self._lock = threading.Lock()

    def read(self, place: Place) -> Read:
        """Return what is read at a place. Any thread."""
        with self._lock:
            try:
                sample = self._shard_of(place.shard).sample(place.number)
            except (SampleError, *SHARD_ERRORS) as exn:
                return exn.with_traceback(None)
        self._form.name(sample, place.shard)
        return sample

    def _shard_of(self, shard: int) -> LeasedShard:
        if self._leased is not None and self._shard == shard:
            return self._leased
        if self._window is not None:
            self._window.empty()
        if self._session is None:
            self._session = self._open_session()
        form = self._form
        plan = Plan.of(form.manifest, 0, [shard])
        self._session.declare(plan)
        self._window = ShardWindow(self._session, plan, partial=None, handover=form.handover, view_of=form.view_of)
        self._leased = None
        leased = self._window.take(shard, form.manifest[shard].samples)
        leased.open()
        self._shard = shard
        self._leased = leased
        return leased

    def close(self) -> None:
        """Close the session, if there is one."""
        with self._lock:
            if self._window is not None:
                self._window.empty()
            if self._session is not None:
                self._session.close()
