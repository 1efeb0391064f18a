"""The order of a mixture, compared with one that is counted out sample by sample."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, chain

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardcache.errors import ConfigError
from shardcache.protocol import ShardRef
from shardcache_client.order.division import Even, Partition, Phase
from shardcache_client.order.manifest import Manifest
from shardcache_client.order.mixture import MixedSource, MixtureDeal, SourceQuotas, Weights
from shardcache_client.order.rounds import Order, Shuffle
from shardcache_client.topology import Topology
from support.shards.dealt import Place, opened, shares

SOURCES = "abcd"

manifests = st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any)
shuffles = st.none() | st.builds(Shuffle, seed=st.integers(0, 5), window=st.integers(0, 4), groups=st.integers(1, 2))
sizes = st.tuples(st.integers(1, 4), st.integers(1, 3))
evens = st.sampled_from(["pad", "drop", None])


def source(name: str, counts: Sequence[int], shuffle: Shuffle | None = None) -> MixedSource:
    """Return a source whose shards have so many samples."""
    return MixedSource(
        name, Manifest.of(ShardRef(f"{name}/{n}", samples=count) for n, count in enumerate(counts)), shuffle
    )


@dataclass(frozen=True)
class Mixed:
    """A mixture, and the reference for it: each source's samples written out one after another."""

    counts: list[list[int]]
    shuffles: list[Shuffle | None]
    weights: list[list[int]]
    samples: int

    def deal(self, even: Even = None, batch_size: int = 1) -> MixtureDeal:
        """Return the deal; the weights of one epoch after another, and then the last ones."""
        sources = tuple(map(source, SOURCES, self.counts, self.shuffles))
        by_epoch: Weights = {
            epoch: {each.name: weight for each, weight in zip(sources, weights, strict=True)}
            for epoch, weights in enumerate(self.weights)
        }
        return MixtureDeal(sources, SourceQuotas.of(by_epoch, sources, self.samples), even, batch_size)

    @property
    def shards(self) -> list[int]:
        """Number of samples in each shard of the mixture's manifest."""
        return list(chain.from_iterable(self.counts))

    def epoch(self, epoch: int) -> Counter[Place]:
        """Return the samples of an epoch: those that come next in each source."""
        due: Counter[Place] = Counter()
        schedule = self.deal().schedule
        for number in range(len(self.counts)):
            start = sum(schedule.samples(earlier)[number] for earlier in range(epoch))
            stop = start + schedule.samples(epoch)[number]
            due.update(self._endless(number, stop)[start:])
        return due

    def _endless(self, number: int, samples: int) -> list[Place]:
        first, counts = sum(map(len, self.counts[:number])), self.counts[number]
        order = Order(counts, self.shuffles[number])
        return [
            (first + piece.shard, sample)
            for piece in order.pieces(0, samples)
            for sample in piece.numbers(counts[piece.shard], permuted=bool(self._window(number)))
        ]

    def _window(self, number: int) -> int:
        shuffle = self.shuffles[number]
        return shuffle.window if shuffle else 0

    def sources_of(self, places: Sequence[Place]) -> list[int]:
        """Return the source of each sample."""
        owners = [number for number, counts in enumerate(self.counts) for _ in counts]
        return [owners[shard] for shard, _ in places]


@st.composite
def mixtures(draw: st.DrawFn) -> Mixed:
    """Up to four sources of few samples, with weights that change over up to three epochs."""
    number = draw(st.integers(1, 4))
    weight = st.integers(0, 9)
    weights = st.lists(weight, min_size=number, max_size=number).filter(any)
    return Mixed(
        [draw(manifests) for _ in range(number)],
        [draw(shuffles) for _ in range(number)],
        draw(st.lists(weights, min_size=1, max_size=3)),
        draw(st.integers(1, 80)),
    )


