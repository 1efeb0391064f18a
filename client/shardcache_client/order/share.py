"""One reader's share of an epoch: ranges of beats in mixes, or of several mixes that take turns. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self, TypeAlias

from shardcache_client.order.mix import Mix
from shardcache_client.position.state import Place


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of beats in a mix.

    Attributes:
        first: beat in which reading begins, and number of that beat's samples to skip.
        last: beat in which it ends, and number of that beat's samples to read; None to read the mix to its end.
        span: the same range as places of the mix's order, if samples are counted.
    """

    mix: Mix
    first: tuple[int, int] = (0, 0)
    last: tuple[int, int] | None = None
    span: tuple[int, int] = (0, 0)

    @classmethod
    def between(cls, mix: Mix, start: int, stop: int) -> Segment:
        """Build the segment from one place of the order of a mix of counted pieces to a later one."""
        first = mix.find(start) if start else (0, 0)
        if stop == len(mix):
            return cls(mix, first, None, (start, stop))
        beat, nth = mix.find(stop - 1)
        return cls(mix, first, (beat, nth + 1), (start, stop))

    @property
    def samples(self) -> int:
        """Number of samples, if they are counted."""
        return self.span[1] - self.span[0]

    @property
    def mixed(self) -> bool:
        """True if the samples of several shards are mixed, or those of one permuted."""
        return self.mix.window > 0

    def after(self, passed: int) -> Segment:
        """Return the rest after `passed` samples, fewer than all."""
        return Segment.between(self.mix, self.span[0] + passed, self.span[1]) if passed else self

    def beats(self) -> Iterator[tuple[int, int, int | None]]:
        """Yield each beat with the range of its samples to read: (beat, start, stop), where stop None means the end."""
        begin, skipped = self.first
        end, stop = (self.mix.beats - 1, None) if self.last is None else self.last
        for beat in range(begin, end + 1):
            yield beat, skipped if beat == begin else 0, stop if beat == end else None

    @property
    def pieces(self) -> range:
        """Pieces that samples come from, in the order in which they enter."""
        begin, end = self.first[0], self.mix.beats - 1 if self.last is None else self.last[0]
        if begin > end:
            return range(0)
        return range(self.mix.pieces_at(begin).start, self.mix.pieces_at(end).stop)

    def shards(self) -> list[int]:
        """Return the shards of these pieces, by their numbers in the manifest."""
        return [self.mix.pieces[piece].shard for piece in self.pieces]

    def entries(self) -> Iterator[tuple[int, int]]:
        """Yield each shard with the number of samples before the first that needs it: (samples, shard), in order."""
        for piece in self.pieces:
            yield max(0, self.mix.enters(piece) - self.span[0]), self.mix.pieces[piece].shard


@dataclass(frozen=True, slots=True)
class Slice(ABC):
    """Consecutive places of a sequence of samples; the counterpart of a `Segment` for sequences that are no mix.

    Attributes:
        start, stop: number of the first place, and of the place after the last.
    """

    start: int
    stop: int

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.stop - self.start

    def after(self, passed: int) -> Self:
        """Return the rest after `passed` samples, fewer than all."""
        return replace(self, start=self.start + passed)

    @property
    @abstractmethod
    def mixed(self) -> bool:
        """True if samples of several shards are mixed, or those of one permuted."""

    @abstractmethod
    def entries(self) -> Iterator[tuple[int, int]]:
        """Yield each shard with the number of samples before the first that needs it: (samples, shard), in order."""

    def shards(self) -> list[int]:
        """Return the shards by their numbers in the manifest, in the order in which they are needed."""
        return [shard for _, shard in self.entries()]


Part: TypeAlias = Segment | Slice


@dataclass(frozen=True, slots=True)
class Share:
    """A contiguous assignment for one reader.

    Attributes:
        segments: read one after another.
        samples: total number of samples, bad ones included; None if they are not counted.
    """

    segments: tuple[Part, ...]
    samples: int | None

    def shards(self) -> list[int]:
        """Return the shards by their numbers in the manifest, in reading order."""
        return [shard for segment in self.segments for shard in segment.shards()]

    def behind(self, place: Place) -> Share:
        """Return the rest of this share after a place that a reader has reached in it."""
        if self.samples is None:
            return Share(
                tuple(
                    Segment(segment.mix, (place.beat, place.nth), segment.last)
                    for segment in self.segments
                    if isinstance(segment, Segment)  # an interleaving is counted
                ),
                None,
            )
        segments, passed = [], place.taken
        for segment in self.segments:
            if passed < segment.samples:
                segments.append(segment.after(passed))
            passed = max(0, passed - segment.samples)
        return Share(tuple(segments), max(0, self.samples - place.taken))
