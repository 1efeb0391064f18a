"""One rank's epoch as numbered places: their samples, and the shards that they need. Pure.

A place is the number of a sample in what the rank reads of the epoch, from 0. The sample at a place
follows from the place's number alone, so any worker can make any batch without the batches before
it. `batches` asks for the samples of each batch, and for the visits to declare shards to the
daemon.

A visit is a range of places during which a reader needs a shard. With three shards of 4 samples,
mixed two at a time, the reader needs shard 0 for the places 0 to 5, shard 1 for 2 to 9 and shard 2
for 6 to 11.
"""

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import merge
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from shardcache_client.order.sequences.lanes import Chained, Interleaved, Part, Share, Strided
from shardcache_client.order.sequences.mixes import Segment
from shardcache_client.order.sequences.scatter import Scattered
from shardcache_client.order.shards.manifest import Manifest

# Number of steps of a mix whose samples are kept: the step being read, and the next step, into
# which a batch may reach.
_KEPT_STEPS = 2

# Number of shards of a selection whose chosen samples are kept: as many as windows usually have.
_MAX_KEPT_CHOICES = 64

_GOLDEN_SECTION = (math.sqrt(5) - 1) / 2

# Number of substitutes that are spread over the epoch. More would hardly ever be needed unless most
# of the samples are bad.
_SPREAD_SUBSTITUTES = 16


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


class RankEpoch:
    """The places of a rank's share of an epoch, or of the rest of an epoch.

    Args:
        share: the share, whose samples must be counted.
        manifest: the shards of the dataset.

    Attributes:
        is_in_file_order: True if the samples of each shard come one after another.
    """

    def __init__(self, share: Share, manifest: Manifest) -> None:
        self._manifest = manifest
        counts = manifest.counts or ()
        self._places = _ChainedPlaces([_places_of(part, counts) for part in share.segments])

        is_mixed = any(part.mixed for part in share.segments)
        self.is_in_file_order = manifest.choices is None and not is_mixed
        self._chosen_of: OrderedDict[int, Sequence[int] | None] = OrderedDict()  # by shard

    def __repr__(self) -> str:
        return f"RankEpoch(samples={len(self)})"

    def __len__(self) -> int:
        return self._places.samples

    def between(self, start: int, stop: int) -> list[SampleId]:
        """Return the samples at the places from `start` to `stop`, or to the end of the epoch."""
        return list(self.samples(start, stop))

    def samples(self, start: int, stop: int) -> Iterator[SampleId]:
        """Yield the samples at the places from `start` to `stop`, or to the end of the epoch."""
        samples = self._places.between(start, min(stop, len(self)))
        if self._manifest.choices is None:
            return samples
        return map(self._in_tar, samples)

    def runs(self, start: int, stop: int) -> Iterator[FileRun]:
        """Yield the samples at the places from `start` to `stop` as runs of neighbours in a shard.

        `has_runs` must be true.
        """
        for part, first, last in self._places.within(start, stop):
            assert isinstance(part, _MixedPlaces)
            yield from part.runs(first, last)

    @cached_property
    def has_runs(self) -> bool:
        """True if `runs` may be called: places are in file order, without lanes that take turns."""
        are_ranges = all(isinstance(part, _MixedPlaces) for part in self._places.parts)
        return self.is_in_file_order and are_ranges

    def visits(self, start: int = 0) -> Iterator[Visit]:
        """Return the visits that end after the place `start`, in the order in which they begin.

        The visits are made one by one as they are taken, since an epoch may be endless.
        """
        return self._places.visits(start)

    def _in_tar(self, sample: SampleId) -> SampleId:
        """Return a sample by its number in the tar, given its number among the chosen samples."""
        shard, number = sample
        chosen = self._chosen(shard)
        if chosen is None:
            return sample
        return shard, chosen[number]

    def _chosen(self, shard: int) -> Sequence[int] | None:
        """Return the numbers of a shard's chosen samples; None for all samples.

        The numbers are kept, since the samples of a shard are looked up one by one.
        """
        if self._manifest.choices is None:
            return None
        if shard not in self._chosen_of:
            if len(self._chosen_of) >= _MAX_KEPT_CHOICES:
                self._chosen_of.popitem(last=False)
            self._chosen_of[shard] = self._manifest.chosen(shard)
        return self._chosen_of[shard]


