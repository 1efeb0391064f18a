"""The epochs of a mixture: sources read side by side, in proportions that may change from epoch to epoch. Pure.

Each source is an endless sequence of rounds, the same as if it was read by itself. An epoch takes the next samples of
each, as many as its weight says: a source that is smaller than its part comes again, and one that is larger goes on in
the next epoch where this one ends.

What an epoch cannot take of a source, as samples are whole, it leaves to later ones. The samples up to the end of any
epoch are divided in two, as near as can be to what either half of the sources is due by then, and these parts likewise.
So two sources always have what they are due within half a sample, up to four within one, and so on by half a sample for
each further division. Where weights change between epochs, it is E(n) = 2 E(n - 1) + 0.5 samples after n divisions
(0.5, 1.5, 3.5, 7.5), since a source that is ahead may then be due nothing while the other one of its pair is. As the
number of samples grows by one, one part of each division does, too: a source that is ahead waits, and no epoch would
have to give samples back. What a source lacks while its weight is 0 waits for an epoch in which it has one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from operator import add, sub
from typing import Any, Self

from shardcache.errors import ConfigError
from shardcache_client.arguments import by_name, plain, whole
from shardcache_client.order.deal import Assignment, Deal, SpanDeal, digest
from shardcache_client.order.lanes import Interleaved, Mix, Proportions
from shardcache_client.order.manifest import Manifest
from shardcache_client.order.rounds import Even, Order, Shuffle

SourceWeights = Mapping[str, float] | Sequence[float]
Weights = SourceWeights | Mapping[int, SourceWeights]
"""A weight for each source, by name or in their order; or such weights by the epoch from which they hold, from 0 on."""


_WEIGHTS = 'write {"name": weight, …}, or [weight, …]; or {0: …, epoch: …} for weights from an epoch on'
_EPOCHS = whole(0)


@dataclass(frozen=True, slots=True)
class MixedSource:
    """A counted dataset as a part of a mixture, with a name of its own; `unit` is that of its `Assignment`."""

    name: str
    manifest: Manifest
    shuffle: Shuffle | None = None
    unit: str = ""

    @property
    def identity(self) -> list[object]:
        """Everything that states of a mixture must agree in: a JSON value."""
        further = [each for each in (self.unit, self.manifest.selection) if each]
        return [self.name, self.manifest.shards.urls.fingerprint, self.manifest.counts, repr(self.shuffle), *further]

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.manifest.samples or 0


_ONE = 1 << 64
"""A sample, in the unit of what sources are due: fine enough for as many epochs as can be numbered."""


@dataclass(frozen=True, slots=True)
class QuotaStep:
    """Epochs with the same weights."""

    first: int  # the first of these epochs
    due: tuple[int, ...]  # what each source is due in each of them; in all, the samples of an epoch
    starts: tuple[int, ...]  # number of samples of each source that all epochs before the first take
    ahead: tuple[int, ...]  # by how much that is more than the sources were due, or less

    def taken(self, epoch: int) -> tuple[int, ...]:
        """Return the number of samples of each source that all epochs before this one take."""
        more = _divided((epoch - self.first) * sum(self.due) // _ONE, self.due, self.ahead)
        return tuple(map(add, self.starts, more))

    def then(self, epoch: int, due: tuple[int, ...]) -> "QuotaStep":
        """Return the step that follows from an epoch on."""
        starts, epochs = self.taken(epoch), epoch - self.first
        more = (
            _ONE * (stop - start) - epochs * each
            for start, stop, each in zip(self.starts, starts, self.due, strict=True)
        )
        return QuotaStep(epoch, due, starts, tuple(map(add, self.ahead, more)))


@dataclass(frozen=True, slots=True)
class SourceQuotas:
    """The number of samples that each epoch takes of each source, in steps of which the first begins with epoch 0."""

    steps: tuple[QuotaStep, ...]

    @classmethod
    def of(cls, weights: Weights | None, sources: Sequence[MixedSource], samples: int) -> "SourceQuotas":
        """Build from weights, for epochs of `samples` samples; None for weights proportional to the sources' sizes."""
        names = [source.name for source in sources]
        if weights is None:
            weights = {source.name: source.samples for source in sources}
        by_epoch = _by_epoch(weights)
        steps = [QuotaStep(0, *[(0,) * len(names)] * 3)]
        for epoch in sorted(by_epoch):
            *sums, total = accumulate(_checked(by_epoch[epoch], names), initial=Fraction(0))
            due = (int(samples * _ONE * each / total) for each in (*sums, total))
            steps.append(steps[-1].then(epoch, tuple(stop - start for start, stop in pairwise(due))))
        return cls(tuple(steps[1:]))

    def samples(self, epoch: int) -> tuple[int, ...]:
        """Return the number of samples that an epoch takes of each source."""
        return tuple(map(sub, self.starts(epoch + 1), self.starts(epoch)))

    def starts(self, epoch: int) -> tuple[int, ...]:
        """Return the number of samples of each source that all earlier epochs take."""
        return next(step for step in reversed(self.steps) if step.first <= epoch).taken(epoch)


