"""The order of a mixture, compared with one that is counted out sample by sample."""

import hashlib
import json
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, chain

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardcache.errors import ConfigError
from shardcache_client.order.dealing.deal import SampleDeal
from shardcache_client.order.dealing.elastic_deal import ElasticDeal
from shardcache_client.order.mixture import MixtureDeal, weights_of
from shardcache_client.order.sequences.partition import Partition, Phase
from shardcache_client.order.sequences.permutations import Shuffle
from shardcache_client.order.sources.quotas import Weights
from shardcache_client.order.topology import Topology
from support.cases import examples
from support.shards.dealt import Dealt, Place, crew, mixtures, shares, source, walk


def test_a_mixture_of_one_is_read_like_the_dataset() -> None:
    """With its order, which is that of a SampleDeal."""
    counts = [7, 0, 31, 12, 5]
    shuffle = Shuffle(11, 3, 2)
    alone = SampleDeal(counts, shuffle, "pad", 4, 40)
    sources = (source("a", counts, shuffle),)
    mixture = MixtureDeal(sources, weights_of(None, sources), 40, "pad", 4)
    cut = Partition(4, "pad", 4)
    assert shares(mixture, counts, 3, cut) == shares(alone, counts, 3, cut)


def test_an_epoch_is_each_sample_once_without_weights() -> None:
    """Sources are weighted by their sizes."""
    sources = (source("a", [5, 20]), source("b", [3]))
    deal = MixtureDeal(sources, weights_of(None, sources), 28, None)
    for epoch in range(3):
        read = [*chain.from_iterable(shares(deal, [5, 20, 3], epoch, Partition(2, None)))]
        assert len(set(read)) == len(read) == 28


weightings = st.integers(1, 9).flatmap(
    lambda number: st.dictionaries(
        st.integers(1, 200),
        st.lists(st.floats(1e-6, 1e3) | st.integers(0, 9), min_size=number, max_size=number).filter(
            any
        ),
    ).flatmap(
        lambda later: st.tuples(
            st.just(later), st.lists(st.floats(1e-6, 1), min_size=number, max_size=number)
        )
    )
)


def errors(dealt: Dealt, places: list[Place]) -> list[list[Fraction]]:
    """Return each source's lead over its proportion at each place of epoch 0 and its end."""
    deal = dealt.deal()
    assert isinstance(deal, MixtureDeal)
    due = deal.layout(0).samples
    owners = [number for number, counts in enumerate(dealt.counts) for _ in counts]
    found = []
    for number, samples in enumerate(due):
        share = Fraction(samples, sum(due))
        steps = ((owners[shard] == number) - share for shard, _ in places)
        found.append([*accumulate(steps, initial=Fraction(0))])
    return found


def bound(dealt: Dealt) -> Fraction:
    """Return a span's largest error: 1 with two sources, below 4 with more."""
    deal = dealt.deal()
    assert isinstance(deal, MixtureDeal)
    is_pair = sum(map(bool, deal.layout(0).samples)) <= 2
    return Fraction(1) if is_pair else Fraction(399, 100)


cuts = st.builds(
    Partition, st.integers(1, 12), st.sampled_from([None, "pad", "drop"]), st.integers(1, 4)
)


@pytest.mark.slow
@examples(40)
@given(mixtures(), cuts, cuts, st.data())
def test_proportions_hold_in_what_each_former_reader_has_left(
    dealt: Dealt, before: Partition, after: Partition, data: st.DataObject
) -> None:
    """And in a whole share, which has one part, or two if its last sample is repeated."""
    deal = dealt.deal(before.even, before.batch_size)
    shared = [deal.share(0, reader) for reader in crew(before)]
    for share in shared:
        assert len(share.segments) <= 1 + (before.even == "pad")

    taken = tuple(data.draw(st.integers(0, share.samples or 0)) for share in shared)
    resumed = dealt.deal(before.even, after.batch_size)
    readers = crew(replace(after, even=before.even))
    shared += [resumed.share(0, reader, [Phase(before, taken)]) for reader in readers]
    for share in shared:
        for ahead in errors(dealt, walk(share, dealt.shards)):
            assert max(ahead) - min(ahead) <= bound(dealt) * len(share.segments)


