"""The epochs of a mixture: sources read side by side, in proportions that may change from epoch to epoch. Pure.

Each source is an endless sequence of rounds, the same as if it was read by itself. An epoch takes the next samples of
each, as many as its weight says: a source that is smaller than its part comes again, and one that is larger goes on in
the next epoch where this one ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import isfinite
from typing import Any, Self

from shardcache.errors import ConfigError
from shardcache_client.arguments import plain
from shardcache_client.order.deal import Assignment, Deal, digest
from shardcache_client.order.lanes.interleaving import Interleaving
from shardcache_client.order.lanes.proportions import Proportions
from shardcache_client.order.manifest import Manifest
from shardcache_client.order.mix import Mix
from shardcache_client.order.partition import Even
from shardcache_client.order.rounds import Order, Shuffle
from shardcache_client.order.span_deal import SpanDeal

SourceWeights = Mapping[str, float] | Sequence[float]
Weights = SourceWeights | Mapping[int, SourceWeights]
"""A weight for each source, by name or in their order; or such weights by the epoch from which they hold, from 0 on."""


_WEIGHTS = 'write {"name": weight, …}, or [weight, …]; or {0: …, epoch: …} for weights from an epoch on'


@dataclass(frozen=True, slots=True)
class MixedSource:
    """A dataset as a part of a mixture.

    Attributes:
        name: unique in the mixture.
        manifest: its shards, all counted.
        shuffle: its own shuffle.
        unit: as of its `Assignment`.
    """

    name: str
    manifest: Manifest
    shuffle: Shuffle | None = None
    unit: str = ""

    @property
    def identity(self) -> list[object]:
        """Everything that states of a mixture must agree in: a JSON value."""
        further = [each for each in (self.unit, self.manifest.selection) if each]
        return [self.name, [shard.url for shard in self.manifest], self.manifest.counts, repr(self.shuffle), *further]

    def reseeded(self, seeds: Mapping[str, int]) -> MixedSource:
        """Return the same with the seed under its name, if there is one."""
        if self.shuffle is None or self.name not in seeds:
            return self
        return replace(self, shuffle=replace(self.shuffle, seed=seeds[self.name]))

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.manifest.samples or 0


@dataclass(frozen=True, slots=True)
class SourceQuotas:
    """The number of samples that each epoch takes of each source.

    Attributes:
        steps: epochs from which new numbers hold, ascending from 0, each with a number per source.
    """

    steps: tuple[tuple[int, tuple[int, ...]], ...]

    @classmethod
    def of(cls, weights: Weights | None, sources: Sequence[MixedSource], samples: int) -> SourceQuotas:
        """Build from weights, for epochs of `samples` samples; None for weights proportional to the sources' sizes.

        Raises ConfigError for weights that are incomplete, negative or all 0, or for a source without samples.
        """
        names = [source.name for source in sources]
        if weights is None:
            weights = {source.name: source.samples for source in sources}
        by_epoch = _by_epoch(weights)
        steps = ((epoch, apportioned(samples, _checked(by_epoch[epoch], names))) for epoch in sorted(by_epoch))
        return cls(tuple(steps))

    def samples(self, epoch: int) -> tuple[int, ...]:
        """Return the number of samples that an epoch takes of each source."""
        return next(samples for first, samples in reversed(self.steps) if first <= epoch)

    def starts(self, epoch: int) -> tuple[int, ...]:
        """Return the number of samples of each source that all earlier epochs take."""
        starts = [0] * len(self.steps[0][1])
        for (first, samples), (end, _) in pairwise((*self.steps, (epoch, ()))):
            epochs = max(0, min(end, epoch) - first)
            starts = [start + epochs * each for start, each in zip(starts, samples, strict=True)]
        return tuple(starts)


def _by_epoch(weights: Any) -> dict[int, Any]:
    """Return weights by the epoch from which they hold."""
    if not isinstance(weights, Mapping) or not any(map(_is_several, weights.values())):
        return {0: weights}
    for key, value in weights.items():
        if isinstance(key, str) or not _is_several(value) or key < 0:
            raise ConfigError(f"weights has {key!r}: {value!r}", remedy=_WEIGHTS)
    if 0 not in weights:
        raise ConfigError("weights has none for epoch 0", remedy="give the weights of the first epoch under 0")
    return {int(epoch): each for epoch, each in weights.items()}


def _is_several(value: object) -> bool:
    return isinstance(value, Mapping | Sequence) or bool(getattr(value, "ndim", 0))  # an array


def _checked(weights: Any, names: Sequence[str]) -> list[Fraction]:
    if not _is_several(weights) or isinstance(weights, str) or not len(weights):
        raise ConfigError(f"weights is {weights!r}", remedy=_WEIGHTS)
    if not isinstance(weights, Mapping):
        weights = dict(zip(names, weights, strict=True)) if len(weights) == len(names) else dict(enumerate(weights))
    numbers = {str(name): plain(weight) for name, weight in weights.items()}
    if set(numbers) != set(names):
        raise ConfigError(
            f"weights are for {', '.join(map(repr, numbers))}; the sources are {', '.join(map(repr, names))}",
            remedy="give a weight for each source; 0 for one that is not read",
        )
    if not all(isinstance(weight, int | float) and isfinite(weight) and weight >= 0 for weight in numbers.values()):
        raise ConfigError(f"weights are {numbers}", remedy="give finite numbers, 0 or more")
    if not any(numbers.values()):
        raise ConfigError("the weights are all 0", remedy="give at least one source a weight above 0")
    return [Fraction(numbers[name]) for name in names]


def apportioned(samples: int, weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Divide a number of samples in proportion to the weights, by largest remainder; the earlier source wins a tie."""
    total = sum(weights)
    exact = [samples * weight / total for weight in weights]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda nth: parts[nth] - exact[nth])
    for nth in by_remainder[: samples - sum(parts)]:
        parts[nth] += 1
    return tuple(parts)