@settings(max_examples=100, deadline=None)
@given(mixtures(), evens, sizes, st.integers(1, 5), st.integers(0, 3))
def test_a_mixture_has_each_sources_next_samples_once(
    mixed: Mixed, even: Even, size: tuple[int, int], batch_size: int, epoch: int
) -> None:
    """Over all ranks and workers: exactly the numbers of the weights, whether a source is repeated or cut short."""
    cut = Partition(*size, even, batch_size)
    read = shares(mixed.deal(even, batch_size), mixed.shards, epoch, cut)
    count, due = Counter(chain.from_iterable(read)), mixed.epoch(epoch)
    ranks = [sum(map(len, read[rank * cut.workers :][: cut.workers])) for rank in range(cut.world_size)]
    if even is None:
        assert count == due
        assert max(ranks) - min(ranks) <= 1
    else:
        assert len(set(ranks)) == 1
        assert abs(count.total() - mixed.samples) < cut.world_size
        assert not (due - count if even == "pad" else count - due)


@settings(max_examples=100, deadline=None)
@given(mixtures(), sizes, st.integers(1, 5), st.integers(0, 3))
def test_every_window_of_a_reader_has_the_proportions(
    mixed: Mixed, size: tuple[int, int], batch_size: int, epoch: int
) -> None:
    """Of any consecutive samples of a reader, with an error below 4 samples, and of at most 1 with two sources."""
    deal = mixed.deal(None, batch_size)
    numbers = deal.schedule.samples(epoch)
    for places in shares(deal, mixed.shards, epoch, Partition(*size, None, batch_size)):
        for number, samples in enumerate(numbers):
            own = (each == number for each in mixed.sources_of(places))
            counts = list(accumulate(own, initial=0))
            drift = [count - Fraction(at * samples, mixed.samples) for at, count in enumerate(counts)]
            assert max(drift) - min(drift) <= 1 or (len(numbers) > 2 and max(drift) - min(drift) < 4)


@settings(max_examples=100, deadline=None)
@given(mixtures(), st.lists(st.tuples(sizes, st.integers(1, 5)), min_size=2, max_size=4), st.integers(0, 10**6))
def test_the_rest_of_a_mixture_is_read_once_by_any_other_topology(
    mixed: Mixed, crews: list[tuple[tuple[int, int], int]], step: int
) -> None:
    """From any step, again and again: what was read and what comes make up the epoch of each source."""
    count: Counter[Place] = Counter()
    phases: list[Phase] = []
    for nth, (size, batch_size) in enumerate(crews):
        cut = Partition(*size, None, batch_size)
        read = shares(mixed.deal(None, batch_size), mixed.shards, 1, cut, phases)
        last = nth == len(crews) - 1
        taken = [len(reader) if last else step * (i + 7) % (len(reader) + 1) for i, reader in enumerate(read)]
        count.update(place for reader, steps in zip(read, taken, strict=True) for place in reader[:steps])
        phases.append(Phase(cut, tuple(taken)))
    assert count == mixed.epoch(1)


@settings(max_examples=150, deadline=None)
@given(mixtures(), sizes, st.integers(0, 100))
def test_one_plan_has_the_shards_of_all_sources_in_the_order_of_need(
    mixed: Mixed, size: tuple[int, int], taken: int
) -> None:
    """From any place on, the plan is what reading sample by sample opens, one shard after another."""
    share = mixed.deal().share(1, 0, Topology(size[0] - 1, size[0], size[1] - 1, size[1]))
    rest = share.behind(min(taken, share.samples or 0))
    assert rest.shards() == [shard for part in rest.segments for shards, _ in opened(part) for shard in shards]


def test_a_mixture_of_one_is_read_like_the_dataset() -> None:
    """With its order, which is that of a SampleDeal."""
    from shardcache_client.order.deal import SampleDeal

    counts, shuffle = [7, 0, 31, 12, 5], Shuffle(11, 3, 2)
    alone = SampleDeal(counts, shuffle, "pad", 4, 40)
    sources = (source("a", counts, shuffle),)
    mixture = MixtureDeal(sources, SourceQuotas.of(None, sources, 40), "pad", 4)
    cut = Partition(2, 2, "pad", 4)
    assert shares(mixture, counts, 3, cut) == shares(alone, counts, 3, cut)


def test_an_epoch_is_each_sample_once_without_weights() -> None:
    """Sources are weighted by their sizes."""
    sources = (source("a", [5, 20]), source("b", [3]))
    deal = MixtureDeal(sources, SourceQuotas.of(None, sources, 28), None)
    for epoch in range(3):
        read = Counter(shares(deal, [5, 20, 3], epoch, Partition(2, 1, None))[0])
        read.update(shares(deal, [5, 20, 3], epoch, Partition(2, 1, None))[1])
        assert len(read) == read.total() == 28


