"""Reader of a rank's epoch whose samples come in any order, not shard by shard.

An epoch is an order of samples; a place is a position in this order, counted from 0 for each rank.
A sample's range is the part of its tar that has its bytes. Scattered samples, those of sources with
`shuffle="global"`, are fetched by their ranges. Other samples of a mixture are read with their
shards, by a `PlaceReader`. `reader_of` chooses the reader for an epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

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
from shardcache_client.reading.single.scattered_samples import ASKED_TOGETHER, MAX_ASKED

# Maximum number of bytes in open requests: enough to keep a network of 10 Gbit/s busy for 50 ms,
# and few enough for the requests of all readers of a node to fit into its cache together.
_MAX_ASKED_BYTES = 64 * 1024 * 1024
# More bytes are requested once a quarter of the maximum has been read, so that one message asks for
# many samples.
_REFILL_BYTES = _MAX_ASKED_BYTES * 3 // 4

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
) -> PlacesReader:
    """Return a reader of an epoch's places, to be closed.

    Args:
        session: declares the plans, or reads the ranges.
        plans: declares parts of the epoch by the same session.
        epoch: the rank's order of samples.
        sessions: opens further sessions where one is not enough.
        check: called about once a second in a wait; it may raise to end the wait.
    """
    scattered = plans.form.scattered
    if scattered is None:
        return PlaceReader(plans, epoch)
    are_all_scattered = all(map(scattered.has, range(len(plans.form.manifest))))
    if are_all_scattered:
        return ScatteredReader(session, plans, epoch, sessions, check)

    # A session has one plan at a time. This session declares the plans of the shards that are read
    # as a whole, so the ranges need another session.
    others = PlaceReader(plans, epoch)
    return ScatteredReader(sessions.open(), plans, epoch, sessions, check, others)


@dataclass(slots=True, eq=False)
class _QueuedSample:
    """A sample that is read next, or soon.

    Attributes:
        place: the sample's place in the epoch.
        sample_id: numbers of the shard and of the sample in that shard.
        byte_range: range of the sample's bytes; None if the sample is read with its shard.
        request: the request for the range; None without a range.
    """

    place: int
    sample_id: SampleId
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
    are dropped.

    Args:
        session: reads the ranges; it must have no leases. If there are `others`, the session is
            for this reader alone, and `close` closes the session.
        plans: declares parts of the epoch; their form has the samples' ranges in their tars.
        epoch: the rank's order of samples.
        sessions: opens a session for samples that can only be read with their whole shard.
        check: called about once a second in a wait; it may raise to end the wait.
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
        others: PlaceReader | None = None,
    ) -> None:
        assert plans.form.scattered is not None
        self._session = session
        self._form = plans.form
        self._is_shared = plans.is_shared
        self._ranges = plans.form.scattered
        self._epoch = epoch
        self._check = check
        self._others = others
        # Reads samples without a range.
        self._lone = LoneShardReader(sessions.open, plans.form)
        self._range_reader: RangeReader | None = None  # made by the first request
        self._last_start: int | None = None  # first place of the previous run
        self._queue: deque[_QueuedSample] = deque()
        self._queued_bytes = 0  # number of bytes of the samples in the queue
        # Places whose samples are queued next, each with its sample.
        self._coming: Iterator[tuple[int, SampleId]] = iter(())

    def __repr__(self) -> str:
        return f"ScatteredReader({self._epoch!r}, queued={len(self._queue)})"

    def reads(self, start: int, stop: int) -> Iterator[ReadResult]:
        """Yield the results of reading the places from `start` to `stop`.

        The caller may leave out places, but may not return to earlier places.
        """
        self._expect(self._runs_from(start, stop))
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

    def _runs_from(self, start: int, stop: int) -> list[range]:
        """Return the run that is read now, and the runs that will probably be read next."""
        size = stop - start
        step = size
        if self._last_start is not None:
            step = max(size, start - self._last_start)
        # If several workers share the epoch, each knows the distance of its runs only from its
        # second run on.
        is_step_known = self._last_start is not None or not self._is_shared
        self._last_start = start

        runs = [range(start, stop)]
        if is_step_known:
            ahead = [start + step * nth for nth in range(1, RUNS_AHEAD + 1)]
            runs += [range(first, min(first + size, len(self._epoch))) for first in ahead]
        return runs

    def _expect(self, runs: Sequence[range]) -> None:
        """Have the places of some runs requested in this order, and drop other requests.

        The requests at the head of the queue are kept as far as they agree with the runs.
        """
        places = chain.from_iterable(runs)
        kept = 0
        for queued, place in zip(self._queue, places, strict=False):
            if queued.place != place:
                break
            kept += 1
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

    def _ask_ahead(self) -> None:
        """Request the next samples, and queue them, once a message can ask for many.

        If the queue is empty, at least one sample is queued, however many bytes it has.
        """
        if self._queue and not self._is_worth_a_message:
            return
        new: list[_QueuedSample] = []
        new_bytes = 0
        while True:
            has_any = bool(self._queue or new)
            if has_any and not self._may_ask_more(len(new), new_bytes):
                break
            coming = next(self._coming, None)
            if coming is None:
                break
            place, sample_id = coming
            queued = _QueuedSample(place, sample_id, self._ranges.range_of(*sample_id))
            new.append(queued)
            new_bytes += queued.size_bytes
        self._request(new)
        self._queue += new
        self._queued_bytes += new_bytes

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
        for queued in new:
            if queued.byte_range is not None:
                by_range.append(queued)
                ranges.append(queued.byte_range)
        if not ranges:
            return
        requests = self._declared_reader().ask(ranges, needed=False)
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
