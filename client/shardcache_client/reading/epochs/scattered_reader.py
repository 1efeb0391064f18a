"""Reader of a rank's epoch whose samples come in any order, not shard by shard.

An epoch is an order of samples; a place is a position in this order, counted from 0 for each rank.
A sample's range is the part of its tar that has its bytes. Scattered samples, those of sources with
`shuffle="global"`, are fetched by their ranges. Other samples of a mixture are read with their
shards, by a `PlaceReader`. `reader_of` chooses the reader for an epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

from shardcache.shared.exceptions import SampleError
from shardcache_client.daemon.reader_sessions import ReaderSessions
from shardcache_client.daemon.session import Session
from shardcache_client.order.rank_epoch import RankEpoch
from shardcache_client.order.share_places import SampleId
from shardcache_client.reading.epochs.epoch_plans import (
    SHARD_ERRORS,
    EpochPlans,
    PlacesReader,
    ReadResult,
)
from shardcache_client.reading.epochs.lone_reader import LoneShardReader
from shardcache_client.reading.epochs.place_reader import PlaceReader
from shardcache_client.reading.single.range_reader import RangeReader, RangeRequest
from shardcache_client.reading.single.sample_ranges import SampleRange
from shardcache_client.reading.single.scattered_samples import (
    ASKED_TOGETHER,
    MAX_ASKED,
    MAX_PLANNED,
)

# Maximum number of bytes in open requests: enough to keep a network of 10 Gbit/s busy for 50 ms,
# and few enough for the requests of all readers of a node to fit into its cache together.
_MAX_ASKED_BYTES = 64 * 1024 * 1024
# More bytes are requested once a quarter of the maximum has been read, so that one message asks for
# many samples.
_REFILL_BYTES = _MAX_ASKED_BYTES * 3 // 4

# Number of samples that are announced with each message that requests some. It is a multiple of
# those, so that the announced order is soon far ahead, and takes milliseconds to look up.
_ANNOUNCED_TOGETHER = 2048
# The order is announced once this share of the samples, as they are requested, need no further row
# of the tables. Before that, most ranges are unknown.
_MIN_KNOWN_SHARE = 7 / 8

RUNS_AHEAD = 3
"""Number of later runs whose samples are requested while one run is read.

