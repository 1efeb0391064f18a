"""The progress of an epoch, in a few numbers, and the division of the rest. Pure.

The readers of a job read an epoch in parallel, each one its own span. When the job resumes with other ranks or workers,
the rests of the spans are concatenated and cut again. So a phase of an epoch is fully described by how it was cut and
how far each reader came; an epoch may have any number of phases.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardcache_client.order.partition import Partition


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of an epoch read by the same readers.

    Attributes:
        cut: division of the samples that were left at its start.
        taken: number of samples of its span that each reader has passed, by `rank * workers + worker`; one entry per
            worker if it is the same on each rank.
        beyond: per reader, samples after those that it has passed as well: bits, in hexadecimal, with bit n for the
            n-th sample. Empty if there are none.
    """

    cut: Partition
    taken: tuple[int, ...]
    beyond: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stretch:
    """Samples `start` to `stop` of one first-phase reader's span, in the order in which that reader reads it."""

    reader: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def what_is_left(samples: int, phases: Sequence[Phase], cut: Partition) -> Rest:
    """Return the rest of an epoch of `samples` samples after the finished phases, to be cut by `cut`."""
    rest = Rest(_spans(samples, phases[0].cut if phases else cut))
    for phase in phases:
        rest = Rest(_behind(rest, phase))
    return rest


def _spans(samples: int, cut: Partition) -> Iterator[Stretch]:
    for reader in range(cut.readers):
        start, stop = cut.own(samples, reader)
        yield Stretch(reader, 0, stop - start)


def _behind(rest: Rest, phase: Phase) -> Iterator[Stretch]:
    """Yield the samples that the readers of a phase have not reached, with those that would have been dropped."""
    for reader in range(phase.cut.readers):
        start, stop = phase.cut.own(len(rest), reader)
        taken = phase.taken[reader % len(phase.taken)]
        passed = int(phase.beyond[reader] or "0", 16) if phase.beyond else 0
        for begin, end in _gaps(start + taken, stop, passed):
            yield from rest.between(begin, end)


def _gaps(start: int, stop: int, passed: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of places from `start` to `stop` not passed yet; bit n of `passed` is place `start + n`."""
    while passed and start < stop:
        left = (passed & -passed).bit_length() - 1  # places before the next passed one
        yield start, min(start + left, stop)
        start, passed = start + left, passed >> left
        run = (~passed & (passed + 1)).bit_length() - 1
        start, passed = start + run, passed >> run
    yield start, stop


class Rest:
    """The rest of an epoch: stretches, concatenated."""

    def __init__(self, parts: Iterable[Stretch]) -> None:
        self._parts = [part for part in parts if len(part)]
        self._ends = list(accumulate(map(len, self._parts)))

    def __repr__(self) -> str:
        return f"Rest(samples={len(self)}, stretches={len(self._parts)})"

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def between(self, start: int, stop: int) -> Iterator[Stretch]:
        """Yield the stretches between two places."""
        while start < stop:
            at = bisect_right(self._ends, start)
            part, end = self._parts[at], min(self._ends[at], stop)
            first = self._ends[at] - len(part) - part.start
            yield Stretch(part.reader, start - first, end - first)
            start = end
