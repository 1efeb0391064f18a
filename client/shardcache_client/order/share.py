"""What one reader reads of an epoch: stretches of mixes, from a beat to a beat. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardcache_client.order.mix import Mix
from shardcache_client.order.state import Place


@dataclass(frozen=True, slots=True)
class Leg:
    """A mix, or some of its beats.

    Attributes:
        first: beat in which reading begins, and how many of that beat's samples were read before.
        last: beat in which it ends, and how many of that beat's samples are read; None to read the mix to its end.
        span: the same as places of the mix's order, where that is known.
    """

    mix: Mix
    first: tuple[int, int] = (0, 0)
    last: tuple[int, int] | None = None
    span: tuple[int, int] = (0, 0)

    @classmethod
    def between(cls, mix: Mix, start: int, stop: int) -> Leg:
        """Build to read a mix of counted pieces from one place of its order to another, which comes later."""
        first = mix.find(start) if start else (0, 0)
        if stop == len(mix):
            return cls(mix, first, None, (start, stop))
        beat, nth = mix.find(stop - 1)
        return cls(mix, first, (beat, nth + 1), (start, stop))

    @property
    def samples(self) -> int:
        """How many they are, where that is known."""
        return self.span[1] - self.span[0]

    def after(self, passed: int) -> Leg:
        """Return what is left when so many samples were read, fewer than all."""
        return Leg.between(self.mix, self.span[0] + passed, self.span[1]) if passed else self

    def beats(self) -> Iterator[tuple[int, int, int | None]]:
        """Yield each beat, with the part of its samples that is read: from which, up to which (None: to the end)."""
        begin, skipped = self.first
        end, stop = (self.mix.beats - 1, None) if self.last is None else self.last
        for beat in range(begin, end + 1):
            yield beat, skipped if beat == begin else 0, stop if beat == end else None

    @property
    def pieces(self) -> range:
        """The pieces that are read from, in the order in which they enter."""
        begin, end = self.first[0], self.mix.beats - 1 if self.last is None else self.last[0]
        if begin > end:
            return range(0)
        return range(self.mix.in_hand(begin).start, self.mix.in_hand(end).stop)

    def shards(self) -> list[int]:
        """Return the number in the manifest of each of these."""
        return [self.mix.pieces[piece].shard for piece in self.pieces]


@dataclass(frozen=True, slots=True)
class Share:
    """What one reader reads in one go.

    Attributes:
        legs: one after another.
        samples: how many they are together, bad ones included; None where they are not counted.
    """

    legs: tuple[Leg, ...]
    samples: int | None

    def shards(self) -> list[int]:
        """Return the shards by their numbers in the manifest, in the order in which the reader comes to them."""
        return [shard for leg in self.legs for shard in leg.shards()]

    def behind(self, place: Place) -> Share:
        """Return what comes after a place that a reader had reached in this share."""
        if self.samples is None:
            return Share(tuple(Leg(leg.mix, (place.beat, place.nth), leg.last) for leg in self.legs), None)
        legs, passed = [], place.taken
        for leg in self.legs:
            if passed < leg.samples:
                legs.append(leg.after(passed))
            passed = max(0, passed - leg.samples)
        return Share(tuple(legs), max(0, self.samples - place.taken))