A run is a range of places that is read by one call, such as the places of a batch.
"""


def reader_of(
    session: Session,
    plans: EpochPlans,
    epoch: RankEpoch,
    sessions: ReaderSessions,
    check: Callable[[], None],
    following: Callable[[], RankEpoch | None],
) -> PlacesReader:
    """Return a reader of an epoch's places, to be closed.

    Args:
        session: declares the plans, or reads the ranges.
        plans: declares parts of the epoch by the same session.
        epoch: the rank's order of samples.
        sessions: opens further sessions where one is not enough.
        check: called about once a second in a wait; it may raise to end the wait.
        following: returns the rank's order of the next epoch; None if there is none.
    """
    scattered = plans.form.scattered
    if scattered is None:
        return PlaceReader(plans, epoch)
    are_all_scattered = all(map(scattered.has, range(len(plans.form.manifest))))
    if are_all_scattered:
        return ScatteredReader(session, plans, epoch, sessions, check, following)

    # A session has one plan at a time. This session declares the plans of the shards that are read
    # as a whole, so the ranges need another session.
    others = PlaceReader(plans, epoch)
    return ScatteredReader(sessions.open(), plans, epoch, sessions, check, following, others)


@dataclass(slots=True, eq=False)
class _QueuedSample:
    """A sample that is read next, or soon.

    Attributes:
        place: the sample's place in the epoch.
        sample_id: numbers of the shard and of the sample in that shard.
        number: number of the sample in the order in which samples are queued.
        byte_range: range of the sample's bytes; None if the sample is read with its shard.
        request: the request for the range; None without a range.
    """

    place: int
    sample_id: SampleId
    number: int
    byte_range: SampleRange | None
    request: RangeRequest | None = None

    @property
    def size_bytes(self) -> int:
        """Number of bytes that are requested."""
        if self.byte_range is None:
            return 0
        return self.byte_range.size_bytes


class ScatteredReader:
    """The samples at the places of a rank's epoch, each read by its range.

    Some hundred samples are requested ahead: the samples of the run that is read, and of the runs
    that are expected next. A worker of a loader makes every nth batch, so this reader expects the
    next runs at the same distance as the last two. Requests for places that are not read after all
    are dropped. Many thousand later samples, of the next epoch as well, are announced by the same
    expectation, but not requested: the cache keeps those that it has.

    Args:
        session: reads the ranges; it must have no leases. If there are `others`, the session is
            for this reader alone, and `close` closes the session.
        plans: declares parts of the epoch; their form has the samples' ranges in their tars.
        epoch: the rank's order of samples.
        sessions: opens a session for samples that can only be read with their whole shard.
        check: called about once a second in a wait; it may raise to end the wait.
        following: returns the rank's order of the next epoch; None if there is none.
        others: reads the samples of sources that are read shard by shard; None if there are none.

    Raises ConfigError if no table has the ranges of samples; NoDaemonError if the daemon stays away
    for longer than the session's patience.
    """

    def __init__(
        self,
        session: Session,
        plans: EpochPlans,
        epoch: RankEpoch,
        sessions: ReaderSessions,
        check: Callable[[], None],
        following: Callable[[], RankEpoch | None],
        others: PlaceReader | None = None,
    ) -> None:
        assert plans.form.scattered is not None
        self._session = session
        self._form = plans.form
        self._is_shared = plans.is_shared
        self._ranges = plans.form.scattered
        self._epoch = epoch
        self._check = check
        self._following = following
        self._others = others
        # Reads samples without a range.
        self._lone = LoneShardReader(sessions.open, plans.form)
        self._range_reader: RangeReader | None = None  # made by the first request
        self._last_start: int | None = None  # first place of the previous run
        self._queue: deque[_QueuedSample] = deque()
        self._queued_bytes = 0  # number of bytes of the samples in the queue
        # Places whose samples are queued next, each with its sample.
        self._coming: Iterator[tuple[int, SampleId]] = iter(())
        self._next_number = 0  # number of the next sample that is queued
        self._expected_start: int | None = None  # first place of the run that is expected next
        # The samples to be announced, each with its number; None if it is not known what is next.
        self._later: Iterator[tuple[int, SampleId]] | None = None
        self._announced_to = 0  # number of the sample after those announced
        self._has_announced = False  # True once some of `_later` are announced

    def __repr__(self) -> str:
        return f"ScatteredReader({self._epoch!r}, queued={len(self._queue)})"

    def reads(self, start: int, stop: int) -> Iterator[ReadResult]:
        """Yield the results of reading the places from `start` to `stop`.

        The caller may leave out places, but may not return to earlier places.
        """
        self._expect(start, stop)
        for _ in range(start, stop):
            self._ask_ahead()
            queued = self._queue.popleft()
            self._queued_bytes -= queued.size_bytes
            yield self._read(queued)
        if self._range_reader is not None:
            self._range_reader.flush()

    def close(self) -> None:
        """Drop all requests, and release the tables."""
        self._drop_after(0)
        self._session.on_wait = None
        self._lone.close()
        self._ranges.close()
        if self._others is not None:
            self._others.close()
            self._session.close()

    # Requests

    def _step_from(self, start: int, stop: int) -> int | None:
        """Return the distance from a run to the one that will probably be read next.

        If several workers share the epoch, each knows the distance only from its second run on, and
        the result is None before that.

        Args:
            start: first place of the run that is read now.
            stop: place after its last one.
        """
        last_start = self._last_start
        self._last_start = start
        if last_start is not None:
            return max(stop - start, start - last_start)
        return None if self._is_shared else stop - start

    def _expect(self, start: int, stop: int) -> None:
        """Have a run requested, and the runs that will probably be read next; drop other requests.

        The requests at the head of the queue are kept as far as they agree with these runs.

        Args:
            start: first place of the run that is read now.
            stop: place after its last one.
        """
        is_expected = start == self._expected_start
        runs = [range(start, stop)]
        step = self._step_from(start, stop)
        if step is not None:
            self._expected_start = start + step
            runs = list(islice(_runs(start, stop - start, step, len(self._epoch)), 1 + RUNS_AHEAD))

        places = chain.from_iterable(runs)
        kept = 0
        for queued, place in zip(self._queue, places, strict=False):
            if queued.place != place:
                break
            kept += 1
        if kept < len(self._queue) or not is_expected:
            self._later = None
            if step is not None:
                later = self._samples_later(start, stop - start, step, kept)
                self._later = enumerate(later, start=self._next_number)
            self._announced_to = self._next_number
            self._has_announced = False
        self._drop_after(kept)
        runs_to_request = _without_first(kept, runs)
        self._coming = chain.from_iterable(map(self._samples_in, runs_to_request))

    def _drop_after(self, kept: int) -> None:
        """Drop all queued samples but the first `kept`, with their requests."""
        while len(self._queue) > kept:
            queued = self._queue.pop()
            self._queued_bytes -= queued.size_bytes
            if queued.request is not None:
                self._declared_reader().drop(queued.request)

    def _samples_in(self, run: range) -> Iterator[tuple[int, SampleId]]:
        """Yield the places of a run, each with its sample."""
        return zip(run, self._epoch.samples(run.start, run.stop), strict=True)

    def _samples_later(self, start: int, size: int, step: int, kept: int) -> Iterator[SampleId]:
        """Yield the samples that will probably be read, up to the end of the next epoch.

        Args:
            start: first place of the run that is read now.
            size: number of places of a run.
            step: distance of the runs.
            kept: number of the first samples that are left out.
        """
        for run in _without_first(kept, _runs(start, size, step, len(self._epoch))):
            yield from self._epoch.samples(run.start, run.stop)
        following = self._following()
        if following is None:
            return
        for run in _runs(start % step, size, step, len(following)):
            yield from following.samples(run.start, run.stop)

    def _announce_ahead(self) -> None:
        """Announce samples that are requested later, as far as the tables were read already."""
        if self._later is None:
            return
        reader = self._declared_reader()
        if self._has_announced and not reader.has_announced:
            # Another daemon serves from now on. The next run begins another order.
            self._expected_start = None
            return
        room = MAX_PLANNED - (self._announced_to - self._next_number)
        if room < ASKED_TOGETHER:
            return
        numbered: list[tuple[int, SampleRange]] = []
        for number, sample_id in islice(self._later, min(room, _ANNOUNCED_TOGETHER)):
            self._announced_to = number + 1
            byte_range = self._ranges.known_range_of(*sample_id)
            if byte_range is not None:
                numbered.append((number, byte_range))
        if not numbered:
            return
        reader.announce(numbered, begins=not self._has_announced)
        self._has_announced = reader.has_announced
        if not self._has_announced:
            self._later = None  # the daemon is too old, or gone

    def _ask_ahead(self) -> None:
        """Request the next samples, and queue them, once a message can ask for many.

        If the queue is empty, at least one sample is queued, however many bytes it has.
        """
        if self._queue and not self._is_worth_a_message:
            return
        new: list[_QueuedSample] = []
        new_bytes = 0
        known = 0  # number of the new samples whose range was known already
        while True:
            has_any = bool(self._queue or new)
            if has_any and not self._may_ask_more(len(new), new_bytes):
                break
            coming = next(self._coming, None)
            if coming is None:
                break
            place, sample_id = coming
            byte_range = self._ranges.known_range_of(*sample_id)
            if byte_range is None:
                byte_range = self._ranges.range_of(*sample_id)
            else:
                known += 1
            queued = _QueuedSample(place, sample_id, self._next_number, byte_range)
            self._next_number += 1
            new.append(queued)
            new_bytes += queued.size_bytes
        self._request(new)
        self._queue += new
        self._queued_bytes += new_bytes
        if new and known >= len(new) * _MIN_KNOWN_SHARE:
            self._announce_ahead()

    @property
    def _is_worth_a_message(self) -> bool:
        """True if so few samples are requested that a message can ask for many more."""
        has_room = len(self._queue) <= MAX_ASKED - ASKED_TOGETHER
        return has_room and self._queued_bytes <= _REFILL_BYTES

    def _may_ask_more(self, new: int, new_bytes: int) -> bool:
        """Return True if another sample may be requested.

        Args:
            new: number of samples that are about to be added to the queue.
            new_bytes: number of bytes of these samples.
        """
        has_room = len(self._queue) + new < MAX_ASKED
        return has_room and self._queued_bytes + new_bytes < _MAX_ASKED_BYTES

    def _request(self, new: Iterable[_QueuedSample]) -> None:
        """Request the bytes of those among the new samples that are read by their ranges."""
        by_range = []
        ranges = []
        numbers = []
        for queued in new:
            if queued.byte_range is not None:
                by_range.append(queued)
                ranges.append(queued.byte_range)
                numbers.append(queued.number)
        if not ranges:
            return
        requests = self._declared_reader().ask(ranges, needed=False, numbers=numbers)
        for queued, request in zip(by_range, requests, strict=True):
            queued.request = request

    def _declared_reader(self) -> RangeReader:
        """Return the reader of ranges. The first call declares its plan to the daemon."""
        if self._range_reader is None:
            form = self._form
            # None in `view_of`: the view of the shard itself, not of a joined source.
            self._range_reader = RangeReader(
                self._session, form.manifest, lambda shard: form.view_of(shard, None)
            )
            self._session.on_wait = self._check
        return self._range_reader

    # Samples

    def _read(self, queued: _QueuedSample) -> ReadResult:
        """Wait for a sample; return the sample, or the error of reading the sample."""
        if queued.request is None:
            return self._read_from_shard(queued)
        try:
            sample = self._declared_reader().take(queued.request)
        except (SampleError, *SHARD_ERRORS) as exn:
            # The traceback is removed: its frames would keep the session of a reader that is gone.
            return exn.with_traceback(None)
        shard, _ = queued.sample_id
        self._form.name_source(sample, shard)
        return sample

    def _read_from_shard(self, queued: _QueuedSample) -> ReadResult:
        """Return a sample without a range, or the error of reading the sample."""
        shard, _ = queued.sample_id
        # A shard of a scattered source is not in the plan of the other reader.
        if self._others is None or self._ranges.has(shard):
            return self._lone.read(queued.sample_id)
        (result,) = self._others.reads(queued.place, queued.place + 1)
        return result


def _runs(start: int, size: int, step: int, end: int) -> Iterator[range]:
    """Yield runs of places at regular distances, up to the end of an epoch.

    Args:
        start: first place of the first run.
        size: number of places of a run; the last one may have fewer.
        step: distance of the first places of two runs.
        end: number of places of the epoch.
    """
    for first in range(start, end, step):
        yield range(first, min(first + size, end))


def _without_first(places: int, runs: Iterable[range]) -> Iterator[range]:
    """Yield what remains of runs without their first places.

    Args:
        places: number of places to leave out, counted through all runs.
    """
    for run in runs:
        left_out = min(places, len(run))
        places -= left_out
        if left_out < len(run):
            yield run[left_out:]