weightings = st.integers(1, 9).flatmap(
    lambda number: st.dictionaries(
        st.integers(1, 200), st.lists(st.floats(1e-6, 1e3) | st.integers(1, 9), min_size=number, max_size=number)
    ).flatmap(lambda later: st.tuples(st.just(later), st.lists(st.floats(1e-6, 1), min_size=number, max_size=number)))
)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 1000), weightings)
@example(40, ({}, [0.99, 0.01]))
@example(3, ({3: [1.0, 34.0, 1.0, 1.0]}, [1.0, 1.0, 1.0, 1.0]))
@example(1, ({epoch: [0.99 - epoch / 1e6, 0.01, 0.001] for epoch in range(1, 200)}, [1, 0.01, 0.001]))
def test_numbers_are_those_of_the_weights(samples: int, weightings: tuple[dict[int, list[float]], list[float]]) -> None:
    """Over the first 1 to 200 epochs, whatever the weights of each: no rounding adds up, and none is taken back."""
    later, weights = weightings
    by_epoch = {0: weights} | later
    sources = [source(str(number), [1]) for number in range(len(weights))]
    schedule = SourceQuotas.of(by_epoch, sources, samples)
    bound, grows = Fraction(0), Fraction(3, 2) if later else 1
    for _division in range((len(weights) - 1).bit_length()):
        bound = bound * grows + Fraction(1, 2)
    bound += Fraction(1, 10**9)
    taken, due = [0] * len(weights), [Fraction(0)] * len(weights)
    for epoch in range(200):
        weights = by_epoch.get(epoch, weights)
        numbers, total = schedule.samples(epoch), sum(map(Fraction, weights))
        assert schedule.starts(epoch) == tuple(taken)
        assert sum(numbers) == samples
        assert min(numbers) >= 0
        taken = [before + more for before, more in zip(taken, numbers, strict=True)]
        due = [before + samples * Fraction(more) / total for before, more in zip(due, weights, strict=True)]
        assert all(abs(count - each) <= bound for count, each in zip(taken, due, strict=True))


def test_a_rare_source_comes_as_often_as_its_weight_says() -> None:
    """Also if no epoch alone would have a sample of it; and never while its weight is 0."""
    sources = (source("a", [10]), source("b", [10]), source("c", [10]))
    schedule = SourceQuotas.of({0: [0.985, 0.01, 0.005], 50: [0.6, 0, 0.4], 60: [1, 0.01, 0]}, sources, 40)
    assert schedule.starts(50) == (1970, 20, 10)
    assert all(schedule.samples(epoch)[1] == 0 for epoch in range(50, 60))
    assert all(schedule.samples(epoch)[2] == 0 for epoch in range(60, 200))


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"a": 1}, "give a weight for each source"),
        ({"a": 1, "b": 1, "c": 1}, "give a weight for each source"),
        ({"a": 1, "b": -1}, "0 or more"),
        ({"a": 1, "b": float("nan")}, "finite"),
        ({"a": 0, "b": 0}, "above 0"),
        ({1: {"a": 1, "b": 1}}, "under 0"),
        ({-1: {"a": 1, "b": 1}, 0: {"a": 1, "b": 1}}, "weights from an epoch"),
        ({0: 1}, "give a weight for each source"),
        ({}, "weights from an epoch"),
    ],
)
def test_weights_that_say_nothing_are_refused(weights: Weights, said: str) -> None:
    """With what to write in their place."""
    with pytest.raises(ConfigError) as caught:
        SourceQuotas.of(weights, (source("a", [1]), source("b", [1])), 10)
    assert said in str(caught.value.remedy)


def test_the_order_of_a_mixture_is_pinned() -> None:
    """It stays so in later releases."""
    mixed = Mixed([[7, 0, 31], [12, 5], [4]], [Shuffle(11, 3), None, Shuffle(2, 1)], [[5, 3, 1]], 50)
    read = shares(mixed.deal("pad", 4), mixed.shards, 5, Partition(2, 2, "pad", 4))
    assert hashlib.sha256(json.dumps(read).encode()).hexdigest()[:16] == "4c0ffc42703f165f"
