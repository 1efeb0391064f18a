"""The epochs of a mixture: several sources read as one, in proportions that may change. Pure.

A source is one of the datasets of a mixture. Each source is an endless sequence of rounds, which
are passes over all of its shards, the same as if it were read by itself. An epoch takes the next
samples of each source, as many as the source's weight says. A source that is smaller than its part
comes again within the epoch. A larger source goes on in the next epoch where this one ends.

- A place is the number of a sample in an epoch of all sources. A span is the consecutive places
  that one rank reads, or that give an equal part to every global batch.
- A step is one batch of each span.
- A turn is the samples that a source gives before another source may follow: one sample if batches
  mix the sources; one batch if each batch is of one source; the batches of a whole step if these
  are all of the same source. The samples of a source beyond its last whole turn come first in the
  next epoch.

`MixtureOptions` has the options of a mixture and makes its `MixtureDeal`. `sources.quotas` says
how many turns each source has in an epoch, and `sources.courses` which of its samples come. A
change of a mixture's sources or weights in mid-epoch is in `sources.changes`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Self

from shardcache.shared.exceptions import ConfigError
from shardcache_client.order.dealing.deal import Deal, SpanDeal, Spare
from shardcache_client.order.dealing.deal_options import DealOptions, digest
from shardcache_client.order.sequences.lanes import Chained, Interleaved, Lane, Share
from shardcache_client.order.sequences.partition import Even
from shardcache_client.order.sequences.permutations import Shuffle, window_of
from shardcache_client.order.sequences.scatter import EndlessOrder, lane_of, order_of
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.order.sources.changes import (
    Change,
    KnownSource,
    MixtureState,
    courses_after,
    unread,
)
from shardcache_client.order.sources.courses import Course, GlobalBatches, MixPart
from shardcache_client.order.sources.layouts import (
    Grouping,
    MixtureLayout,
    SourceBatches,
    layout_of,
)
from shardcache_client.order.sources.quotas import NO_WEIGHTS, SourceQuotas, Weights, WeightSchedule
from shardcache_client.order.topology import Topology


@dataclass(frozen=True, slots=True)
class MixedSource:
    """A dataset as a source of a mixture, with all samples counted.

    Attributes:
        name: name of the source.
        manifest: the shards of the source.
        shuffle: None to read in the order of the shards.
        unit: description of samples that are not the tars' own; see `DealOptions`.
    """

    name: str
    manifest: Manifest
    shuffle: Shuffle | None = None
    unit: str = ""

    @property
    def identity(self) -> list[object]:
        """The facts about this source in which the states of a mixture must agree: a JSON value."""
        further = [each for each in (self.unit, self.manifest.selection) if each]
        return [
            self.name,
            self.manifest.objects,
            self.manifest.counts,
            repr(self.shuffle),
            *further,
        ]

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.manifest.samples or 0

    def reseeded(self, seeds: Mapping[str, int]) -> Self:
        """Return this source with another seed, if it is shuffled and `seeds` has its name.

        Args:
            seeds: the seeds by name of the source.
        """
        if self.shuffle is None or self.name not in seeds:
            return self
        return replace(self, shuffle=replace(self.shuffle, seed=seeds[self.name]))


def weights_of(weights: Weights | None, sources: Sequence[MixedSource]) -> WeightSchedule:
    """Return the weights of sources; their numbers of samples if none are given.

    Raises ConfigError.
    """
    return WeightSchedule.of(weights, {source.name: source.samples for source in sources})


@dataclass(frozen=True)
class MixtureDeal(SpanDeal):
    """Deals the samples of several sources, interleaved in proportion.

    Attributes:
        sources: the sources, in the order of the mixture's manifest.
        weights: the weights of the sources, by epoch.
        samples: number of samples wanted in an epoch, before any rounding to whole batches of one
            source.
        even: see `SpanDeal`.
        batch_size: see `SpanDeal`.
        grouping: the sources of a batch; see `Grouping`.
        spans: number of spans of an epoch, each of which gives `batch_size` places to a step;
            unused if batches have samples of several sources.
        change: the latest change of the mixture; None if it never changed.
        global_batches: the form of batches that all ranks share; None if there are none.
    """

    sources: tuple[MixedSource, ...]
    weights: WeightSchedule
    samples: int
    even: Even = "pad"
    batch_size: int = 1
    grouping: Grouping = "mixed"
    spans: int = 1
    change: Change | None = None
    global_batches: GlobalBatches | None = None

    @property
    def epoch_samples(self) -> int:
        """Number of samples of a whole epoch; see `SpanDeal`."""
        return self._places(self.samples)

    def samples_in(self, epoch: int) -> int:
        """Return the number of samples of an epoch; see `SpanDeal`."""
        return self._places(self._samples_wanted(epoch))

    def for_ranks(self, world_size: int) -> "MixtureDeal":
        """Return the deal for `world_size` ranks, each with a span of its own; see `SpanDeal`."""
        # Mixed batches need no spans, and global batches have the same spans for all ranks.
        if self.form is None or self.global_batches is not None:
            return self
        if world_size not in self._by_ranks:
            self._by_ranks[world_size] = replace(self, spans=world_size)
        return self._by_ranks[world_size]

    @cached_property
    def _by_ranks(self) -> "dict[int, MixtureDeal]":
        """The deals that `for_ranks` has made, by the number of ranks."""
        return {}

    @cached_property
    def form(self) -> SourceBatches | None:
        """The form of batches of one source each; None if batches mix several sources."""
        if self.grouping == "mixed":
            return None
        return SourceBatches(self.spans, self.batch_size, alike=self.grouping == "source")

    @property
    def has_source_batches(self) -> bool:
        """True if each batch is of one source; see `SpanDeal`."""
        return self.form is not None

    def _samples_wanted(self, epoch: int) -> int:
        """Return the number of samples of an epoch, before any rounding to whole batches."""
        change = self.change
        if change is None or change.samples is None or epoch != change.epoch:
            return self.samples
        return change.samples  # what was left of the epoch that the change cut short

    def _places(self, samples: int) -> int:
        """Return the number of places of an epoch that wants this number of samples.

        If each batch has one source, the places are rounded to whole steps of batches.
        """
        if self.form is None:
            return samples
        steps = self.form.steps(samples, drop=self.even == "drop")
        return steps * self.form.spans * self.form.size

    @property
    def _samples_per_turn(self) -> int:
        """Number of samples that a source gives in a turn."""
        return 1 if self.form is None else self.form.samples_per_turn

    def _turns(self, samples: int) -> int:
        """Return the number of turns, of all sources together, in an epoch of `samples` samples."""
        return self._places(samples) // self._samples_per_turn

    # The number of samples that an epoch takes of each source.

    @cached_property
    def _quotas(self) -> SourceQuotas:
        """The turns of each source in each epoch, as if the mixture had not been changed."""
        return self.weights.quotas(self._turns(self.samples))

    @cached_property
    def _quotas_since_change(self) -> SourceQuotas:
        """The turns of each source in each epoch, from the epoch of the change on."""
        assert self.change is not None
        first = self.change.epoch
        turns_of_first = self._turns(self._samples_wanted(first))
        return self.weights.quotas(self._turns(self.samples), (first, turns_of_first))

    def layout(self, epoch: int) -> MixtureLayout:
        """Return the layout of an epoch.

        An epoch before that of the change has the layout of a mixture without the change.
        """
        quotas = self._quotas
        known: dict[str, KnownSource] = {}  # the sources that were read before the change
        if self.change is not None and epoch >= self.change.epoch:
            quotas = self._quotas_since_change
            known = self.change.known
        starts = []
        for name, turns_before in zip(self._names, quotas.starts(epoch), strict=True):
            start_at_change = known[name].start if name in known else 0
            starts.append(start_at_change + self._samples_per_turn * turns_before)
        samples = tuple(self._samples_per_turn * turns for turns in quotas.turns(epoch))
        return layout_of(tuple(starts), samples, self.form)

    @property
    def _names(self) -> tuple[str, ...]:
        """The names of the sources."""
        return tuple(source.name for source in self.sources)

    def mixture_of(self, epoch: int) -> MixtureState:
        """Return the part of states that describes the mixture in an epoch; see `SpanDeal`."""
        layout = self.layout(epoch)
        facts = zip(self._names, self._identities, layout.starts, strict=True)
        sources = tuple(KnownSource(name, identity, start) for name, identity, start in facts)
        return MixtureState(
            sources,
            layout.samples,
            self.form,
            total=self._samples_wanted(epoch),
            change=self._change_in(epoch, sources),
        )

    def _change_in(self, epoch: int, sources: Iterable[KnownSource]) -> Change | None:
        """Return the change without the sections that no longer matter in an epoch.

        Args:
            epoch: number of the epoch.
            sources: the sources, with the number of samples taken of each before the epoch.
        """
        change = self.change
        if change is None or epoch <= change.epoch:
            return change
        # Sources that the mixture no longer has are where they were at the change.
        starts = {source.name: source.start for source in (*change.sources, *sources)}
        return replace(change, sections=unread(change.sections, starts))

    @cached_property
    def _identities(self) -> list[str]:
        """For each source, 8 hexadecimal digits that identify its samples and their order."""
        # The form of global batches belongs to the order: it decides which samples of a source an
        # epoch that is cut short has left, and so which come next.
        batch_facts = self.global_batches or ()
        return [digest([*source.identity, *batch_facts])[:8] for source in self.sources]

    # The order of the samples.

    @cached_property
    def _orders(self) -> list[EndlessOrder]:
        """The endless sequence of each source."""
        return [order_of(source.manifest.counts or (), source.shuffle) for source in self.sources]

    @cached_property
    def _courses(self) -> list[Course]:
        """The course of each source from the change on; see `Course`."""
        sections = () if self.change is None else self.change.sections
        courses = courses_after(sections, self.global_batches)
        return [courses.get(name, Course()) for name in self._names]

    def lane(self, epoch: int, span: tuple[int, int]) -> Interleaved:
        """Return the order in which the reader of a span of the epoch reads it."""
        layout = self.layout(epoch)
        ranges = layout.ranges(*span)
        lanes = tuple(
            self._lane(epoch, number, start, stop) for number, (start, stop) in enumerate(ranges)
        )
        begin, end = span
        # The lanes have only the samples of this span, so they begin where the span begins.
        return Interleaved(begin, end, layout.turns, lanes, origin=begin, names=self._names)

    def _lane(self, epoch: int, number: int, start: int, stop: int) -> Lane:
        """Return a range of samples of a source's course, in the order in which they are read.

        Args:
            epoch: number of the epoch.
            number: number of the source.
            start: number in the course of the first sample.
            stop: number in the course after the last sample.
        """
        is_changed = self.change is not None and epoch >= self.change.epoch
        course = self._courses[number] if is_changed else Course()
        if start >= course.resumes:
            # From `resumes` on, the course is the source's endless sequence.
            return self._mix_of(number, MixPart.whole(start, stop))
        if start < course.start:
            raise ConfigError(
                "the state is invalid: a source is not where its other numbers say",
                remedy="load what state_dict() has returned",
            )
        parts = course.between(start, stop)
        segments = tuple(self._mix_of(number, part).between(part.low, part.high) for part in parts)
        # All places of the segments are taken, from 0 on.
        return Chained(0, stop - start, segments)

    def _mix_of(self, number: int, part: MixPart) -> Lane:
        """Return the whole mix that a part of a source's samples is from.

        Args:
            number: number of the source.
            part: the part, of the mix of the samples from `begin` to `end`.
        """
        source = self.sources[number]
        first_shard = self._first_shards[number]
        window = window_of(source.shuffle)
        return lane_of(self._orders[number], window, part.begin, part.end, first_shard)

    @property
    def scattered(self) -> Sequence[range]:
        """The shards of each source all of whose samples are permuted; see `SpanDeal`."""
        ranges = []
        for source, first in zip(self.sources, self._first_shards, strict=True):
            if source.shuffle is not None and source.shuffle.is_global:
                ranges.append(range(first, first + len(source.manifest)))
        return ranges

    @cached_property
    def _first_shards(self) -> list[int]:
        """Number of the first shard of each source in the mixture's manifest."""
        return list(accumulate((len(source.manifest) for source in self.sources[:-1]), initial=0))

    # Substitutes for samples that are skipped because they cannot be read.

    def pass_places(self, epoch: int) -> int:
        """Return the number of consecutive places that hold a whole round of each source."""
        layout = self.layout(epoch)
        total = sum(layout.samples)
        # Number of places that a turn takes in one span.
        turn_places = 1 if self.form is None else self.form.size
        pass_places = 0
        for number, samples in enumerate(layout.samples):
            if samples:
                # By rounding, a source may come up to two turns later than its proportion says.
                needed = self._pass_samples(number) + 2 * turn_places
                places = -(-needed * total // samples)  # rounded up
                pass_places = max(pass_places, places)
        return pass_places

    def _pass_samples(self, number: int) -> int:
        """Return the number of consecutive samples of a source that hold a whole round."""
        left_of_earlier = sum(part.samples for part in self._courses[number].left)
        # Two rounds' samples in a row have a whole round among them, wherever they begin.
        return left_of_earlier + 2 * self._orders[number].samples

    def spare(self, epoch: int, topology: Topology, place: int) -> Spare:
        """Return the samples among which substitutes are found; see `SpanDeal`.

        A substitute in a batch of one source is a sample of this source.
        """
        samples = self.samples_in(epoch)
        rank_start, _ = self.partition(topology).owned_span(samples, topology.rank)
        of_source = self.spare_of_source(epoch, rank_start + place)
        return of_source or super().spare(epoch, topology, place)

    def spare_of_source(self, epoch: int, place: int) -> Spare | None:
        """Return the samples of the source that has a place of the epoch; see `SpanDeal`."""
        if self.form is None:
            return None
        layout = self.layout(epoch)
        number = layout.turns.lane(place)
        start = layout.starts[number]
        samples = layout.samples[number]
        lane = self._lane(epoch, number, start, start + samples)
        # Padding has a place beyond the end of the epoch, where the turns begin again.
        place_in_source = layout.turns.before(place)[number] % samples
        return Spare(
            share=Share((lane.between(0, samples),), samples),
            place=place_in_source,
            pass_places=self._pass_samples(number),
            source=number,
        )


@dataclass(frozen=True, slots=True)
class MixtureOptions(DealOptions):
    """Options of a mixture for its deal.

    Of the options in `DealOptions`, `shuffle` is unused, as each source has its own, and
    `samples_per_epoch` is always set.

    Attributes:
        sources: the sources, in the order of the mixture's manifest.
        weights: the weights of the sources, by epoch.
        grouping: the sources of a batch; see `Grouping`.
        change: the latest change of the mixture; None if it is as it began.
    """

    sources: tuple[MixedSource, ...] = ()
    weights: WeightSchedule = NO_WEIGHTS
    grouping: Grouping = "mixed"
    change: Change | None = None

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the sources; see `DealOptions`."""
        return tuple(source.name for source in self.sources)

    def reseeded(self, seeds: Mapping[str, int]) -> Self:
        """Return these options with other seeds; see `DealOptions`."""
        return replace(self, sources=tuple(each.reseeded(seeds) for each in self.sources))

    def after(self, change: Change | None) -> Self:
        """Return these options after a change of the mixture; see `DealOptions`."""
        if change == self.change:
            return self
        return replace(self, change=change)

    @property
    def fixes_batch_size(self) -> bool:
        """True if the batch size determines which samples come together; see `DealOptions`."""
        return self.has_source_batches or self.global_batch_size is not None

    @property
    def has_source_batches(self) -> bool:
        """True if each batch is of one source; see `DealOptions`."""
        return self.grouping != "mixed"

    def common_options(self) -> dict[str, object]:
        """Return the options that must be the same on all ranks; see `DealOptions`."""
        # A mixture changes by loading a state: ranks that differ have loaded different states.
        loaded = None
        if self.change is not None:
            loaded = f"changed in epoch {self.change.epoch}: {digest(repr(self.change))}"
        return DealOptions.common_options(self) | {
            "sources": {source.name: source.shuffle for source in self.sources},
            "weights": {epoch: list(map(float, each)) for epoch, each in self.weights.steps},
            "batches": self.grouping,
            "the state that was loaded": loaded,
        }

    @property
    def needs_counts(self) -> bool:
        """Always True: proportions are numbers of samples."""
        return True

    @property
    def global_batches(self) -> GlobalBatches | None:
        """The form of global batches; None if there are none."""
        size = self.global_batch_size
        if size is None:
            return None
        return GlobalBatches(size, self.spans, drop=self.even == "drop")

    def deal(self, manifest: Manifest, *, counted: bool | None = None) -> Deal:
        """Return the deal of the mixture; see `DealOptions`."""
        form = self.global_batches
        batch_size = self.batch_size
        if form is not None:
            batch_size = form.size // form.spans  # as many samples as each span gives to a batch
        deal = MixtureDeal(
            self.sources,
            self.weights,
            self.samples_per_epoch or 0,
            self.even,
            batch_size=batch_size,
            grouping=self.grouping,
            spans=self.spans,
            change=self.change,
            global_batches=form,
        )
        return self._in_global_batches(deal)

    def identities(self, manifest: Manifest) -> dict[bool, str]:
        """Return the identifier of mixtures with the same sources; see `DealOptions`.

        The identifier is under True, since samples are always counted. It does not depend on the
        number of samples that an epoch takes of each source: the states themselves have that.
        """
        sources = [source.identity for source in self.sources]
        further = [] if self.grouping == "mixed" else [self.grouping]
        return {True: digest([sources, self.samples_per_epoch, *self._identity, *further])}
