"""Reader of the samples at the places of a rank's epoch, which holds each shard while it is needed.

A place is a position in the rank's order of samples. A visit is the stretch of places at which
samples of one shard are read; the shard is held (leased and mapped) during its visit. Visits of
different shards overlap where their samples are mixed. Without mixing, the samples come in file
runs: ranges of samples of one shard, in file order. A plan declares a number of visits to the
daemon; long epochs take several plans, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat

from shardcache.shared.exceptions import SampleError
from shardcache_client.order.rank_epoch import RankEpoch
from shardcache_client.order.share_places import FileRun, Visit
from shardcache_client.reading.epochs.epoch_plans import (
    MAX_AT_ONCE,
    MAX_VISITS,
    SHARD_ERRORS,
    EpochPlans,
    ReadResult,
)
from shardcache_client.reading.leased.leased_shard import LeasedShard
from shardcache_client.reading.leased.shard_window import ShardWindow
from shardcache_client.samples.slicing import Sample


@dataclass(slots=True, eq=False)
class _HeldVisit:
    """A shard that is held for a visit.

    Attributes:
        visit: the places at which the shard is read.
        leased_shard: the shard.
        read: returns a sample by its number.
        is_open: True once the shard was opened, or opening it has failed.
        error: the error of opening the shard, or of reading it any further; None while it is sound.
    """

    visit: Visit
    leased_shard: LeasedShard
    read: Callable[[int], Sample]
    is_open: bool = False
    error: Exception | None = None


class PlaceReader:
    """The samples at the places of a rank's epoch, read in ascending order.

    Args:
        plans: declares parts of the epoch to the daemon.
        epoch: the rank's order of samples.

    Raises NoDaemonError if the daemon stays away for longer than the session's patience.
    """

    def __init__(self, plans: EpochPlans, epoch: RankEpoch) -> None:
        self._plans = plans
        self._form = plans.form
        self._epoch = epoch
        self._window: ShardWindow | None = None
        self._visits: Iterator[Visit] = iter(())  # visits of the plan after `_next_visit`
        self._next_visit: Visit | None = None  # first visit of the plan that has not begun
        self._planned_until = 0  # first place that is not in the plan
        self._held: list[_HeldVisit] = []
        self._held_by_shard: dict[int, _HeldVisit] = {}
        self._next_change = 0  # the next place at which a visit begins or has ended

    def __repr__(self) -> str:
        return f"PlaceReader({self._epoch!r}, held={len(self._held)})"

    def reads(self, start: int, stop: int) -> Iterator[ReadResult]:
        """Yield the results of reading the places from `start` to `stop`.

        The caller may leave out places, but may not return to earlier places.
        """
        if self._epoch.has_runs:
            return self._read_file_runs(start, stop)
        return self._read_mixed(start, stop)

    def _read_file_runs(self, start: int, stop: int) -> Iterator[ReadResult]:
        """Yield the results where samples come in file runs.

        The samples of a mixture never do, so no sample has a source to name.
        """
        place = start
        for run in self._epoch.runs(start, stop):
            if place >= self._next_change:
                self._move_on(place)
            held = self._held_by_shard[run.shard]
            if not held.is_open:
                self._open(held)
            yield from _read_file_run(held, run)
            place += run.end - run.first

    def _read_mixed(self, start: int, stop: int) -> Iterator[ReadResult]:
        """Yield the results where samples of several shards are mixed."""
        name_source = self._form.name_source if self._form.sources else None
        for place, (shard, number) in enumerate(self._epoch.samples(start, stop), start):
            if place >= self._next_change:
                self._move_on(place)
            held = self._held_by_shard[shard]
            if not held.is_open:
                self._open(held)
            if held.error is not None:
                yield held.error
                continue
            try:
                sample = held.read(number)
            except SampleError as exn:
                yield exn.with_traceback(None)
                continue
            except SHARD_ERRORS as exn:
                held.error = exn.with_traceback(None)
                yield held.error
                continue
            if name_source is not None:
                name_source(sample, shard)
            yield sample

    def close(self) -> None:
        """Release all shards."""
        self._plans.close()
        self._held.clear()
        self._held_by_shard.clear()

    def _plan(self, start: int) -> None:
        """Declare the shards of the places from `start` on, as many as a plan may have."""
        self.close()
        # One visit more than a plan may have is taken: the place where that visit begins is the end
        # of the plan.
        following = list(islice(self._epoch.visits(start), MAX_VISITS + 1))
        visits = following[:MAX_VISITS]
        if len(following) > MAX_VISITS:
            self._planned_until = following[MAX_VISITS].first
        else:
            self._planned_until = len(self._epoch)
        later = None
        if self._planned_until < len(self._epoch):
            later = partial(_shards_from, self._epoch, self._planned_until)

        shards = (visit.shard for visit in visits)
        in_file_order = self._epoch.is_in_file_order
        self._window = self._plans.declare(shards, later, in_file_order=in_file_order)
        self._visits = iter(visits)
        self._next_visit = next(self._visits, None)

    def _move_on(self, place: int) -> None:
        """Release the shards that a place no longer needs, and take the shards that it needs."""
        if place >= self._planned_until:
            self._plan(place)
        assert self._window is not None

        past = [held for held in self._held if held.visit.end <= place]
        for held in past:
            self._held.remove(held)
            self._window.give_back(held.leased_shard)

        new = []
        while self._next_visit is not None and self._next_visit.first <= place:
            new.append(self._next_visit)
            self._next_visit = next(self._visits, None)
        # A shard is taken only after it was asked for. Several are asked for ahead, so that they
        # arrive at the same time; MAX_AT_ONCE limits the open requests.
        waiting = len(new)
        for visit in new:
            self._window.ask(min(waiting, MAX_AT_ONCE))
            self._take(self._window, visit, place)
            waiting -= 1

        # If two visits of the same shard overlap, its samples are read through the visit that began
        # first: the reversed order lets that visit replace the other in the dict.
        self._held_by_shard = {held.visit.shard: held for held in reversed(self._held)}
        next_start = self._planned_until if self._next_visit is None else self._next_visit.first
        self._next_change = min([next_start, *(held.visit.end for held in self._held)])

    def _take(self, window: ShardWindow, visit: Visit, place: int) -> None:
        """Take the next shard of the plan, for its visit.

        A visit that ends at or before `place` was left out by the caller: its shard is given back
        immediately.
        """
        count = self._form.manifest[visit.shard].samples
        is_fresh = visit.is_whole and not self._plans.is_shared
        leased_shard = window.take(visit.shard, count, is_fresh=is_fresh)
        if visit.end <= place:
            window.give_back(leased_shard)
        else:
            self._held.append(_HeldVisit(visit, leased_shard, leased_shard.sample))

    def _open(self, held: _HeldVisit) -> None:
        """Open a shard, or keep the error with which that fails."""
        assert self._window is not None
        held.is_open = True
        try:
            held.leased_shard.open()
            # A cutter is faster for reading by number. File runs are read in order.
            if held.leased_shard.is_whole and not self._epoch.has_runs:
                held.read = held.leased_shard.cutter()
        except SHARD_ERRORS as exn:
            # The traceback is removed: its frames would keep the session of a reader that is gone.
            held.error = exn.with_traceback(None)
        self._window.ask(1)  # request the next shard ahead, now that this shard has arrived


def _read_file_run(held: _HeldVisit, run: FileRun) -> Iterator[ReadResult]:
    """Yield the results of a file run."""
    number = run.first  # the next sample's number
    while number < run.end and held.error is None:
        try:
            for sample in _samples_of(held.leased_shard, number, run.end):
                number += 1
                yield sample
        except SampleError as exn:
            number += 1
            yield exn.with_traceback(None)
        except SHARD_ERRORS as exn:
            held.error = exn.with_traceback(None)
    if held.error is not None:
        yield from repeat(held.error, run.end - number)


def _samples_of(leased_shard: LeasedShard, start: int, stop: int) -> Iterator[Sample]:
    """Return the samples of an open shard from the number `start` to `stop`, or only the first."""
    # 1. A shard that is arriving is read one sample at a time, until it is whole.
    if not leased_shard.is_whole:
        return map(leased_shard.sample, [start])
    # 2. A shard that is joined with others is read by number.
    if leased_shard.columns:
        return map(leased_shard.sample, range(start, stop))
    # 3. Any other shard is read in a loop, without a call for each sample.
    return leased_shard.whole.samples(start, stop)


def _shards_from(epoch: RankEpoch, start: int) -> Iterator[int]:
    """Yield the shards of the next plan, which begins at the place `start`."""
    return (visit.shard for visit in islice(epoch.visits(start), MAX_VISITS))
