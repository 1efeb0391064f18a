"""Reader of the samples at the places of an epoch whose shards are not counted.

The number of an uncounted shard's samples is known only once the shard is open.

- A place is a position in a reader's order of samples.
- A share is the shards that are dealt to one reader. A reader of an epoch with a fixed number of
  samples goes on to further shares.
- A mix is the order of a share's samples (see `mixes`). Its pieces are the shards, numbered in the
  order in which they enter. Its steps take some samples of a few pieces each, or all samples of one
  piece if shards are not mixed.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from shardcache.shared.exceptions import SampleError
from shardcache_client.order.sequences.mixes import Mix
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
        leased_shard: the shard.
        sample_numbers: numbers of the shard's samples, in the order in which the steps use them.
        cut: returns a sample by its number.
        error: the error of opening the shard; None if the shard is open.
    """

    leased_shard: LeasedShard
    sample_numbers: Sequence[int]
    cut: Callable[[int], Sample]
    error: Exception | None = None


class UncountedReader:
    """The samples at the places of a reader's epoch, read in ascending order.

    The place at which a step begins depends on the number of samples in all earlier shards. So a
    reader opens all of these shards, even if none of their samples is asked for; or it begins at a
    step whose place is known from an earlier reader.

    Args:
        plans: declares parts of the epoch to the daemon.
        epoch: the reader's part of the epoch.
        start: the step to begin at.
        resumed_at: the place that the epoch is read from: in the step `start`, or right after it.
            Samples at the step's earlier places were read before the epoch was interrupted.
        begun: steps whose places are known; this reader adds each step that it begins.
        ends_at_errors: True if the epoch ends at the first error.

    Raises NoDaemonError if the daemon stays away for longer than the session's patience.
    """

    def __init__(
        self,
        plans: EpochPlans,
        epoch: UncountedEpoch,
        start: StepPlace,
        resumed_at: int,
        begun: deque[StepPlace],
        *,
        ends_at_errors: bool,
    ) -> None:
        self._plans = plans
        self._epoch = epoch
        self._resumed_at = resumed_at
        self._ends_at_errors = ends_at_errors
        self._begun = begun
        self._place = start.before  # the next place: the number of places before `start`
        self._unread = self._all_samples(start)

    def __repr__(self) -> str:
        return f"UncountedReader({self._epoch!r}, place={self._place})"

    def reads(self, start: int, stop: int) -> Iterator[ReadResult]:
        """Yield the results of reading the places from `start` to `stop`.

        Ends earlier at the end of the epoch. The caller may leave out places, but may not return to
        earlier places.
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
        """Return the steps begun so far, from the step that has the place `start` on.

        Earlier steps are forgotten, as the caller does not return to their places.
        """
        while len(self._begun) > 1 and self._begun[1].before <= start:
            self._begun.popleft()
        return tuple(self._begun)

    def close(self) -> None:
        """Release all shards."""
        self._unread.close()
        # The old generator refers to this object, which would be a cycle.
        self._unread = _no_samples()
        self._plans.close()

    # The methods below yield, for each place, a function that reads the sample at that place. The
    # function is not called for places that the caller leaves out.

    def _all_samples(self, start: StepPlace) -> Generator[Callable[[], ReadResult]]:
        """Yield the samples of one share after another; end once every shard was found empty."""
        share = start.share
        step = start.step
        empty_shares = 0  # number of empty shares in a row
        # Any `pass_shares` shares in a row have every shard.
        while self._epoch.has_share(share) and empty_shares < self._epoch.pass_shares:
            before = self._place
            yield from self._samples_of_share(share, step)
            if self._place > before:
                empty_shares = 0
            # A share that was not read from its first step on may have samples before that step, so
            # it does not count as empty.
            elif step == 0:
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
        whole_shard = (0, None)
        leased = window.take(shard, count=None, span=whole_shard, is_fresh=self._is_fresh)
        try:
            leased.open()
            window.ask(1)  # request the next shard ahead, now that this shard is open
            yield from self._arriving_samples(leased)
        except SHARD_ERRORS as exn:
            # The epoch may have been interrupted within this shard, or right after its last sample:
            # the shard's size is unknown now, so this cannot be told.
            self._skip_places_read_before()
            # The traceback is removed: its frames would keep the session of a reader that is gone.
            yield partial(_already_read, exn.with_traceback(None))
        finally:
            window.give_back(leased)

    def _skip_places_read_before(self) -> None:
        """Go on to the place at which the epoch was resumed, for an error that has to be seen.

        The results at earlier places are dropped.
        """
        self._place = max(self._place, self._resumed_at)

    @property
    def _is_fresh(self) -> bool:
        """True if nobody has been given samples of a shard that begins at the present place.

        Other readers of the epoch may have been, and so may this one before it was interrupted.
        """
        return not self._plans.is_shared and self._place >= self._resumed_at

    def _arriving_samples(self, leased: LeasedShard) -> Iterator[Callable[[], ReadResult]]:
        """Yield the samples of a shard as they arrive.

        Each sample is read before its function is yielded.
        """
        while True:
            try:
                # Another call after a bad sample yields the samples that follow it.
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
            held: the shards that are held, by number of the piece. This method adds the shards that
                the step needs, and removes the shards that the next step does not need.
        """
        piece_numbers = mix.pieces_at(step)
        missing = sum(number not in held for number in piece_numbers)
        for number in piece_numbers:
            if number not in held:
                window.ask(min(missing, MAX_AT_ONCE))
                missing -= 1
                piece = mix.pieces[number]
                # The first step that reads a piece has the piece's number.
                is_fresh = step == number and self._is_fresh
                leased = window.take(piece.shard, count=None, is_fresh=is_fresh)
                held[number] = _open(leased, piece)
            error = held[number].error
            if error is not None:
                # An error that had been met before the interruption would have ended the epoch, so
                # this one is new.
                if self._ends_at_errors:
                    self._skip_places_read_before()
                # The error has a place in every step of the piece, not in the first step alone. So
                # a reader that begins with a later step counts the same places.
                yield partial(_already_read, error)
        window.ask(1)  # request the next shard ahead, now that this step's shards are all open

        # From each piece, this step takes a part of the samples. The parts are interleaved.
        parts = [mix.part(number, step, held[number].sample_numbers) for number in piece_numbers]
        draws = [iter(part) for part in parts]
        for nth in mix.interleaved(step, [len(part) for part in parts]):
            yield partial(_read_sample, held[piece_numbers[nth]].cut, next(draws[nth]))

        staying = mix.pieces_at(step + 1)
        leaving = [number for number in held if number not in staying]
        for number in leaving:
            window.give_back(held.pop(number).leased_shard)


