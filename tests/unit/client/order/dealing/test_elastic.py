"""ElasticDeal: global batches for any ranks, compared with batches cut from spans."""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import ConfigError
from shardcache.shared.protocol import ShardRef
from shardcache_client.order.dealing.deal import SampleDeal, SpanDeal
from shardcache_client.order.dealing.deal_options import DealOptions
from shardcache_client.order.dealing.elastic_deal import ElasticDeal
from shardcache_client.order.mixture import MixtureDeal, weights_of
from shardcache_client.order.sequences.lanes import Share
from shardcache_client.order.sequences.partition import Even
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.order.sources.courses import GlobalBatches
from shardcache_client.order.topology import Topology
from shardcache_client.position.progress import Progress
from support.cases import examples
from support.shards.dealt import Dealt, Place, datasets, mixtures, source, walk

Batches = list[list[Place]]

worlds = st.sampled_from([1, 2, 3, 4, 6, 12])


@dataclass(frozen=True)
class Elastic:
    """A deal of global batches of 12 samples, and the reference for it."""

    spans: SpanDeal
    counts: list[int]
    count: int

    @property
    def deal(self) -> ElasticDeal:
        """The deal of the global batches."""
        return ElasticDeal(self.spans, 12, self.count)

    def batches(self, epoch: int) -> Batches:
        """Return the global batches of an epoch, cut from the orders of its spans."""
        number = self.deal.batches_in(0)
        piece = 12 // self.count
        orders = [
            _walk_all(
                self.spans, epoch, (span * number * piece, (span + 1) * number * piece), self.counts
            )
            for span in range(self.count)
        ]
        return [
            [place for order in orders for place in order[batch * piece : (batch + 1) * piece]]
            for batch in range(number)
        ]

    def read(self, epoch: int, ranks: int, taken: int = 0) -> Batches:
        """Return the global batches of a job, after so many that a single rank has taken."""
        progress = Progress(epoch).after(1, 12, taken)
        shares = [self._rest(progress, Topology(rank, ranks)) for rank in range(ranks)]
        size = 12 // ranks
        batches = self.deal.batches_in(0) - taken
        assert {len(share) for share in shares} == {batches * size}
        return [
            [place for share in shares for place in share[batch * size : (batch + 1) * size]]
            for batch in range(batches)
        ]

    def _rest(self, progress: Progress, rank: Topology) -> list[Place]:
        start = progress.start_of(self.deal, rank)
        return walk(self.deal.share(progress.epoch, rank), self.counts)[start.passed :]


def _walk_all(spans: SpanDeal, epoch: int, span: tuple[int, int], counts: list[int]) -> list[Place]:
    whole = spans.lane(epoch, span).between(0, span[1] - span[0])
    return walk(Share((whole,), whole.samples), counts)


@st.composite
def elastics(draw: st.DrawFn) -> Elastic:
    """A dataset or a mixture."""
    dealt = draw(datasets(6, 12) | mixtures())
    return Elastic(
        dealt.deal(draw(st.sampled_from(["pad", "drop"]))),
        dealt.shards,
        draw(st.sampled_from([1, 2, 3, 4])),
    )


@pytest.mark.slow
@examples(60)
@given(elastics(), worlds, st.integers(0, 2), st.just(0) | st.integers(0, 100))
def test_global_batches_are_the_same_for_any_job(
    elastic: Elastic, ranks: int, epoch: int, taken: int
) -> None:
    """Batches equal those cut from the spans, sample by sample, for any number of ranks."""
    taken %= elastic.deal.batches_in(0) + 1
    assert elastic.read(epoch, ranks, taken) == elastic.batches(epoch)[taken:]


@examples(30)
@given(datasets(6, 12), st.sampled_from([1, 2, 3, 4]), st.sampled_from(["pad", "drop"]))
def test_global_batches_have_every_sample(dealt: Dealt, count: int, even: Even) -> None:
    """Once, but for fewer than one batch, which are repeated to fill the last one, or left out."""
    elastic = Elastic(replace(dealt, samples=None).deal(even), dealt.shards, count)
    read = Counter(chain.from_iterable(elastic.batches(0)))
    every = replace(dealt, samples=None).epoch(0)
    assert abs(read.total() - every.total()) < 12
    assert set(read) == set(every) if even == "pad" else read <= every


def test_a_batch_that_was_begun_is_read_on_by_the_same_ranks_alone() -> None:
    """Others begin it again."""
    deal = ElasticDeal(SampleDeal([120]), 12)
    progress = Progress().after(2, 1, 15)
    assert progress.start_of(deal, Topology(1, 2)).passed == 15
    assert progress.start_of(deal, Topology(0, 1)).passed == 2 * 12


@pytest.mark.parametrize("world_size", [1, 2, 6])
def test_samples_of_a_batch_of_one_source_have_different_substitutes(world_size: int) -> None:
    """Substitutes begin at the sample itself, whichever rank reads it, so none repeats."""
    sources = (source("a", [40, 40]), source("b", [40]))
    batches = GlobalBatches(12, spans=2, drop=False)
    weights = weights_of(None, sources)
    mixture = MixtureDeal(
        sources, weights, 120, batch_size=6, grouping="source", spans=2, global_batches=batches
    )
    deal = ElasticDeal(mixture, 12, 2)
    counts = [40, 40, 40]
    size = 12 // world_size
    for rank in range(world_size):
        topology = Topology(rank, world_size)
        read = walk(deal.share(0, topology), counts)
        for place, sample in enumerate(read):
            spare = deal.spare(0, topology, place)
            assert walk(spare.share, counts)[spare.place] == sample
    assert len(read) == 10 * size


def test_ranks_that_do_not_divide_a_global_batch_are_refused() -> None:
    """They would not get equal parts."""
    with pytest.raises(ConfigError, match="divided among 5 ranks"):
        ElasticDeal(SampleDeal([120]), 12).share(0, Topology(0, 5))


def test_global_batches_need_counts() -> None:
    """The error says how to count."""
    with pytest.raises(ConfigError) as caught:
        DealOptions(global_batch_size=12).deal(Manifest.of([ShardRef("a")]))
    assert "shardcache index" in str(caught.value.remedy)
