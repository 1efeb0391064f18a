"""elastic.py: global batches for any number of ranks and workers, compared with batches cut from written-out spans."""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcache.errors import ConfigError
from shardcache.protocol import ShardRef
from shardcache_client.order.deal import Assignment, ElasticDeal, SampleDeal, SpanDeal
from shardcache_client.order.lanes import Share
from shardcache_client.order.manifest import Manifest
from shardcache_client.order.rounds import Even, Partition, Topology
from shardcache_client.position.state import Position, ReaderState, in_batches, resume_batches
from support.shards.dealt import Dealt, Place, crew, datasets, mixtures, opened, walk

Batches = list[list[Place]]

jobs = st.tuples(st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(1, 4))


@dataclass(frozen=True)
class Elastic:
    """A deal of global batches of 12 samples, and the reference for it."""

    spans: SpanDeal
    counts: list[int]
    count: int

    @property
    def deal(self) -> ElasticDeal:
        """The deal."""
        return ElasticDeal(self.spans, 12, self.count)

    def batches(self, epoch: int) -> Batches:
        """Return the global batches of an epoch, cut from the orders of its spans."""
        number, piece = self.deal.batches, 12 // self.count
        orders = [
            _walk_all(self.spans, epoch, (span * number * piece, (span + 1) * number * piece), self.counts)
            for span in range(self.count)
        ]
        return [
            [place for order in orders for place in order[batch * piece : (batch + 1) * piece]]
            for batch in range(number)
        ]

    def read(self, epoch: int, cut: Partition, taken: int = 0) -> Batches:
        """Return the global batches of a job, after so many: each rank takes batches from its workers in turn."""
        size = 12 // cut.world_size
        phases = in_batches([self.state(epoch, cut, taken)])[0].position.phases if taken else ()
        shares = [iter(walk(self.deal.share(epoch, 0, reader, phases), self.counts)) for reader in crew(cut)]
        batches: Batches = []
        for batch in range(self.deal.batches - taken):
            readers = [shares[rank * cut.workers + batch % cut.workers] for rank in range(cut.world_size)]
            batches.append([next(reader) for reader in readers for _ in range(size)])
        assert not any(list(reader) for reader in shares)
        return batches

    def state(self, epoch: int, cut: Partition, taken: int) -> ReaderState:
        """Return the state of a single reader after so many batches."""
        one = Partition(1, 1, cut.even, 12)
        return ReaderState("", Position(epoch, taken=12 * taken, given=12 * taken), one)


def _walk_all(spans: SpanDeal, epoch: int, span: tuple[int, int], counts: list[int]) -> list[Place]:
    whole = spans.lane(epoch, span).between(0, span[1] - span[0])
    return walk(Share((whole,), whole.samples), counts)


@st.composite
def elastics(draw: st.DrawFn) -> Elastic:
    """A dataset or a mixture."""
    dealt = draw(datasets(6, 12) | mixtures())
    return Elastic(
        dealt.deal(draw(st.sampled_from(["pad", "drop"]))), dealt.shards, draw(st.sampled_from([1, 2, 3, 4]))
    )


@settings(max_examples=60, deadline=None)
@given(elastics(), jobs, st.integers(0, 2), st.just(0) | st.integers(0, 100))
def test_global_batches_are_the_same_for_any_job(
    elastic: Elastic, job: tuple[int, int], epoch: int, taken: int
) -> None:
    """Sample by sample, whatever the ranks and workers: those cut from the spans, from any number of them on."""
    taken %= elastic.deal.batches + 1
    assert elastic.read(epoch, Partition(*job, elastic.deal.even), taken) == elastic.batches(epoch)[taken:]


@settings(max_examples=30, deadline=None)
@given(datasets(6, 12), st.sampled_from([1, 2, 3, 4]), st.sampled_from(["pad", "drop"]))
def test_global_batches_have_every_sample(dealt: Dealt, count: int, even: Even) -> None:
    """Once, but for fewer than one batch, which are repeated to fill the last one, or left out."""
    elastic = Elastic(replace(dealt, samples=None).deal(even), dealt.shards, count)
    read, every = Counter(chain.from_iterable(elastic.batches(0))), replace(dealt, samples=None).epoch(0)
    assert abs(read.total() - every.total()) < 12
    assert set(read) == set(every) if even == "pad" else read <= every


@settings(max_examples=60, deadline=None)
@given(elastics().map(lambda elastic: elastic.deal) | mixtures().map(Dealt.deal), jobs, st.integers(0, 100))
def test_a_plan_has_the_shards_in_the_order_of_need(deal: SpanDeal, job: tuple[int, int], taken: int) -> None:
    """From any place on, for each reader: the order in which passing over their samples opens them, of all sources."""
    for reader in crew(Partition(*job)):
        share = deal.share(1, 0, reader)
        rest = share.behind(min(taken, share.samples or 0))
        assert [*rest.shards()] == [shard for part in rest.segments for shards, _ in opened(part) for shard in shards]


def state(reader: int, given: int, cut: Partition) -> ReaderState:
    """Return the state of a reader that has yielded so many samples."""
    return ReaderState("", Position(0, taken=given + 1, given=given), cut, reader=reader)


def test_states_are_counted_in_batches() -> None:
    """Of a rank's workers, which are in step with all others; samples that were skipped are no batches."""
    cut = Partition(2, 2, "pad", 6)
    states = [state(2, 18, cut), state(3, 12, cut)]
    start = resume_batches(in_batches(states), Partition(1, 1, "pad", 12), Topology())
    assert (start.taken, start.phases[0].taken) == (0, (18, 12))
    assert ElasticDeal(SampleDeal([120]), 12).share(0, 0, Topology(), start.phases).samples == 120 - 5 * 12
    assert resume_batches(states, cut, Topology(0, 2, 1, 2)) == Position(0, taken=12, given=12)
    with pytest.raises(ConfigError, match="some workers are missing"):
        in_batches(states[:1])


def test_state_within_a_batch_resumes_with_the_next_sample_or_with_the_batch() -> None:
    """The same readers read on where they were; others begin the batch again."""
    cut = Partition(1, 1, "pad", 12)
    states = in_batches([state(0, 30, cut)])
    assert resume_batches(states, cut, Topology()).given == 30
    others = resume_batches(states, Partition(2, 1, "pad", 6), Topology(1, 2))
    assert ElasticDeal(SampleDeal([120]), 12).share(0, 0, Topology(1, 2), others.phases).samples == 48


def test_ranks_that_do_not_divide_a_global_batch_are_refused() -> None:
    """They would not get equal parts."""
    with pytest.raises(ConfigError, match="divided among 5 ranks"):
        ElasticDeal(SampleDeal([120]), 12).share(0, 0, Topology(0, 5))


def test_global_batches_need_counts() -> None:
    """The error says how to count."""
    with pytest.raises(ConfigError) as caught:
        Assignment(global_batch_size=12).deal(Manifest.of([ShardRef("a")]))
    assert "shardcache index" in str(caught.value.remedy)
