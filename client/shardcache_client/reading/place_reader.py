"""Reads the samples at the places of a rank's epoch, from the shards that it holds for as long as they are needed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from shardcache.errors import CapacityError, DiskFullError, OriginError, SampleError, ShardError, ShardTimeoutError
from shardcache_client.daemon.session import Session
from shardcache_client.files import WHOLE, Sample, View
from shardcache_client.order.manifest import Manifest, Plan
from shardcache_client.order.rank_epoch import Place, RankEpoch, Visit
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
_MAX_AT_ONCE = 8


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
    error: Exception | None = None  # for which it could not be opened


@dataclass(slots=True, eq=False, repr=False)
class PlaceReader:
    """The samples at the places of a rank's epoch, read in ascending order.

    Args:
        session: to be used by one thread at a time.
        epoch: of the rank.
        number: of the epoch, as the daemon's plan names it.
        following: returns the shards of the next epoch. It must not refer to the session, which keeps it.
        check: is called now and then in a wait, and may raise to end it.

    Raises NoDaemonError if the daemon stays away for longer than the session's patience.
    """

    _session: Session
    _form: SampleForm
    _epoch: RankEpoch
    _number: int
    _following: Callable[[], Iterator[int]]
    _check: Callable[[], None] = lambda: None
    _held: list[_Held] = field(default_factory=list, init=False)
    _window: ShardWindow | None = field(default=None, init=False)
    _visits: Iterator[Visit] = field(default_factory=lambda: iter(()), init=False)  # of the plan, still to begin
    _next: Visit | None = field(default=None, init=False)
    _planned_until: int = field(default=0, init=False)  # the place up to which the plan reaches

    def between(self, start: int, stop: int) -> list[Read]:
        """Return what is read at the places from `start` to `stop`; places may be left out, but not returned to."""
        reads: list[Read] = []
        for number, place in enumerate(self._epoch.between(start, stop), start):
            if number >= self._planned_until:
                self._plan(number)
            if self._next is not None and self._next.first <= number:
                self._move_on(number)
            reads.append(self._read(place))
        return reads

    def close(self) -> None:
        """Release all shards."""
        if self._window is not None:
            self._window.empty()
        self._held.clear()

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
        """Release the shards that are no longer needed at a place, and open those that are."""
        assert self._window is not None
        for held in [each for each in self._held if each.visit.end <= number]:
            self._held.remove(held)
            self._window.give_back(held.leased_shard)
        new = []
        while self._next is not None and self._next.first <= number:
            new.append(self._next)
            self._next = next(self._visits, None)
        for waiting, visit in zip(range(len(new), 0, -1), new, strict=True):
            self._window.ask(min(waiting, _MAX_AT_ONCE))
            self._held.append(self._open(self._window, visit))
        self._window.ask(1)

    def _open(self, window: ShardWindow, visit: Visit) -> _Held:
        count = self._form.manifest[visit.shard].samples
        held = _Held(visit, window.take(visit.shard, count))
        try:
            held.leased_shard.open()
        except SHARD_ERRORS as exn:
            held.error = exn
        return held

    def _read(self, place: Place) -> Read:
        held = next(each for each in self._held if each.visit.shard == place.shard)
        if held.error is not None:
            return held.error
        try:
            sample = held.leased_shard.sample(place.number)
        except SampleError as exn:
            return exn
        except SHARD_ERRORS as exn:
            held.error = exn
            return exn
        self._form.name(sample, place.shard)
        return sample


def _shards_from(epoch: RankEpoch, start: int) -> Iterator[int]:
    """Yield the shards of the plan from a place on."""
    return (visit.shard for visit in islice(epoch.visits(start), PLANNED))


def read_alone(session: Session, form: SampleForm, place: Place) -> Read:
    """Return what is read at a place by a session that reads nothing else."""
    plan = Plan.of(form.manifest, 0, [place.shard])
    session.declare(plan)
    window = ShardWindow(session, plan, partial=None, handover=form.handover, view_of=form.view_of)
    leased_shard = window.take(place.shard, form.manifest[place.shard].samples)
    try:
        leased_shard.open()
        sample = leased_shard.sample(place.number)
    except (SampleError, *SHARD_ERRORS) as exn:
        return exn
    finally:
        window.empty()
    form.name(sample, place.shard)
    return sample