def _open(leased: LeasedShard, piece: Piece) -> _HeldPiece:
    """Open a shard, and put its samples in the piece's order; keep the error if that fails."""
    try:
        leased.open()
        numbers = piece.numbers(len(leased.whole), permuted=True)
        # An array takes four bytes per number, so that held pieces take hardly any memory, even if
        # a step mixes many shards.
        return _HeldPiece(leased, array("I", numbers), leased.cutter())
    except SHARD_ERRORS as exn:
        # No numbers: the piece has no samples for the steps to use.
        return _HeldPiece(leased, (), _unreadable, exn.with_traceback(None))


def _no_samples() -> Generator[Callable[[], ReadResult]]:
    """Yield nothing."""
    yield from ()


def _already_read(result: ReadResult) -> ReadResult:
    """Return a result that is known already; stands in for a function that reads a place."""
    return result


def _read_sample(cut: Callable[[int], Sample], number: int) -> ReadResult:
    """Return a sample by its number, or the error of reading the sample."""
    try:
        return cut(number)
    except (SampleError, *SHARD_ERRORS) as exn:
        return exn.with_traceback(None)


def _unreadable(number: int) -> Sample:
    """Stand in for `cut` of a shard that cannot be read: nobody asks for samples of the shard."""
    raise AssertionError(f"sample {number} of a shard that was not read")


def _later_shards(epoch: UncountedEpoch, share: int) -> Iterator[int]:
    """Yield the shards of the plan that follows the plan of a share."""
    return islice(epoch.shards_after(share), MAX_VISITS)