def _divided(samples: int, due: Sequence[int], ahead: Sequence[int]) -> list[int]:
    """Divide samples in proportion to what sources are due, given by how much they are ahead of it."""
    if len(due) == 1:
        return [samples]
    half = len(due) // 2
    part, total = sum(due[:half]), sum(due)
    if part in (0, total):
        first = samples if part else 0
    else:
        exact = (samples * _ONE + sum(ahead)) * part // total - sum(ahead[:half])
        first = min(samples, max(0, (exact + _ONE // 2) // _ONE))
    return _divided(first, due[:half], ahead[:half]) + _divided(samples - first, due[half:], ahead[half:])


def _by_epoch(weights: Any) -> dict[int, Any]:
    """Return weights by the epoch from which they hold."""
    if not isinstance(weights, Mapping) or not any(map(_is_several, weights.values())):
        return {0: weights}
    found = {_epoch(key, value): value for key, value in weights.items()}
    if 0 not in found:
        raise ConfigError("weights has none for epoch 0", remedy="give the weights of the first epoch under 0")
    return found


def _epoch(key: object, value: object) -> int:
    """Return the epoch from which weights hold. Raises ConfigError unless `key` is one and `value` weights."""
    try:
        if _is_several(value):
            return int(_EPOCHS.converted(plain(key)))
    except (TypeError, ValueError):
        pass
    raise ConfigError(f"weights has {key!r}: {value!r}", remedy=_WEIGHTS)


def _is_several(value: object) -> bool:
    return isinstance(value, Mapping | Sequence) or bool(getattr(value, "ndim", 0))  # an array


def _checked(weights: Any, names: Sequence[str]) -> list[Fraction]:
    if not _is_several(weights) or isinstance(weights, str) or not len(weights):
        raise ConfigError(f"weights is {weights!r}", remedy=_WEIGHTS)
    if not isinstance(weights, Mapping):
        weights = dict(zip(names, weights, strict=True)) if len(weights) == len(names) else dict(enumerate(weights))
    numbers = {name: plain(weight) for name, weight in by_name(weights.items(), "weights").items()}
    if set(numbers) != set(names):
        raise ConfigError(
            f"weights are for {', '.join(map(repr, numbers))}; the sources are {', '.join(map(repr, names))}",
            remedy="give a weight for each source; 0 for one that is not read",
        )
    if not all(map(_is_weight, numbers.values())):
        raise ConfigError(f"weights are {numbers}", remedy="give finite numbers, 0 or more")
    if not any(numbers.values()):
        raise ConfigError("the weights are all 0", remedy="give at least one source a weight above 0")
    return [Fraction(numbers[name]) for name in names]


def _is_weight(value: object) -> bool:
    """Return True for a finite number of 0 or more, not too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return 0 <= float(value) < inf
    except OverflowError:
        return False


@dataclass(frozen=True)
class MixtureDeal(SpanDeal):
    """Deals the samples of several sources, in the order of the mixture's manifest, interleaved in proportion."""

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

    def lane(self, epoch: int, span: tuple[int, int]) -> Interleaved:
        """Return the order in which the reader of a span of the epoch reads it."""
        turns, begins = Proportions(self.schedule.samples(epoch)), self.schedule.starts(epoch)
        spans = zip(turns.before(span[0]), turns.before(span[1]), strict=True)
        lanes, first = [], 0
        for source, order, begin, (low, high) in zip(self.sources, self._orders, begins, spans, strict=True):
            pieces = order.pieces(begin + low, begin + high, first)
            lanes.append(Mix(pieces, source.shuffle.window if source.shuffle else 0))
            first += len(source.manifest)
        return Interleaved(*span, turns, tuple(lanes), span[0], self._names())

    def pass_places(self, epoch: int) -> int:
        """Return the number of consecutive places that hold a whole round of each source, wherever they begin."""
        total = self.epoch_samples
        places = [0]
        for order, taken in zip(self._orders, self.schedule.samples(epoch), strict=True):
            if taken:
                # Two samples more, as a source comes so much later than its proportion says.
                needed = 2 * order.samples + 2
                places.append(-(-needed * total // taken))
        return max(places)

    def _names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.sources)

    def sources_of(self, epoch: int) -> dict[str, dict[str, int]]:
        """Return the start of an epoch in each source, and its number of samples; see `SpanDeal`."""
        each = zip(self._names(), self.schedule.starts(epoch), self.schedule.samples(epoch), strict=True)
        return {name: {"start": start, "samples": samples} for name, start, samples in each}


@dataclass(frozen=True, slots=True)
class MixtureAssignment(Assignment):
    """Options of a mixture for its deal; `shuffle` is that of each source, and `samples_per_epoch` always given."""

    sources: tuple[MixedSource, ...] = ()
    schedule: SourceQuotas = SourceQuotas(())

    def reseeded(self, seeds: Mapping[str, int]) -> Self:
        """Return the same with other seeds; see `Assignment`."""
        sources = (
            replace(each, shuffle=each.shuffle and replace(each.shuffle, seed=seeds.get(each.name, each.shuffle.seed)))
            for each in self.sources
        )
        return replace(self, sources=tuple(sources))

    def options(self) -> dict[str, object]:
        """Return the options that must be the same on all ranks; see `Assignment`."""
        sources = {source.name: source.shuffle for source in self.sources}
        weights = {step.first: [each / _ONE for each in step.due] for step in self.schedule.steps}
        return Assignment.options(self) | {"sources": sources, "weights": weights}

    @property
    def needs_counts(self) -> bool:
        """Always True: proportions are numbers of samples."""
        return True

    def deal(self, manifest: Manifest, *, counted: bool | None = None) -> Deal:
        """Return the deal."""
        return self._in_global_batches(MixtureDeal(self.sources, self.schedule, self.even, self.batch_size))

    def identities(self, manifest: Manifest) -> dict[bool, str]:
        """Return the identifier of mixtures with the same sources; their states carry the numbers of the schedule."""
        sources = [source.identity for source in self.sources]
        return {True: digest([sources, self.samples_per_epoch, *self._identity])}
