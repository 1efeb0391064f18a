"""How far an epoch has been read, in a few numbers, and what of it is left for whom. Pure.

The readers of a job go through the samples of an epoch side by side, each through a span of them. When the job goes on
with other ranks or workers, what is left of the spans is put end to end and cut anew. So a phase of an epoch, told by
how it was cut and how far each reader came, is all that has to be kept of it, and an epoch may have any number of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardcache_client.order.partition import Cut


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of an epoch during which the readers were the same.

    Attributes:
        cut: how the samples that were left then were cut.
        taken: how many samples of its span each reader has passed, by `rank * workers + worker`; as many as there are
            workers, where it was the same on each rank.
        beyond: by reader, which of the samples after those were passed as well: bits, in hexadecimal, with bit n for
            the n-th of them. Empty where there are none.
    """

    cut: Cut
    taken: tuple[int, ...]
    beyond: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stretch:
    """Samples `start` to `stop` of the order in which one reader of an epoch's first phase reads its span."""

    reader: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def what_is_left(samples: int, phases: Sequence[Phase], cut: Cut) -> Rest:
    """Return what is left of an epoch of so many samples after the phases that are over, to be cut by `cut`."""
    rest = Rest(_spans(samples, phases[0].cut if phases else cut))
    for phase in phases:
        rest = Rest(_behind(rest, phase))
    return rest


def first_span(samples: int, cut: Cut, reader: int) -> tuple[int, int]:
    """Return where in an epoch a reader's span begins and ends in the first phase, the padding left out."""
    start, stop = cut.span(samples, reader)
    return min(start, samples), min(stop, samples)


def _spans(samples: int, cut: Cut) -> Iterator[Stretch]:
    for reader in range(cut.readers):
        start, stop = first_span(samples, cut, reader)
        yield Stretch(reader, 0, stop - start)


def _behind(rest: Rest, phase: Phase) -> Iterator[Stretch]:
    """Yield what the readers of a phase have not come to, without the padding that they would have read."""
    for reader in range(phase.cut.readers):
        start, stop = phase.cut.span(len(rest), reader)
        taken = phase.taken[reader % len(phase.taken)]
        passed = int(phase.beyond[reader] or "0", 16) if phase.beyond else 0
        for begin, end in _gaps(start + taken, stop, passed):
            yield from rest.between(min(begin, len(rest)), min(end, len(rest)))


def _gaps(start: int, stop: int, passed: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of places from `start` to `stop` that are not passed; bit n of `passed` is place `start + n`."""
    while passed and start < stop:
        left = (passed & -passed).bit_length() - 1  # places before the next one that was passed
        yield start, min(start + left, stop)
        start, passed = start + left, passed >> left
        run = (~passed & (passed + 1)).bit_length() - 1
        start, passed = start + run, passed >> run
    yield start, stop


class Rest:
    """Stretches end to end."""

    def __init__(self, parts: Iterable[Stretch]) -> None:
        self._parts = [part for part in parts if len(part)]
        self._ends = list(accumulate(map(len, self._parts)))

    def __repr__(self) -> str:
        return f"Rest(samples={len(self)}, stretches={len(self._parts)})"

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def between(self, start: int, stop: int) -> Iterator[Stretch]:
        """Yield what lies between two places, as `Cut.span` gives them; behind the end it begins anew, as padding."""
        while start < stop and self._parts:
            begin = start % len(self)
            at = bisect_right(self._ends, begin)
            part, first = self._parts[at], self._ends[at] - len(self._parts[at])
            end = min(self._ends[at], begin + stop - start)
            yield Stretch(part.reader, part.start + begin - first, part.start + end - first)
            start += end - begin
