"""Reader of the samples at the places of an epoch whose shards are not counted.

Each is counted once it is open.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from shardcache.errors import SampleError
from shardcache_client.order.sequences.lanes import Mix
from shardcache_client.order.sequences.rounds import Piece
from shardcache_client.order.uncounted import StepPlace, UncountedEpoch
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


@dataclass(frozen=True, slots=True)
class _HeldPiece:
    """A shard that is held for some steps.

    Attributes:
        numbers: of its samples, in the order in which they are spread over the steps.
        cut: returns a sample by its number.
        error: that of a shard which cannot be read; None if it can.
    """

    leased_shard: LeasedShard
    numbers: Sequence[int]
    cut: Callable[[int], Sample]
    error: Exception | None = None


class UncountedReader:
    """The samples at the places of a reader's epoch, read in ascending order.

    The place at which a step begins depends on the shards before it. So a reader opens all of them,
    also those whose samples it is not asked for, or begins at a step whose place is known.

    Args:
        plans: of the epoch.
        epoch: of the reader.
        start: the step to begin at.
        begun: to which steps are added as they begin.

    Raises NoDaemonError if the daemon stays away for longer than the session's patience.
    """

    def __init__(
        self,
        plans: EpochPlans,
        epoch: UncountedEpoch,
        start: StepPlace,
        begun: deque[StepPlace],
    ) -> None:
        self._plans = plans
        self._epoch = epoch
        self._begun = begun
        self._place = start.before  # the next place
        self._unread = self._all_samples(start)

    def __repr__(self) -> str:
        return f"UncountedReader({self._epoch!r}, place={self._place})"

    def reads(self, start: int, stop: int) -> Iterator[ReadResult]:
        """Yield the results of reading the places from `start` to `stop`.

        Ends earlier at the end of the epoch. Places may be left out, but not returned to.
        """
        while self._place < stop:
            read = next(self._unread, None)
            if read is None:
                return
            place = self._place
            self._place += 1
            if place >= start:
                yield read()

    def steps(self, start: int) -> tuple[StepPlace, ...]:
        """Return the steps begun so far; forget those before the one with the place `start`."""
        while len(self._begun) > 1 and self._begun[1].before <= start:
            self._begun.popleft()
        return tuple(self._begun)

    def close(self) -> None:
        """Release all shards."""
        self._unread.close()
        self._unread = _no_samples()  # the generator refers to this object: a cycle
        self._plans.close()

    # The samples at all places, one after another: each is a function that reads it, which is not
    # called for places that are left out.

    def _all_samples(self, start: StepPlace) -> Generator[Callable[[], ReadResult]]:
        """Yield the samples of one share after another; end once every share was found empty."""
        share = start.share
        step = start.step
        empty_shares = 0
        while self._epoch.has_share(share) and empty_shares < self._epoch.shares:
            before = self._place
            yield from self._samples_of_share(share, step)
            if self._place > before:
                empty_shares = 0
            elif step == 0:  # a share that was begun further on may have samples before that step
                empty_shares += 1
            share += 1
            step = 0

    def _samples_of_share(self, share: int, first: int) -> Iterator[Callable[[], ReadResult]]:
        """Yield the samples of a share from the step `first` on."""
        mix = self._epoch.mix(share)
        if first >= mix.steps:
            return
        window = self._declare(share, first)
        held: dict[int, _HeldPiece] = {}
        for step in range(first, mix.steps):
            self._begun.append(StepPlace(share, step, self._place))
            if self._epoch.is_mixed:
                yield from self._mixed_samples(window, mix, step, held)
            else:
                yield from self._samples_in_order(window, mix, step)
        window.empty()

    def _declare(self, share: int, first: int) -> ShardWindow:
        """Declare the shards of a share from a step on; return the window to read them through."""
        shards = self._epoch.shards(StepPlace(share, first))
        later = None
        if self._epoch.has_share(share + 1):
            later = partial(_later_shards, self._epoch, share)
        return self._plans.declare(shards, later, in_file_order=not self._epoch.is_mixed)

    def _samples_in_order(
        self, window: ShardWindow, mix: Mix, step: int
    ) -> Iterator[Callable[[], ReadResult]]:
        """Yield the samples of a step that is one shard, which may still be arriving."""
        shard = mix.pieces[step].shard
        # Another reader of the epoch may have been given samples of the shard already.
        is_fresh = not self._plans.is_shared
        whole_shard = (0, None)
        leased = window.take(shard, count=None, span=whole_shard, is_fresh=is_fresh)
        try:
            leased.open()
            window.ask(1)  # the next shard, only after this one was waited for
            yield from self._arriving_samples(leased)
        except SHARD_ERRORS as exn:
            # Its traceback would keep the session of a reader that is gone.
            yield partial(_already_read, exn.with_traceback(None))
        finally:
            window.give_back(leased)

    def _arriving_samples(self, leased: LeasedShard) -> Iterator[Callable[[], ReadResult]]:
        """Yield the samples of a shard, read already, as they arrive."""
        while True:
            try:
                # Called again after a bad sample, it yields those that follow.
                for sample in leased.samples():
                    yield partial(_already_read, sample)
                return
            except SampleError as exn:
                yield partial(_already_read, exn.with_traceback(None))

    def _mixed_samples(
        self,
        window: ShardWindow,
        mix: Mix,
        step: int,
        held: dict[int, _HeldPiece],
    ) -> Iterator[Callable[[], ReadResult]]:
        """Yield the samples of a step that mixes several shards.

        Args:
            held: the shards that are held, by number of the piece; kept up to date here.
        """
        pieces = mix.pieces_at(step)
        missing = sum(piece not in held for piece in pieces)
        for piece in pieces:
            if piece not in held:
                window.ask(min(missing, MAX_AT_ONCE))
                missing -= 1
                # A piece's own number is that of the first step that reads it.
                is_fresh = step == piece and not self._plans.is_shared
                leased = window.take(mix.pieces[piece].shard, count=None, is_fresh=is_fresh)
                held[piece] = _open(leased, mix.pieces[piece])
            error = held[piece].error
            if error is not None:
                # The error has a place in every step of the piece, not in the first alone: a reader
                # that begins with a later step then counts the same places.
                yield partial(_already_read, error)
        window.ask(1)  # the next shard, only after those of this step were waited for

        parts = [mix.part(piece, step, held[piece].numbers) for piece in pieces]
        draws = [iter(part) for part in parts]
        for nth in mix.interleaved(step, [len(part) for part in parts]):
            number = next(draws[nth])
            yield partial(_read_sample, held[pieces[nth]].cut, number)

        staying = mix.pieces_at(step + 1)
        leaving = [piece for piece in held if piece not in staying]
        for piece in leaving:
            window.give_back(held.pop(piece).leased_shard)


def _open(leased: LeasedShard, piece: Piece) -> _HeldPiece:
    """Open a shard, and put its samples in the order of the piece; keep the error if that fails."""
    try:
        leased.open()
        numbers = piece.numbers(len(leased.whole), permuted=True)
        # Four bytes per number, so that held pieces take hardly any memory, however wide the
        # window.
        return _HeldPiece(leased, array("I", numbers), leased.cutter())
    except SHARD_ERRORS as exn:
        return _HeldPiece(leased, (), _unreadable, exn.with_traceback(None))


def _no_samples() -> Generator[Callable[[], ReadResult]]:
    yield from ()


def _already_read(result: ReadResult) -> ReadResult:
    """Return the result itself, as the function that reads its place."""
    return result


def _read_sample(cut: Callable[[int], Sample], number: int) -> ReadResult:
    """Return a sample by its number, or the error of reading it."""
    try:
        return cut(number)
    except (SampleError, *SHARD_ERRORS) as exn:
        return exn.with_traceback(None)


def _unreadable(number: int) -> Sample:
    """Stand in for `cut` of a shard that cannot be read, of which no sample is asked for."""
    raise AssertionError(f"sample {number} of a shard that was not read")


def _later_shards(epoch: UncountedEpoch, share: int) -> Iterator[int]:
    """Yield the shards of the plan after that of a share."""
    return islice(epoch.shards_after(share), MAX_VISITS)