def substitutes(place: int, places: int, pass_places: int) -> Iterator[int]:
    """Yield places of an epoch as substitutes for a place whose sample cannot be read.

    The first 16 substitutes are the golden section of the epoch apart, so that they are spread
    evenly: for place 10 of 100, they begin with 72, 34, 96 and 58. Neighbours have neighbours as
    substitutes, so that the substitutes for a lost shard come from few shards. (This is Kronecker's
    sequence; see Knuth, The Art of Computer Programming, vol. 3, section 6.4.) Then come all
    places, one after another.

    Args:
        place: the place, from 0 to `places` - 1.
        places: number of places of the epoch.
        pass_places: number of consecutive places that hold every sample; see `Spare`.
    """
    step = max(1, round(places * _GOLDEN_SECTION))
    for nth in range(1, _SPREAD_SUBSTITUTES + 1):
        yield (place + nth * step) % places
    for nth in range(1, min(places, pass_places) + 1):
        yield (place + nth) % places


class _Places(ABC):
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


def _places_of(part: Part, counts: Sequence[int]) -> _Places:
    """Return the places of a part of a share, given the number of samples of each shard."""
    if isinstance(part, Segment):
        return _MixedPlaces(part, counts)
    if isinstance(part, Chained):
        return _ChainedPlaces([_places_of(each, counts) for each in part.parts()])
    if isinstance(part, Strided):
        return _StridedPlaces(part, _places_of(part.passing(), counts))
    if isinstance(part, Scattered):
        return _PermutedPlaces(part)
    assert isinstance(part, Interleaved)
    lanes = {lane: _places_of(each, counts) for lane, each in part.parts().items()}
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


class _MixedPlaces(_Places):
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
        """Yield the samples at the places from `start` to `stop`; see `_Places`."""
        at = self._begin + start
        end = self._begin + stop
        number = self._step_of(at)
        while at < end:
            step = self._step(number)
            samples = step.samples[at - step.first : end - step.first]
            yield from samples
            at += len(samples)
            number += 1

    def runs(self, start: int, stop: int) -> Iterator[FileRun]:
        """Yield the samples at the places from `start` to `stop` as runs in file order."""
        at = self._begin + start
        end = self._begin + stop
        # In file order, step n has exactly the samples of piece n.
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
        draws = [iter(part) for part in parts]
        order = mix.interleaved(number, [len(part) for part in parts])
        samples = [(shards[part], next(draws[part])) for part in order]
        return _Step(mix.enters(number), samples)

    def _numbers_of(self, number: int) -> Sequence[int]:
        """Return the numbers in the tar of a piece's samples, in order."""
        kept = self._numbers.get(number)
        if kept is not None:
            return kept
        piece = self._mix.pieces[number]
        return piece.numbers(self._counts[piece.shard], permuted=self._mix.window > 0)

    def visits(self, start: int) -> Iterator[Visit]:
        """Yield the visits that end after the place `start`; see `_Places`."""
        pieces = self._pieces
        step, _ = self._mix.find(self._begin + start)
        first_piece = self._mix.pieces_at(step).start
        shards = self._mix.pieces.shards(first_piece, pieces.stop)
        for piece, shard in zip(range(first_piece, pieces.stop), shards, strict=True):
            first = max(0, self._mix.enters(piece) - self._begin)
            end = min(self.samples, self._mix.leaves(piece) - self._begin)
            if max(first, start) < end:
                yield Visit(first, end, shard, self._is_whole(piece))

    def _is_whole(self, number: int) -> bool:
        """Return True if these places have all samples of a piece's shard."""
        if self._mix.enters(number) < self._begin:
            return False
        if self._mix.leaves(number) > self._begin + self.samples:
            return False

        last = len(self._mix.pieces) - 1
        if 0 < number < last:
            return True  # Only the first and the last piece may be parts of shards.
        piece = self._mix.pieces[number]
        return piece.start == 0 and piece.stop == self._counts[piece.shard]


