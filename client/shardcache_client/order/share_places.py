"""The places of the parts of a reader's share: their samples, and the shards that they need. Pure.

- A share is everything that one reader reads of an epoch: parts of sequences that are called
  lanes. There is a class of places here for each kind of part in `lanes`.
- A place is the number of a sample in a part, from 0.
- A visit is a range of places during which a reader needs a shard; `rank_epoch` has an example.

`rank_epoch` puts the parts of a share together.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from shardcache_client.order.sequences.lanes import Chained, Interleaved, Part, Strided
from shardcache_client.order.sequences.mixes import Segment
from shardcache_client.order.sequences.scatter import Scattered

# Number of steps of a mix whose samples are kept: the step being read, and the next step, into
# which a batch may reach.
_KEPT_STEPS = 2

SampleId: TypeAlias = tuple[int, int]
"""The number of a sample's shard in the manifest, and the sample's own number in the shard.

This is a plain tuple, since one is made for each sample of an epoch, and a named tuple costs ten
times as much.
"""


class FileRun(NamedTuple):
    """Samples of one shard that are at consecutive places, in file order.

    Attributes:
        shard: number of the shard in the manifest.
        first: number in the shard of the first sample.
        end: number in the shard after the last sample.
    """

    shard: int
    first: int
    end: int


class Visit(NamedTuple):
    """A range of places, `first` to `end`, for which a reader holds a shard.

    Attributes:
        first: number of the first place.
        end: number of the place after the last.
        shard: number of the shard in the manifest.
        is_whole: True if the range has all samples of the shard that belong to the dataset.
    """

    first: int
    end: int
    shard: int
    is_whole: bool = False


class Places(ABC):
    """The places of one part of a share, counted from the beginning of the part.

    Attributes:
        samples: number of places, each of which has one sample.
    """

    samples: int

    @abstractmethod
    def between(self, start: int, stop: int) -> Iterator[SampleId]:
        """Yield the samples at the places from `start` to `stop`."""

    @abstractmethod
    def visits(self, start: int) -> Iterator[Visit]:
        """Yield the visits that end after the place `start`, in the order in which they begin."""


def places_of(part: Part, counts: Sequence[int]) -> Places:
    """Return the places of a part of a share, given the number of samples of each shard."""
    if isinstance(part, Segment):
        return MixedPlaces(part, counts)
    if isinstance(part, Chained):
        return ChainedPlaces([places_of(each, counts) for each in part.parts()])
    if isinstance(part, Strided):
        return _StridedPlaces(part, places_of(part.passing(), counts))
    if isinstance(part, Scattered):
        return _PermutedPlaces(part)
    assert isinstance(part, Interleaved)
    lanes = {lane: places_of(each, counts) for lane, each in part.parts().items()}
    return _InterleavedPlaces(part, lanes)


@dataclass(frozen=True, slots=True)
class _Step:
    """The samples of a step of a mix; see `mixes`.

    Attributes:
        first: place of the first sample in the mix.
        samples: the samples, in order.
    """

    first: int
    samples: Sequence[SampleId]


class MixedPlaces(Places):
    """Places of a segment: a range of a mix.

    Args:
        segment: the segment.
        counts: number of samples of each shard.
    """

    def __init__(self, segment: Segment, counts: Sequence[int]) -> None:
        self.samples = segment.samples
        self._mix = segment.mix
        self._pieces = segment.pieces
        self._begin = segment.start
        self._counts = counts
        self._steps: OrderedDict[int, _Step] = OrderedDict()  # by number of the step
        # Numbers in the tar of the samples of each piece in the latest step, by the piece's number.
        self._numbers: dict[int, Sequence[int]] = {}

    def between(self, start: int, stop: int) -> Iterator[SampleId]:
        """Yield the samples at the places from `start` to `stop`; see `Places`."""
        at = self._begin + start
        end = self._begin + stop
        number = self._step_of(at)
        while at < end:
            step = self._step(number)
            # The last step may be cut, and the first one begins before `at` if `start` is in it.
            samples = step.samples[at - step.first : end - step.first]
            yield from samples
            at += len(samples)
            number += 1

    def runs(self, start: int, stop: int) -> Iterator[FileRun]:
        """Yield the samples at the places from `start` to `stop` as runs in file order."""
        at = self._begin + start
        end = self._begin + stop
        # In file order, step n has exactly the samples of piece n: so the piece is found as a step.
        number, skipped = self._mix.find(at)
        while at < end:
            piece = self._mix.pieces[number]
            first = piece.start + skipped
            count = min(piece.samples - skipped, end - at)
            if count:
                yield FileRun(piece.shard, first, first + count)
            at += count
            number += 1
            skipped = 0

    def _step_of(self, place: int) -> int:
        """Return the number of the step that has a place of the mix."""
        # Most places are in a step that is kept, for which no search is needed.
        for number, step in self._steps.items():
            if step.first <= place < step.first + len(step.samples):
                return number
        number, _ = self._mix.find(place)
        return number

    def _step(self, number: int) -> _Step:
        """Return a step, which is computed unless it is kept."""
        kept = self._steps.get(number)
        if kept is not None:
            return kept

        step = self._new_step(number)
        self._steps[number] = step
        while len(self._steps) > _KEPT_STEPS:
            self._steps.popitem(last=False)
        return step

    def _new_step(self, number: int) -> _Step:
        """Compute a step: the part of each piece in it, interleaved."""
        mix = self._mix
        pieces = mix.pieces_at(number)
        # Sample numbers are kept for the pieces in this step, and dropped for all other pieces.
        self._numbers = {piece: self._numbers_of(piece) for piece in pieces}
        shards = [mix.pieces[piece].shard for piece in pieces]
        parts = [mix.part(piece, number, self._numbers[piece]) for piece in pieces]
        next_of_part = [iter(part) for part in parts]
        order = mix.interleaved(number, [len(part) for part in parts])
        samples = [(shards[nth], next(next_of_part[nth])) for nth in order]
        return _Step(mix.samples_before(number), samples)

    def _numbers_of(self, piece_number: int) -> Sequence[int]:
        """Return the numbers in the tar of a piece's samples, in order."""
        kept = self._numbers.get(piece_number)
        if kept is not None:
            return kept
        piece = self._mix.pieces[piece_number]
        return piece.numbers(self._counts[piece.shard], permuted=self._mix.window > 0)

    def visits(self, start: int) -> Iterator[Visit]:
        """Yield the visits that end after the place `start`; see `Places`."""
        step, _ = self._mix.find(self._begin + start)
        pieces = range(self._mix.pieces_at(step).start, self._pieces.stop)
        shards = self._mix.pieces.shards(pieces.start, pieces.stop)
        for piece, shard in zip(pieces, shards, strict=True):
            first = max(0, self._mix.enters(piece) - self._begin)
            end = min(self.samples, self._mix.leaves(piece) - self._begin)
            # If `start` is the end of the part, no visit ends after it.
            if max(first, start) < end:
                yield Visit(first, end, shard, self._is_whole(piece))

    def _is_whole(self, piece_number: int) -> bool:
        """Return True if these places have all samples of a piece's shard."""
        if self._mix.enters(piece_number) < self._begin:
            return False
        if self._mix.leaves(piece_number) > self._begin + self.samples:
            return False

        last = len(self._mix.pieces) - 1
        if 0 < piece_number < last:
            return True  # only the first and the last piece of a mix may be parts of shards
        piece = self._mix.pieces[piece_number]
        return piece.start == 0 and piece.stop == self._counts[piece.shard]


