"""Changes of a mixture between two batches: where each source goes on. Pure.

A change ends an epoch in its middle, or comes between two epochs. The samples of each source that
are then left to read follow from the epoch's layout and from how far ranks had come, whatever the
mixture is from then on. So a change is a few numbers, and the course of each source is worked out
from them: see `courses`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from shardcache_client.order.sequences.partition import Phase
from shardcache_client.order.sources.courses import (
    Course,
    GlobalBatches,
    MixPart,
    MixtureLayout,
    SourceBatches,
    layout_of,
    left_by_batches,
    left_by_ranks,
)


class KnownSource(NamedTuple):
    """A source that a mixture has or had.

    Attributes:
        identity: 8 hexadecimal digits that tell its samples and their order.
        start: number of its samples that were taken before.
    """

    name: str
    identity: str
    start: int


class EpochSource(NamedTuple):
    """A source in an epoch of a mixture.

    Attributes:
        start: number of its samples that were taken before the epoch.
        samples: number of its samples in the epoch.
    """

    name: str
    start: int
    samples: int

    @property
    def stop(self) -> int:
        """Number of samples in all epochs up to this one."""
        return self.start + self.samples


@dataclass(frozen=True, slots=True)
class Section:
    """An epoch that was not read to its end, or the rest that an earlier change had left of one.

    Attributes:
        sources: those that it takes samples of, in the order of the mixture.
        form: of its batches; None if they are mixed.
        phases: how far ranks have come, one group of ranks after another.
    """

    sources: tuple[EpochSource, ...]
    form: SourceBatches | None
    phases: tuple[Phase, ...]

    @property
    def layout(self) -> MixtureLayout:
        """The layout of the epoch."""
        starts = tuple(source.start for source in self.sources)
        samples = tuple(source.samples for source in self.sources)
        return layout_of(starts, samples, self.form)

    def unread_parts(self, batches: GlobalBatches | None) -> list[MixPart]:
        """Return the parts that are left of the epoch.

        `batches` is the form of global ones, if there are any.
        """
        places = self.layout.places
        if batches is None:
            return left_by_ranks(places, self.phases)
        # Ranks take equally many samples of each global batch.
        taken = 0
        for phase in self.phases:
            taken_samples = phase.cut.world_size * phase.taken[0]
            taken += taken_samples // batches.size
        return left_by_batches(places, taken, batches)

    def courses_after(
        self, courses: Mapping[str, Course], batches: GlobalBatches | None
    ) -> dict[str, Course]:
        """Return the courses of all sources after the epoch, given those before it."""
        layout = self.layout
        parts_by_source = [layout.parts(span) for span in self.unread_parts(batches)]
        changed = dict(courses)
        for number, source in enumerate(self.sources):
            left = [parts[number] for parts in parts_by_source if parts[number].samples]
            course = courses.get(source.name, Course())
            changed[source.name] = course.after(source.stop, left)
        return changed


@lru_cache(maxsize=4)
def courses_after(
    sections: tuple[Section, ...], batches: GlobalBatches | None
) -> Mapping[str, Course]:
    """Return the courses of sources after some sections; those of others are their sequences."""
    courses: dict[str, Course] = {}
    for section in sections:
        courses = section.courses_after(courses, batches)
    return courses


def unread(sections: Sequence[Section], starts: Mapping[str, int]) -> tuple[Section, ...]:
    """Return the sections that still determine which samples come next in the courses of sources.

    Args:
        starts: number of samples that were taken of each source.
    """
    kept: list[Section] = []
    needed_from = dict(starts)  # by source: number of the first sample whose course is needed
    for section in reversed(sections):
        # A section changes a course only up to where the section would have ended.
        changed = [each for each in section.sources if needed_from.get(each.name, 0) < each.stop]
        for source in changed:
            needed_from[source.name] = min(needed_from.get(source.name, 0), source.start)
        if changed:
            kept.append(section)
    return tuple(reversed(kept))


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a mixture.

    Attributes:
        epoch: the first of the mixture as it is now: the one that was being read, or the next.
        samples: number of samples that were left of this epoch; None if it was not begun.
        sources: all that were read so far, with how many samples were taken before the change.
        sections: those of which something is left.
    """

    epoch: int
    samples: int | None
    sources: tuple[KnownSource, ...]
    sections: tuple[Section, ...] = ()

    @property
    def known(self) -> dict[str, KnownSource]:
        """The sources, by name."""
        return {source.name: source for source in self.sources}


@dataclass(frozen=True, slots=True)
class MixtureState:
    """The facts about a mixture in a state: each source, and its samples in the epoch.

    Attributes:
        sources: in the order of the mixture.
        samples: of each source in the epoch.
        form: of the epoch's batches; None if they are mixed.
        total: number of samples wanted in the epoch, which batches of one source exceed or miss.
        change: the latest of the mixture; None if it is as it began.
    """

    sources: tuple[KnownSource, ...]
    samples: tuple[int, ...]
    form: SourceBatches | None
    total: int
    change: Change | None = None

    @property
    def by_name(self) -> dict[str, tuple[int, int]]:
        """Start and number of samples of each source."""
        each = zip(self.sources, self.samples, strict=True)
        return {source.name: (source.start, samples) for source, samples in each}

    def changed_at_end(self, epoch: int) -> Change:
        """Return a change of the mixture after an epoch that was read to its end."""
        taken = zip(self.sources, self.samples, strict=True)
        ended = [source._replace(start=source.start + samples) for source, samples in taken]
        return self._change(epoch + 1, None, ended, self._sections)

    def changed(self, epoch: int, phases: Sequence[Phase], batches: GlobalBatches | None) -> Change:
        """Return a change of the mixture in an epoch of which some phases have been read.

        Args:
            batches: the form of global batches, if there are any.
        """
        if not phases:
            return self._change(epoch, self.total, self.sources, self._sections)
        section = self._section(phases)
        sections = (*self._sections, section)
        courses = courses_after(sections, batches)
        starts = {source.name: courses[source.name].start for source in section.sources}
        sources = [
            source._replace(start=starts.get(source.name, source.start)) for source in self.sources
        ]
        left = sum(part.samples for part in section.unread_parts(batches))
        taken = section.layout.places - left
        return self._change(epoch, max(0, self.total - taken), sources, sections)

    @property
    def _sections(self) -> tuple[Section, ...]:
        return () if self.change is None else self.change.sections

    def _section(self, phases: Sequence[Phase]) -> Section:
        """Return this epoch as a section of which some phases have been read."""
        each = zip(self.sources, self.samples, strict=True)
        sources = tuple(
            EpochSource(source.name, source.start, samples) for source, samples in each if samples
        )
        return Section(sources, self.form, tuple(phases))

    def _change(
        self,
        epoch: int,
        samples: int | None,
        sources: Iterable[KnownSource],
        sections: tuple[Section, ...],
    ) -> Change:
        """Return a change, without sections of which nothing is left."""
        known: dict[str, KnownSource] = {}
        if self.change is not None:
            known |= self.change.known
        known |= {source.name: source for source in sources}
        starts = {name: source.start for name, source in known.items()}
        return Change(epoch, samples, tuple(known.values()), unread(sections, starts))