@dataclass(frozen=True)
class MixtureDeal(SpanDeal):
    """Deals the samples of several sources, interleaved in proportion.

    Attributes:
        sources: in the order of their shards in the mixture's manifest.
    """

    sources: tuple[MixedSource, ...]
    schedule: SourceQuotas
    even: Even = "pad"
    batch_size: int = 1

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch; see `Deal`."""
        return sum(self.schedule.samples(0))

    @cached_property
    def _orders(self) -> list[Order]:
        return [Order(source.manifest.counts or (), source.shuffle) for source in self.sources]

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.sources)

    def lane(self, epoch: int, span: tuple[int, int]) -> Interleaving:
        """Return the order in which the reader of a span of the epoch reads it."""
        turns, begins = Proportions(self.schedule.samples(epoch)), self.schedule.starts(epoch)
        spans = zip(turns.before(span[0]), turns.before(span[1]), strict=True)
        lanes, first = [], 0
        for source, order, begin, (low, high) in zip(self.sources, self._orders, begins, spans, strict=True):
            pieces = (
                replace(each, shard=first + each.shard, first=first) for each in order.pieces(begin + low, begin + high)
            )
            lanes.append(Mix([*pieces], source.shuffle.window if source.shuffle else 0))
            first += len(source.manifest)
        return Interleaving(turns, tuple(lanes), span[0], self._names)


@dataclass(frozen=True, slots=True)
class MixtureAssignment(Assignment):
    """Options of a mixture for its deal; `shuffle` is that of each source, and `samples_per_epoch` always given."""

    sources: tuple[MixedSource, ...] = ()
    schedule: SourceQuotas = SourceQuotas(())

    def reseeded(self, seeds: Mapping[str, int]) -> Self:
        """Return the same with other seeds; see `Assignment`."""
        return replace(self, sources=tuple(source.reseeded(seeds) for source in self.sources))

    def options(self) -> dict[str, object]:
        """Return the options that must be the same on all ranks; see `Assignment`."""
        told = {source.name: source.shuffle for source in self.sources}
        return Assignment.options(self) | {"sources": told, "weights": self.schedule.steps}

    @property
    def needs_counts(self) -> bool:
        """Always True: proportions are numbers of samples."""
        return True

    def deal(self, manifest: Manifest, *, counted: bool | None = None) -> Deal:
        """Return the deal."""
        return self._elastic(MixtureDeal(self.sources, self.schedule, self.even, self.batch_size))

    def identities(self, manifest: Manifest) -> dict[bool, str]:
        """Return the identifier of mixtures with the same sources; their states carry the numbers of the schedule."""
        told = [source.identity for source in self.sources]
        return {True: digest([told, self.samples_per_epoch, *self._told])}
