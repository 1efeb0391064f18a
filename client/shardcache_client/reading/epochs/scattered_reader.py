"""Reader of the places of a rank's epoch whose samples come in no order of their shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from shardcache.errors import SampleError
from shardcache_client.daemon.reader_sessions import ReaderSessions
from shardcache_client.daemon.session import Session
from shardcache_client.order.rank_epoch import RankEpoch, SampleId
from shardcache_client.reading.epochs.epoch_plans import (
    SHARD_ERRORS,
    EpochPlans,
    PlacesReader,
    Read,
)
from shardcache_client.reading.epochs.lone_reader import LoneReader
from shardcache_client.reading.epochs.place_reader import PlaceReader
from shardcache_client.reading.single.sample_places import SamplePlace
from shardcache_client.reading.single.sample_ranges import RangeRequest, SampleRanges
from shardcache_client.reading.single.scattered_places import ScatteredPlaces
from shardcache_client.reading.single.scattered_samples import ASKED_TOGETHER, MAX_ASKED

# Bytes that are requested at a time: enough to keep a network of 10 Gbit/s busy for 50 ms, and few
# enough for the readers of a node to fit into its cache together.
_MAX_ASKED_BYTES = 64 * 1024 * 1024
# More are requested once a quarter of them has been read, so that a message asks for many samples.
_REFILL_BYTES = _MAX_ASKED_BYTES * 3 // 4

RUNS_AHEAD = 3
"""Runs of places, such as batches, whose samples are requested while those of one are read."""


def reader_of(
    session: Session,
    plans: EpochPlans,
    epoch: RankEpoch,
    sessions: ReaderSessions,
    check: Callable[[], None],
) -> PlacesReader:
    """Return a reader of an epoch's places, to be closed.

    Args:
        session: is used for what is read ahead.
        plans: of the epoch, by the same session.
        sessions: for what takes another one.
        check: is called now and then in a wait, and may raise to end it.
    """
    places = plans.form.scattered
    if places is None:
        return PlaceReader(plans, epoch)
    are_all_scattered = all(map(places.has, range(len(plans.form.manifest))))
    if are_all_scattered:
        return ScatteredReader(session, plans, places, epoch, sessions, check)

    # The session has the plan of the other shards, so ranges take one of their own.
    reader = ScatteredReader(sessions.open(), plans, places, epoch, sessions, check)
    reader.read_others_by(PlaceReader(plans, epoch))
    return reader


@dataclass(slots=True, eq=False)
class _Asked:
    """A place whose sample comes next, or soon.

    Attributes:
        number: of the place in the epoch.
        sample: at the place.
        span: of its bytes; None if they are read with their shard.
        request: for the span.
    """

    number: int
    sample: SampleId
    span: SamplePlace | None
    request: RangeRequest | None = None

    @property
    def size_bytes(self) -> int:
        """Number of bytes that are requested."""
        if self.span is None:
            return 0
        return self.span.stop - self.span.start


class ScatteredReader:
    """The samples at the places of a rank's epoch, each read by its range.

    Those of some hundred places are requested ahead, within this run of places and the next ones:
    these are taken to follow as the last ones did, since a worker makes every nth batch. Requests
    for places that do not come after all are dropped.

    Args:
        session: for the ranges, without leases.
        plans: of the epoch.
        places: where the samples are in their tars.
        epoch: of the rank.
        sessions: for samples that take their whole shard to be read.
        check: is called now and then in a wait, and may raise to end it.

    Raises ConfigError if no table says where samples are; NoDaemonError if the daemon stays away
    for longer than the session's patience.
    """

    def __init__(
        self,
        session: Session,
        plans: EpochPlans,
        places: ScatteredPlaces,
        epoch: RankEpoch,
        sessions: ReaderSessions,
        check: Callable[[], None],
    ) -> None:
        self._session = session
        self._form = plans.form
        self._is_shared = plans.is_shared
        self._places = places
        self._epoch = epoch
        self._check = check
        self._others: PlaceReader | None = None
        self._lone = LoneReader(sessions.open, plans.form)  # of samples without a range
        self._ranges: SampleRanges | None = None
        self._last_start: int | None = None  # of the run that was read before
        self._asked: deque[_Asked] = deque()
        self._asked_bytes = 0
        self._coming: Iterator[tuple[int, SampleId]] = iter(())  # to be requested next

    def __repr__(self) -> str:
        return f"ScatteredReader({self._epoch!r}, asked={len(self._asked)})"

    def read_others_by(self, others: PlaceReader) -> None:
        """Have a reader read the samples of other shards: those of other sources of a mixture.

        From here on, this reader closes its session, which was opened for its ranges alone.
        """
        self._others = others

    def reads(self, start: int, stop: int) -> Iterator[Read]:
        """Yield what is read at the places from `start` to `stop`.

        Places may be left out, but not returned to.
        """
        self._expect(self._runs_from(start, stop))
        for _ in range(start, stop):
            self._ask_ahead()
            asked = self._asked.popleft()
            self._asked_bytes -= asked.size_bytes
            yield self._read(asked)
        if self._ranges is not None:
            self._ranges.flush()

    def close(self) -> None:
        """Drop all requests, and release the tables."""
        self._drop_after(0)
        self._session.on_wait = None
        self._lone.close()
        self._places.close()
        if self._others is not None:
            self._others.close()
            self._session.close()

    # Requests

    def _runs_from(self, start: int, stop: int) -> list[range]:
        """Return the places that are read now, and those that will probably be read next."""
        size = stop - start
        step = size
        if self._last_start is not None:
            step = max(size, start - self._last_start)
        # Of several workers, each learns from its second run how far apart its runs are.
        is_step_known = self._last_start is not None or not self._is_shared
        self._last_start = start

        runs = [range(start, stop)]
        if is_step_known:
            ahead = [start + step * nth for nth in range(1, RUNS_AHEAD + 1)]
            runs += [range(first, min(first + size, len(self._epoch))) for first in ahead]
        return runs

    def _expect(self, runs: Iterable[range]) -> None:
        """Have the places of some runs requested in this order, and drop requests for others."""
        runs = list(runs)
        coming = chain.from_iterable(runs)
        kept = 0
        for asked, number in zip(self._asked, coming, strict=False):
            if asked.number != number:
                break
            kept += 1
        self._drop_after(kept)
        self._coming = chain.from_iterable(map(self._samples_in, _without_first(kept, runs)))

    def _drop_after(self, kept: int) -> None:
        """Drop all requests but the first `kept`."""
        while len(self._asked) > kept:
            asked = self._asked.pop()
            self._asked_bytes -= asked.size_bytes
            if asked.request is not None:
                self._declared().drop(asked.request)

    def _samples_in(self, run: range) -> Iterator[tuple[int, SampleId]]:
        """Yield the places of a run, each with its sample."""
        return zip(run, self._epoch.samples(run.start, run.stop), strict=True)

    def _ask_ahead(self) -> None:
        """Request samples until enough are requested, many by one message; at least one."""
        if self._asked and not self._is_worth_a_message:
            return
        new: list[_Asked] = []
        new_bytes = 0
        while True:
            has_any = bool(self._asked or new)
            if has_any and not self._may_ask_more(len(new), new_bytes):
                break
            coming = next(self._coming, None)
            if coming is None:
                break
            number, sample = coming
            asked = _Asked(number, sample, self._places.place(*sample))
            new.append(asked)
            new_bytes += asked.size_bytes
        self._request(new)
        self._asked += new
        self._asked_bytes += new_bytes

    @property
    def _is_worth_a_message(self) -> bool:
        """True if so few samples are requested that a message can ask for many more."""
        has_room = len(self._asked) <= MAX_ASKED - ASKED_TOGETHER
        return has_room and self._asked_bytes <= _REFILL_BYTES

    def _may_ask_more(self, new: int, new_bytes: int) -> bool:
        has_room = len(self._asked) + new < MAX_ASKED
        return has_room and self._asked_bytes + new_bytes < _MAX_ASKED_BYTES

    def _request(self, new: Iterable[_Asked]) -> None:
        """Request those of some samples that are read by their ranges."""
        by_range = [asked for asked in new if asked.span is not None]
        ranges = [asked.span for asked in by_range if asked.span is not None]
        if not ranges:
            return
        requests = self._declared().ask(ranges, needed=False)
        for asked, request in zip(by_range, requests, strict=True):
            asked.request = request

    def _declared(self) -> SampleRanges:
        """Return the session's ranges, whose plan is declared by the first call."""
        if self._ranges is None:
            form = self._form
            self._ranges = SampleRanges(
                self._session, form.manifest, lambda shard: form.view_of(shard, None)
            )
            self._session.on_wait = self._check
        return self._ranges

    # Samples

    def _read(self, asked: _Asked) -> Read:
        shard, _ = asked.sample
        if asked.request is None:
            return self._read_from_shard(asked)
        try:
            sample = self._declared().take(asked.request)
        except (SampleError, *SHARD_ERRORS) as exn:
            # Its traceback would keep the session of a reader that is gone.
            return exn.with_traceback(None)
        self._form.name(sample, shard)
        return sample

    def _read_from_shard(self, asked: _Asked) -> Read:
        shard, _ = asked.sample
        if self._others is None or self._places.has(shard):
            return self._lone.read(asked.sample)
        (read,) = self._others.reads(asked.number, asked.number + 1)
        return read


def _without_first(places: int, runs: Iterable[range]) -> Iterator[range]:
    """Yield runs without their first places."""
    for run in runs:
        left_out = min(places, len(run))
        places -= left_out
        if left_out < len(run):
            yield run[left_out:]
