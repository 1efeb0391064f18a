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
    PLANNED,
    SHARD_ERRORS,
    EpochPlans,
    Read,
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

    Where a step begins depends on the shards before it. So a reader opens all of them, also those
    of which it is asked for no place, or begins at a step whose place is known.

    Args:
        plans: of the epoch.
        epoch: of the reader.
        start: the step to begin at.
        begun: gets the steps as they begin.

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
        self._reads = self._walk(start)

    def __repr__(self) -> str:
        return f"UncountedReader({self._epoch!r}, place={self._place})"

    def reads(self, start: int, stop: int) -> Iterator[Read]:
        """Yield what is read at the places from `start` to `stop`, or to the end of the epoch.

        Places may be left out, but not returned to.
        """
        while self._place < stop:
            found = next(self._reads, None)
            if found is None:
                return
            place = self._place
            self._place += 1
            if place >= start:
                yield found()

    def steps(self, start: int) -> tuple[StepPlace, ...]:
        """Return the steps that were begun, from the one that has the place `start` on."""
        while len(self._begun) > 1 and self._begun[1].before <= start:
            self._begun.popleft()
        return tuple(self._begun)

    def close(self) -> None:
        """Release all shards."""
        self._reads.close()
        self._reads = _no_reads()  # else a cycle
        self._plans.close()

    # All places, one after another, each as a function that reads it

    def _walk(self, start: StepPlace) -> Generator[Callable[[], Read]]:
        share = start.share
        step = start.step
        fruitless = 0
        while self._epoch.has_share(share) and fruitless < self._epoch.shares:
            before = self._place
            yield from self._share(share, step)
            if self._place > before:
                fruitless = 0
            elif step == 0:  # the end of a share says nothing of what is before it
                fruitless += 1
            share += 1
            step = 0

    def _share(self, share: int, first: int) -> Iterator[Callable[[], Read]]:
        mix = self._epoch.mix(share)
        if first >= mix.steps:
            return
        window = self._declared(share, first)
        held: dict[int, _HeldPiece] = {}
        for step in range(first, mix.steps):
            self._begun.append(StepPlace(share, step, self._place))
            if self._epoch.is_mixed:
                yield from self._mixed(window, mix, step, held)
            else:
                yield from self._in_order(window, mix, step)
        window.empty()

    def _declared(self, share: int, first: int) -> ShardWindow:
        """Declare the shards of a share from a step on; return the window to read them through."""
        shards = self._epoch.shards(StepPlace(share, first))
        later = None
        if self._epoch.has_share(share + 1):
            later = partial(_later_shards, self._epoch, share)
        return self._plans.declare(shards, later, in_file_order=not self._epoch.is_mixed)

    # One shard after another, also those that are still arriving

    def _in_order(self, window: ShardWindow, mix: Mix, step: int) -> Iterator[Callable[[], Read]]:
        shard = mix.pieces[step].shard
        is_fresh = not self._plans.is_shared
        leased = window.take(shard, None, (0, None), is_fresh=is_fresh)
        try:
            leased.open()
            window.ask(1)  # ahead, once nothing else is waited for
            yield from self._arriving(leased)
        except SHARD_ERRORS as exn:
            # Its traceback would keep the session of a reader that is gone.
            yield partial(_itself, exn.with_traceback(None))
        finally:
            window.give_back(leased)

    def _arriving(self, leased: LeasedShard) -> Iterator[Callable[[], Read]]:
        while True:
            try:
                for sample in leased.samples():
                    yield partial(_itself, sample)
                return
            except SampleError as exn:
                yield partial(_itself, exn.with_traceback(None))

    # Several at a time

    def _mixed(
        self,
        window: ShardWindow,
        mix: Mix,
        step: int,
        held: dict[int, _HeldPiece],
    ) -> Iterator[Callable[[], Read]]:
        inside = mix.pieces_at(step)
        missing = sum(piece not in held for piece in inside)
        for piece in inside:
            if piece not in held:
                window.ask(min(missing, MAX_AT_ONCE))
                missing -= 1
                is_fresh = step == piece and not self._plans.is_shared
                leased = window.take(mix.pieces[piece].shard, None, is_fresh=is_fresh)
                held[piece] = _held(leased, mix.pieces[piece])
            error = held[piece].error
            if error is not None:
                # In each of its steps, so that one has the same places for a reader that begins
                # with it.
                yield partial(_itself, error)
        window.ask(1)

        parts = [mix.part(piece, step, held[piece].numbers) for piece in inside]
        draws = [iter(part) for part in parts]
        for nth in mix.interleaved(step, [len(part) for part in parts]):
            number = next(draws[nth])
            yield partial(_cut, held[inside[nth]].cut, number)

        staying = mix.pieces_at(step + 1)
        leaving = [piece for piece in held if piece not in staying]
        for piece in leaving:
            window.give_back(held.pop(piece).leased_shard)


def _held(leased: LeasedShard, piece: Piece) -> _HeldPiece:
    try:
        leased.open()
        numbers = piece.numbers(len(leased.whole), permuted=True)
        # Four bytes per number, so that held pieces take hardly any memory, however wide the
        # window.
        return _HeldPiece(leased, array("I", numbers), leased.cutter())
    except SHARD_ERRORS as exn:
        return _HeldPiece(leased, (), _never, exn.with_traceback(None))


def _no_reads() -> Generator[Callable[[], Read]]:
    yield from ()


def _itself(read: Read) -> Read:
    return read


def _cut(cut: Callable[[int], Sample], number: int) -> Read:
    try:
        return cut(number)
    except (SampleError, *SHARD_ERRORS) as exn:
        return exn.with_traceback(None)


def _never(number: int) -> Sample:
    raise AssertionError(f"sample {number} of a shard that was not read")


def _later_shards(epoch: UncountedEpoch, share: int) -> Iterator[int]:
    return islice(epoch.shards_after(share), PLANNED)