class _ChainedPlaces(_Places):
    """Places of parts that follow each other."""

    def __init__(self, parts: Sequence[_Places]) -> None:
        self.parts = parts
        self._starts = [0, *accumulate(part.samples for part in parts)]
        self.samples = self._starts[-1]

    def within(self, start: int, stop: int) -> Iterator[tuple[_Places, int, int]]:
        """Yield each part that has places from `start` to `stop`, with start and stop in the part.

        Parts without such places are left out.
        """
        for part, begin in zip(self.parts, self._starts, strict=False):
            first = max(start - begin, 0)
            last = min(stop - begin, part.samples)
            if first < last:
                yield part, first, last

    def between(self, start: int, stop: int) -> Iterator[SampleId]:
        """Yield the samples at the places from `start` to `stop`; see `_Places`."""
        for part, first, last in self.within(start, stop):
            yield from part.between(first, last)

    def visits(self, start: int) -> Iterator[Visit]:
        """Yield the visits that end after the place `start`; see `_Places`."""
        for part, begin in zip(self.parts, self._starts, strict=False):
            skipped = min(max(start - begin, 0), part.samples)
            if skipped == part.samples:
                continue
            for visit in part.visits(skipped):
                is_whole = visit.is_whole and visit.first >= skipped
                first = max(visit.first, skipped)
                yield Visit(first + begin, visit.end + begin, visit.shard, is_whole)


class _InterleavedPlaces(_Places):
    """Places of lanes that take turns.

    Args:
        part: the places, of lanes that take turns.
        lanes: the places of each lane's own part, by number of the lane.
    """

    def __init__(self, part: Interleaved, lanes: dict[int, _Places]) -> None:
        self.samples = part.samples
        self._turns = part.turns
        self._begin = part.start
        # Number of turns of each lane before the first of these places.
        self._before = part.turns.before(part.start)
        self._lanes = lanes  # by number of the lane

    def between(self, start: int, stop: int) -> Iterator[SampleId]:
        """Yield the samples at the places from `start` to `stop`; see `_Places`."""
        firsts = self._taken(start)
        lasts = self._taken(stop)
        draws = {}
        for lane, places in self._lanes.items():
            draws[lane] = places.between(firsts[lane], lasts[lane])
        for place in range(self._begin + start, self._begin + stop):
            lane = self._turns.lane(place)
            yield next(draws[lane])

    def _taken(self, place: int) -> list[int]:
        """Return the number of turns that each lane has from the first place to before `place`."""
        turns = self._turns.before(self._begin + place)
        return [turn - before for turn, before in zip(turns, self._before, strict=True)]

    def visits(self, start: int) -> Iterator[Visit]:
        """Yield the visits that end after the place `start`; see `_Places`."""
        taken = self._taken(start)
        lanes = (self._visits_of(lane, taken[lane]) for lane in self._lanes)
        return merge(*lanes, key=attrgetter("first"))

    def _visits_of(self, lane: int, taken: int) -> Iterator[Visit]:
        """Yield a lane's visits that end after its first `taken` places.

        The visits are ranges of the places of all lanes together.
        """
        places = self._lanes[lane]
        if taken == places.samples:
            return
        for visit in places.visits(taken):
            first = self._place(lane, visit.first)
            last = self._place(lane, visit.end - 1)
            yield Visit(first, last + 1, visit.shard, visit.is_whole)

    def _place(self, lane: int, number: int) -> int:
        """Return the place, among those of all lanes together, of a lane's place `number`."""
        return self._turns.place(lane, self._before[lane] + number) - self._begin


class _PermutedPlaces(_Places):
    """Places of a permutation of all samples: a reader reads each by itself and holds no shard."""

    def __init__(self, part: Scattered) -> None:
        self.samples = part.samples
        self._part = part

    def between(self, start: int, stop: int) -> Iterator[SampleId]:
        """Yield the samples at the places from `start` to `stop`; see `_Places`."""
        return self._part.samples_between(start, stop)

    def visits(self, start: int) -> Iterator[Visit]:
        """Return an iterator without any visits, as no shard is held; see `_Places`."""
        return iter(())


class _StridedPlaces(_Places):
    """Places of a lane at regular distances; see `Strided`.

    Args:
        part: the places.
        passing: all places of the lane from the first of `part` to the last.
    """

    def __init__(self, part: Strided, passing: _Places) -> None:
        self.samples = part.samples
        self._part = part
        self._passing = passing

    def between(self, start: int, stop: int) -> Iterator[SampleId]:
        """Yield the samples at the places from `start` to `stop`; see `_Places`."""
        width = self._part.width
        while start < stop:
            left_in_row = width - (self._part.start + start) % width
            run = min(stop - start, left_in_row)
            first = self._part.passed_before(start)
            yield from self._passing.between(first, first + run)
            start += run

    def visits(self, start: int) -> Iterator[Visit]:
        """Yield the visits that end after the place `start`; see `_Places`."""
        for visit in self._passing.visits(self._part.passed_before(start)):
            first = self._part.reached_by(visit.first)
            end = self._part.reached_by(visit.end)
            if max(first, start) < end:
                yield Visit(first, end, visit.shard)