@pytest.mark.slow
@examples(40)
@given(mixtures(), st.integers(1, 12), st.integers(1, 4), st.integers(1, 3))
def test_proportions_hold_in_each_part_of_a_global_batch(
    dealt: Dealt, world_size: int, size: int, spans: int
) -> None:
    """Each span of the epoch gives an equal part, so a rank's part sums their errors."""
    deal = ElasticDeal(dealt.deal("pad"), world_size * size * spans, spans)
    for read in shares(deal, dealt.shards, 0, deal.partition(Topology(0, world_size))):
        for first in range(0, len(read), size * spans):
            batch = read[first : first + size * spans]
            for ahead in errors(dealt, batch):
                assert abs(ahead[-1]) <= bound(dealt) * spans


@pytest.mark.slow
@examples(15)
@given(st.integers(1, 1000), weightings)
@example(40, ({}, [0.99, 0.01]))
@example(40, ({50: [0.6, 0, 0.4], 60: [1, 0.01, 0]}, [0.985, 0.01, 0.005]))
@example(3, ({3: [1.0, 34.0, 1.0, 1.0]}, [1.0, 1.0, 1.0, 1.0]))
@example(3, ({epoch: [1.0, 1e-6, 1.0, 1.0] for epoch in range(1, 100, 2)}, [1e-6, 1.0, 1e-6, 1.0]))
@example(
    1, ({epoch: [0.99 - epoch / 1e6, 0.01, 0.001] for epoch in range(1, 200)}, [1, 0.01, 0.001])
)
def test_numbers_are_those_of_the_weights(
    samples: int, weightings: tuple[dict[int, list[float]], list[float]]
) -> None:
    """No rounding adds up over the first 1 to 200 epochs, whatever the weights of each.

    A rare source comes as often as its weight says, also if no epoch alone would have a sample of
    it.
    """
    later, weights = weightings
    by_epoch = {0: weights} | later
    sources = [source(str(number), [1]) for number in range(len(weights))]
    schedule = weights_of(by_epoch, sources).quotas(samples)
    bound = Fraction(0)
    grows = 2 if later else 1
    for _division in range((len(weights) - 1).bit_length()):
        bound = bound * grows + Fraction(1, 2)
    bound += Fraction(1, 10**9)
    taken = [0] * len(weights)
    due = [Fraction(0)] * len(weights)
    for epoch in range(200):
        weights = by_epoch.get(epoch, weights)
        numbers = schedule.turns(epoch)
        total = sum(map(Fraction, weights))
        assert schedule.starts(epoch) == tuple(taken)
        assert sum(numbers) == samples
        assert min(numbers) >= 0
        assert not any(more for more, weight in zip(numbers, weights, strict=True) if not weight)
        taken = [before + more for before, more in zip(taken, numbers, strict=True)]
        due = [
            before + samples * Fraction(more) / total
            for before, more in zip(due, weights, strict=True)
        ]
        assert all(abs(count - each) <= bound for count, each in zip(taken, due, strict=True))


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
        ({0: {"a": 1, "b": 1}, 1.5: {"a": 1, "b": 1}}, "weights from an epoch"),
        ({0: {"a": 1, "b": 1}, True: {"a": 1, "b": 1}}, "weights from an epoch"),
        ({0: {"a": 1, "b": 1}, "1": {"a": 1, "b": 1}}, "weights from an epoch"),
        ({0: 1}, "give a weight for each source"),
        ({}, "weights from an epoch"),
    ],
)
def test_weights_that_say_nothing_are_refused(weights: Weights, said: str) -> None:
    """With what to write in their place."""
    with pytest.raises(ConfigError) as caught:
        weights_of(weights, (source("a", [1]), source("b", [1])))
    assert said in str(caught.value.remedy)


def test_the_order_of_a_mixture_is_pinned() -> None:
    """It stays so in later releases."""
    mixed = Dealt(
        [[7, 0, 31], [12, 5], [4]], [Shuffle(11, 3), None, Shuffle(2, 1)], [[5, 3, 1]], 50
    )
    read = shares(mixed.deal("pad", 4), mixed.shards, 5, Partition(4, "pad", 4))
    assert hashlib.sha256(json.dumps(read).encode()).hexdigest()[:16] == "6dedad15a960d7aa"
