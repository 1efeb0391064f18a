"""Reader of the samples at the places of a rank's epoch.

It holds each shard for as long as it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

from shardcache.errors import SampleError
from shardcache_client.order.rank_epoch import FileRun, RankEpoch, Visit
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
        read: returns a sample by its number.
        is_open: True once opening it was tried.
        error: why it cannot be opened, or read any further.
    """

    visit: Visit
    leased_shard: LeasedShard
    read: Callable[[int], Sample]
    is_open: bool = False
    error: Exception | None = None


class PlaceReader:
    """The samples at the places of a rank's epoch, read in ascending order.

    Args:
        plans: of the epoch.
        epoch: of the rank.

    Raises NoDaemonError if the daemon stays away for longer than the session's patience.
    """

    def __init__(self, plans: EpochPlans, epoch: RankEpoch) -> None:
        self._plans = plans
        self._form = plans.form
        self._epoch = epoch
        self._window: ShardWindow | None = None
        self._visits: Iterator[Visit] = iter(())  # of the plan, still to begin
        self._next_visit: Visit | None = None
        self._planned_until = 0  # the place up to which the plan reaches
        self._held: list[_HeldVisit] = []
        self._held_by_shard: dict[int, _HeldVisit] = {}
        self._next_change = 0  # the next place at which a shard is needed, or no longer

    def __repr__(self) -> str:
        return f"PlaceReader({self._epoch!r}, held={len(self._held)})"

    def reads(self, start: int, stop: int) -> Iterator[ReadResult]:
        """Yield the results of reading the places from `start` to `stop`.

        Places may be left out, but not returned to.
        """
        if self._epoch.has_runs:
            return self._read_runs(start, stop)
        return self._read_mixed(start, stop)

    def _read_runs(self, start: int, stop: int) -> Iterator[ReadResult]:
        """Yield the results where samples come in runs of their shards, as in no mixture."""
        place = start
        for run in self._epoch.runs(start, stop):
            if place >= self._next_change:
                self._move_on(place)
            yield from self._read_run(self._opened(run.shard), run)
            place += run.end - run.first

    def _read_run(self, held: _HeldVisit, run: FileRun) -> Iterator[ReadResult]:
        """Yield the results of a run; those of a whole shard without a call for each sample."""
        number = run.first
        while number < run.end:
            if held.error is not None:
                yield held.error
                number += 1
                continue
            try:
                if held.leased_shard.is_whole and not held.leased_shard.beside:
                    for sample in held.leased_shard.whole.samples(number, run.end):
                        number += 1
                        yield sample
                else:
                    sample = held.read(number)
                    number += 1
                    yield sample
            except SampleError as exn:
                number += 1
                yield exn.with_traceback(None)
            except SHARD_ERRORS as exn:
                held.error = exn.with_traceback(None)

    def _opened(self, shard: int) -> _HeldVisit:
        """Return a held shard, which is opened first if that was not tried yet."""
        held = self._held_by_shard[shard]
        if not held.is_open:
            self._open(held)
        return held

    def _read_mixed(self, start: int, stop: int) -> Iterator[ReadResult]:
        """Yield the results where samples of several shards are mixed."""
        name_source = self._form.name_source if self._form.sources else None
        for place, (shard, number) in enumerate(self._epoch.samples(start, stop), start):
            if place >= self._next_change:
                self._move_on(place)
            # As `_opened` does, without another call for each sample.
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
        # The first visit beyond the plan shows where the plan ends.
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
        """Release the shards that are no longer needed at a place, and take those that are."""
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
        waiting = len(new)
        for visit in new:
            self._window.ask(min(waiting, MAX_AT_ONCE))
            self._take(self._window, visit, place)
            waiting -= 1

        # Where two visits of a shard overlap, the one that began first is read.
        self._held_by_shard = {held.visit.shard: held for held in reversed(self._held)}
        next_start = self._planned_until if self._next_visit is None else self._next_visit.first
        self._next_change = min([next_start, *(held.visit.end for held in self._held)])

    def _take(self, window: ShardWindow, visit: Visit, place: int) -> None:
        """Take the next shard of the plan, for its visit; give it back at once if that is past."""
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
            # A run of samples in file order is not read by number.
            if held.leased_shard.is_whole and not self._epoch.has_runs:
                held.read = held.leased_shard.cutter()
        except SHARD_ERRORS as exn:
            # Its traceback would keep the session of a reader that is gone.
            held.error = exn.with_traceback(None)
        self._window.ask(1)  # ahead, once nothing else is waited for


def _shards_from(epoch: RankEpoch, start: int) -> Iterator[int]:
    """Yield the shards of the next plan, which begins at a place."""
    return (visit.shard for visit in islice(epoch.visits(start), MAX_VISITS))
