"""The samples that a reader has ready for batches by length; see `by_length`.

A place is a sample's position in the reader's order of samples. If a reader has fewer samples than
the number of batches that all ranks make, it repeats its shortest sample; samples are therefore
kept, or read again after a resume, until they cannot be repeated any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardcache.shared.exceptions import ConfigError
from shardcache_client.stages.stage import Mark


@dataclass(slots=True)
class SampleBuffer:
    """Consecutive samples of one reader.

    Attributes:
        number: number of buffers before this buffer.
        first: first place from which samples are read for this buffer.
        place_to_repeat: place of a sample, given earlier, that is repeated if this buffer gets no
            sample; None if there is no earlier sample.
        samples: the samples, with None in place of each sample that has been given.
        lengths: number of tokens of each sample.
        places: place of each sample in the epoch.
        refused: number of samples that were too long to be added.
    """

    number: int
    first: int
    place_to_repeat: int | None = None
    samples: list[Any] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    refused: int = 0
    # Number of the last among the shortest samples: `batches_of` repeats this sample.
    _shortest: int = 0
    # Bit n is set once the sample at place `first + n` has been given or refused.
    _passed: int = 0

    def add(self, sample: Any, length: int, place: int) -> None:
        """Append a sample."""
        self.samples.append(sample)
        self.lengths.append(length)
        self.places.append(place)
        if length <= self.lengths[self._shortest]:
            self._shortest = len(self.lengths) - 1

    def refuse(self, place: int) -> None:
        """Note that the sample at this place is too long."""
        self.refused += 1
        self._mark_passed(place)

    def borrow(self, previous: SampleBuffer | None) -> None:
        """Take over the shortest sample of the previous buffer, to be repeated.

        Raises ConfigError without a previous buffer.
        """
        if previous is None:
            raise ConfigError(
                "this reader has no sample for a batch, but the same worker of another rank does",
                remedy="use fewer workers or ranks, so that each has at least one sample; "
                "or begin the next epoch",
            )
        self.add(*previous.shortest_sample)

    def take(self, numbers: Sequence[int]) -> list[Any]:
        """Return samples by number, and drop them unless they may be repeated."""
        taken = [self.samples[number] for number in numbers]
        for number in numbers:
            self._mark_passed(self.places[number])
            if number != self._shortest:
                self.samples[number] = None
        return taken

    @property
    def shortest_sample(self) -> tuple[Any, int, int]:
        """The sample that is repeated, with its length and place."""
        shortest = self._shortest
        return self.samples[shortest], self.lengths[shortest], self.places[shortest]

    @property
    def shortest_place(self) -> int | None:
        """Place of the sample that is repeated: of this buffer, or else `place_to_repeat`."""
        if self.places:
            return self.places[self._shortest]
        return self.place_to_repeat

    @property
    def gone(self) -> int:
        """Number of samples that were given or refused."""
        return self._passed.bit_count()

    def _mark_passed(self, place: int) -> None:
        """Note that the sample at a place was given or refused."""
        # A borrowed sample has a place before the first, and was counted by its own buffer.
        if place >= self.first:
            self._passed |= 1 << (place - self.first)

    def mark(self, given: int) -> Mark:
        """Return the mark (position) of a reader that has given `given` batches of this buffer."""
        passed = self._passed
        if given == 0:
            # A reader that resumes reads the whole group. Samples that were refused are refused
            # again.
            passed = 0
        has_own_samples = bool(self.places) and self.places[-1] >= self.first
        if has_own_samples or self.place_to_repeat is None:
            return Mark(self.first, self.number, given, passed)
        # This buffer may get no sample of its own. A reader that resumes must then read the sample
        # to repeat again. So the mark begins at that sample's place, with bits for all places from
        # there to this buffer's first place, whose samples were given.
        again = self.first - self.place_to_repeat
        all_before = (1 << again) - 1
        beyond = (passed << again) | all_before
        return Mark(self.place_to_repeat, self.number, given, beyond, again)