class ChainedPlaces(Places):
    """Places of parts that follow each other."""

    def __init__(self, parts: Sequence[Places]) -> None:
        self.parts = parts
        ends = list(accumulate(part.samples for part in parts))
        self._starts = [end - part.samples for part, end in zip(parts, ends, strict=True)]
        self.samples = ends[-1] if ends else 0

    def within(self, start: int, stop: int) -> Iterator[tuple[Places, int, int]]:
        """Yield each part that has places from `start` to `stop`, with start and stop in the part.

        Parts without such places are left out.
        """
        for part, begin in zip(self.parts, self._starts, strict=True):
            first = max(start - begin, 0)
            last = min(stop - begin, part.samples)
            if first < last:
                yield part, first, last

    def between(self, start: int, stop: int) -> Iterator[SampleId]:
        """Yield the samples at the places from `start` to `stop`; see `Places`."""
        for part, first, last in self.within(start, stop):
            yield from part.between(first, last)

    def visits(self, start: int) -> Iterator[Visit]:
        """Yield the visits that end after the place `start`; see `Places`."""
        for part, begin in zip(self.parts, self._starts, strict=True):
            skipped = max(start - begin, 0)
            if skipped >= part.samples:
                continue
            for visit in part.visits(skipped):
                # A visit that began before `start` is cut, and then lacks samples of the shard.
                is_whole = visit.is_whole and visit.first >= skipped
                first = max(visit.first, skipped)
                yield Visit(first + begin, visit.end + begin, visit.shard, is_whole)


