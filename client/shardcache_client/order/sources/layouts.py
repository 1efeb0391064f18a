"""The layout of an epoch of a mixture: the source of each place, and the samples of each. Pure.

- A place is the number of a sample in an epoch of all sources.
- A span is a range of consecutive places: those of one rank, or those that give an equal part to
  every global batch.
- A turn is one sample of a source, or one batch if each batch is of one source. A step is one batch
  of each span.
- A course is the order in which the mixture takes a source's samples; see `courses`.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardcache_client.order.sequences.lane_turns import Proportions, Rotated, Turns, Widened
from shardcache_client.order.sources.courses import MixPart

Grouping = Literal["mixed", "source", "rank-source"]
"""The sources of a batch.

"mixed": a batch has samples of several sources. "source": a batch has samples of one source, which
is the same on all ranks at each step. "rank-source": a batch has samples of one source, and ranks
may have different sources at the same step.
"""


@dataclass(frozen=True, slots=True)
class MixtureLayout:
    """The samples that an epoch of a mixture takes of each source, and the source of each place.

    Attributes:
        starts: number in each source's course at which the epoch begins.
        turns: the source of each place.
        places: number of places, each for a sample.
    """

    starts: tuple[int, ...]
    turns: Turns
    places: int

    @property
    def samples(self) -> tuple[int, ...]:
        """Number of samples of each source in the epoch."""
        if not self.places:
            return (0,) * len(self.starts)
        return tuple(self.turns.before(self.places))

    def ranges(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return start and stop, in each source's course, of its samples at some places.

        Args:
            begin: the first place.
            end: the place after the last.
        """
        before_begin = self.turns.before(begin)
        before_end = self.turns.before(end)
        return [
            (start + first, start + last)
            for start, first, last in zip(self.starts, before_begin, before_end, strict=True)
        ]

    def parts(self, part: MixPart) -> list[MixPart]:
        """Return each source's samples in a part of the epoch, as a part of a mix of its course.

        Args:
            part: the part. Its `begin` and `end` are the span of a reader, and `low` and `high` are
                places of this span.
        """
        of_span = self.ranges(part.begin, part.end)
        of_part = self.ranges(part.begin + part.low, part.begin + part.high)
        return [
            MixPart(begin, end, low=start - begin, high=stop - begin)
            for (begin, end), (start, stop) in zip(of_span, of_part, strict=True)
        ]


class SourceBatches(NamedTuple):
    """The form of batches of one source each.

    With 2 spans and a size of 4, a step is 8 places: the next 4 of each span. A turn is 8 samples
    of a source if the spans are alike, and 4 samples if not.

    Attributes:
        spans: number of spans of an epoch; a step takes the next places of each span.
        size: number of places that a step takes of each span.
        alike: True if all spans take the same source at a step.
    """

    spans: int
    size: int
    alike: bool

    def steps(self, samples: int, *, drop: bool) -> int:
        """Return the number of steps in an epoch of `samples` samples.

        Args:
            samples: number of samples of the epoch.
            drop: True to leave out the last step unless it is whole; False to count it.
        """
        step_samples = self.spans * self.size
        if drop:
            return samples // step_samples
        return -(-samples // step_samples)

    @property
    def samples_per_turn(self) -> int:
        """Number of samples that a source gives in a turn."""
        return self.size * self.spans if self.alike else self.size


def layout_of(
    starts: tuple[int, ...], samples: tuple[int, ...], form: SourceBatches | None
) -> MixtureLayout:
    """Return the layout of an epoch.

    Args:
        starts: number in each source's course at which the epoch begins.
        samples: number of samples that the epoch takes of each source.
        form: form of the epoch's batches; None if each has samples of several sources.
    """
    places = sum(samples)
    if form is None:
        return MixtureLayout(starts, Proportions(samples), places)
    turns = Proportions(tuple(each // form.samples_per_turn for each in samples))
    if form.alike:
        # These are the turns of one span. The places of the next span follow, and beyond the end
        # of their sequence the same turns come again: so all spans have the same turns.
        return MixtureLayout(starts, Widened(turns, form.size), places)
    # A span takes one turn per step, so it has as many turns as the epoch has steps. Each span is
    # rotated to begin with another turn: so the spans mostly have different sources at a step.
    steps = places // (form.spans * form.size)
    return MixtureLayout(starts, Widened(Rotated(turns, steps), form.size), places)
