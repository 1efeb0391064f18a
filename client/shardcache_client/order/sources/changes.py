"""Changes of a mixture between two batches, and the sample at which each source goes on. Pure.

A user changes a mixture by loading a state into a mixture with other sources or weights:
`position.mixture_change` then makes a `Change`, which later states contain.

A change ends an epoch in its middle, or comes between two epochs. An epoch that ends in its middle
is a section. The samples of each source that a section leaves unread follow from the layout of the
epoch and from how far the ranks had come; they do not depend on the mixture after the change. So a
change is stored as a few numbers, from which the course of each source is computed. A course is the
order in which the mixture takes a source's samples; `courses` has an example.
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
    left_by_batches,
    left_by_ranks,
)
from shardcache_client.order.sources.layouts import MixtureLayout, SourceBatches, layout_of


class KnownSource(NamedTuple):
    """A source that a mixture has or had.

    Attributes:
        name: name of the source.
        identity: 8 hexadecimal digits that identify the source's samples and their order; "" if
            they come from a state of an earlier release.
        start: number of the source's samples that were taken before the epoch, or before the change
            if this is part of a `Change`.
    """

    name: str
    identity: str
    start: int


class EpochSource(NamedTuple):
    """A source in an epoch of a mixture.

    Attributes:
        name: name of the source.
        start: number of the source's samples that were taken before the epoch.
        samples: number of the source's samples in the epoch.
    """

    name: str
    start: int
    samples: int

    @property
    def stop(self) -> int:
        """Number of the source's samples in all epochs up to the end of this one."""
        return self.start + self.samples


@dataclass(frozen=True, slots=True)
class Section:
    """An epoch that was not read to its end.

    It may itself be the rest of an epoch that an earlier change had cut short.

    Attributes:
        sources: the sources of which the epoch takes samples, in the order of the mixture.
        form: form of the epoch's batches; None if they mix several sources.
        phases: divisions of the epoch among ranks and how far the ranks came, in order.
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
        """Return the parts of the epoch that are left unread.

        Args:
            batches: the form of global batches; None if there are none.
        """
        places = self.layout.places
        if batches is None:
            return left_by_ranks(places, self.phases)
        taken_batches = 0
        for phase in self.phases:
            # Ranks take equally many samples of each global batch, so rank 0 stands for all.
            taken_samples = phase.partition.world_size * phase.taken[0]
            taken_batches += taken_samples // batches.size
        return left_by_batches(places, taken_batches, batches)

    def continue_courses(
        self, courses: Mapping[str, Course], batches: GlobalBatches | None
    ) -> dict[str, Course]:
        """Return the courses of all sources after the epoch, by name of the source.

        Args:
            courses: the courses before the epoch, by source. A source that is missing has its
                sequence as its course.
            batches: the form of global batches; None if there are none.
        """
        layout = self.layout
        # For each unread part of the epoch: its samples of each source.
        unread_parts = [layout.parts(part) for part in self.unread_parts(batches)]
        changed = dict(courses)
        for number, source in enumerate(self.sources):
            left = [parts[number] for parts in unread_parts if parts[number].samples]
            course = courses.get(source.name, Course())
            changed[source.name] = course.after(source.stop, left)
        return changed


@lru_cache(maxsize=4)
def courses_after(
    sections: tuple[Section, ...], batches: GlobalBatches | None
) -> Mapping[str, Course]:
    """Return the courses of the sources of some sections, by name, after these sections.

    Any other source has its sequence as its course.

    Args:
        sections: the sections, in order.
        batches: the form of global batches; None if there are none.
    """
    courses: dict[str, Course] = {}
    for section in sections:
        courses = section.continue_courses(courses, batches)
    return courses


def unread(sections: Sequence[Section], starts: Mapping[str, int]) -> tuple[Section, ...]:
    """Return the sections that still determine which samples of the sources come next.

    Args:
        sections: the sections, in order.
        starts: number of samples that were taken of each source, by name; 0 for other sources.
    """
    kept: list[Section] = []
    needed_from = dict(starts)  # by source: number of the first sample whose course is needed
    for section in reversed(sections):
        # A section changes a course only up to where the section would have ended. The course of
        # its samples depends on earlier sections in turn, from where this section began.
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
        epoch: the first epoch of the mixture as it is after the change. It is the epoch that was
            being read, or the next if that was read to its end.
        samples: number of samples that were left of `epoch`; None if it was not begun.
        sources: all sources that were read so far, each with the number of its samples that were
            taken before the change.
        sections: the sections of which some samples are left.
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
        sources: the sources, in the order of the mixture.
        samples: number of samples of each source in the epoch.
        form: form of the epoch's batches; None if they mix several sources.
        total: number of samples wanted in the epoch. Whole batches of one source may add up to a
            few more or fewer.
        change: the latest change of the mixture; None if it is as it began.
    """

    sources: tuple[KnownSource, ...]
    samples: tuple[int, ...]
    form: SourceBatches | None
    total: int
    change: Change | None = None

    @property
    def epoch_sources(self) -> dict[str, EpochSource]:
        """The sources in the epoch, by name."""
        return {
            source.name: EpochSource(source.name, source.start, samples)
            for source, samples in zip(self.sources, self.samples, strict=True)
        }

    def change_at_end(self, epoch: int) -> Change:
        """Return a change of the mixture after an epoch that was read to its end."""
        epoch_sources = self.epoch_sources
        ended = [source._replace(start=epoch_sources[source.name].stop) for source in self.sources]
        # The next epoch was not begun, so it has no number of samples left.
        return self._change(epoch + 1, samples=None, sources=ended, sections=self._sections)

    def change_within(
        self, epoch: int, phases: Sequence[Phase], batches: GlobalBatches | None
    ) -> Change:
        """Return a change of the mixture in an epoch of which some phases have been read.

        Args:
            epoch: number of the epoch.
            phases: phases that have been read; empty if the epoch was not begun.
            batches: the form of global batches; None if there are none.
        """
        if not phases:
            return self._change(
                epoch, samples=self.total, sources=self.sources, sections=self._sections
            )
        section = self._section(phases)
        sections = (*self._sections, section)
        courses = courses_after(sections, batches)
        starts = {source.name: courses[source.name].start for source in section.sources}
        sources = [
            source._replace(start=starts.get(source.name, source.start)) for source in self.sources
        ]
        left = sum(part.samples for part in section.unread_parts(batches))
        taken = section.layout.places - left
        # By rounding to whole batches, more samples may have been taken than were wanted.
        wanted = max(0, self.total - taken)
        return self._change(epoch, samples=wanted, sources=sources, sections=sections)

    @property
    def _sections(self) -> tuple[Section, ...]:
        """The sections of earlier changes of which some samples are left."""
        return () if self.change is None else self.change.sections

    def _section(self, phases: Sequence[Phase]) -> Section:
        """Return this epoch as a section of which some phases have been read."""
        sources = tuple(source for source in self.epoch_sources.values() if source.samples)
        return Section(sources, self.form, tuple(phases))

    def _change(
        self,
        epoch: int,
        *,
        samples: int | None,
        sources: Iterable[KnownSource],
        sections: tuple[Section, ...],
    ) -> Change:
        """Return a change, without the sections of which nothing is left.

        Args:
            epoch: see `Change`.
            samples: see `Change`.
            sources: the sources of the epoch; those of earlier changes are added.
            sections: see `Change`.
        """
        known: dict[str, KnownSource] = {}
        if self.change is not None:
            known |= self.change.known
        known |= {source.name: source for source in sources}
        starts = {name: source.start for name, source in known.items()}
        return Change(epoch, samples, tuple(known.values()), unread(sections, starts))