class _InterleavedPlaces(Places):
    """Places of lanes that take turns: each place is given to the next sample of one lane.

    Args:
        part: the part of all lanes together; see `Interleaved`.
        lanes: the places of each lane's own part, by number of the lane.
    """

    def __init__(self, part: Interleaved, lanes: dict[int, Places]) -> None:
        self.samples = part.samples
        self._turns = part.turns
        self._begin = part.start
        # Number of samples of each lane before the first of these places.
        self._before = part.turns.before(part.start)
        self._lanes = lanes  # by number of the lane

    def between(self, start: int, stop: int) -> Iterator[SampleId]:
        """Yield the samples at the places from `start` to `stop`; see `Places`."""
        lane_starts = self._lane_places(start)
        lane_stops = self._lane_places(stop)
        samples = {}
        for lane, places in self._lanes.items():
            samples[lane] = places.between(lane_starts[lane], lane_stops[lane])
        for place in range(self._begin + start, self._begin + stop):
            lane = self._turns.lane(place)
            yield next(samples[lane])

    def _lane_places(self, place: int) -> list[int]:
        """Return each lane's own place that comes next at a place of all lanes together."""
        taken = self._turns.before(self._begin + place)
        return [count - before for count, before in zip(taken, self._before, strict=True)]

    def visits(self, start: int) -> Iterator[Visit]:
        """Yield the visits that end after the place `start`; see `Places`."""
        lane_starts = self._lane_places(start)
        lanes = (self._visits_of(lane, lane_starts[lane]) for lane in self._lanes)
        return merge(*lanes, key=attrgetter("first"))

    def _visits_of(self, lane: int, lane_start: int) -> Iterator[Visit]:
        """Yield a lane's visits that end after its own place `lane_start`.

        The visits are ranges of the places of all lanes together.
        """
        places = self._lanes[lane]
        if lane_start == places.samples:
            return  # the lane has no samples left
        for visit in places.visits(lane_start):
            first = self._place(lane, visit.first)
            last = self._place(lane, visit.end - 1)
            yield Visit(first, last + 1, visit.shard, visit.is_whole)

    def _place(self, lane: int, number: int) -> int:
        """Return the place, among those of all lanes together, of a lane's place `number`."""
        return self._turns.place(lane, self._before[lane] + number) - self._begin


class _PermutedPlaces(Places):
    """Places of a permutation of all samples: a reader reads each by itself and holds no shard."""

    def __init__(self, part: Scattered) -> None:
        self.samples = part.samples
        self._part = part

    def between(self, start: int, stop: int) -> Iterator[SampleId]:
        """Yield the samples at the places from `start` to `stop`; see `Places`."""
        return self._part.samples_between(start, stop)

    def visits(self, start: int) -> Iterator[Visit]:
        """Return an iterator without any visits, as no shard is held; see `Places`."""
        return iter(())


class _StridedPlaces(Places):
    """Places of a lane at regular distances; see `Strided`.

    Args:
        part: the places, which come in rows of `part.width`.
        passing: all places of the lane from the first of `part` to the last.
    """

    def __init__(self, part: Strided, passing: Places) -> None:
        self.samples = part.samples
        self._part = part
        self._passing = passing

    def between(self, start: int, stop: int) -> Iterator[SampleId]:
        """Yield the samples at the places from `start` to `stop`; see `Places`."""
        width = self._part.width
        while start < stop:
            # The places of a row are next to each other in the lane, too. The first row may be cut.
            left_in_row = width - (self._part.start + start) % width
            size = min(stop - start, left_in_row)
            first = self._part.passed_before(start)
            yield from self._passing.between(first, first + size)
            start += size

    def visits(self, start: int) -> Iterator[Visit]:
        """Yield the visits that end after the place `start`; see `Places`."""
        for visit in self._passing.visits(self._part.passed_before(start)):
            first = self._part.reached_by(visit.first)
            end = self._part.reached_by(visit.end)
            # A shard whose samples all lie between the rows is not needed.
            if max(first, start) < end:
                yield Visit(first, end, visit.shard)
